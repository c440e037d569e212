"""Shows a generation as it comes, each token in the colour of its origin."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from specdec.channels import ClientTls
from specdec.cli.client import Result, stream
from specdec.cli.terminal import write
from specdec.v1 import gateway_pb2

_STYLES = {
    gateway_pb2.TOKEN_ORIGIN_ACCEPTED: "green",
    gateway_pb2.TOKEN_ORIGIN_CORRECTION: "yellow",
    gateway_pb2.TOKEN_ORIGIN_BONUS: "cyan",
}


async def show(
    address: str,
    request: gateway_pb2.GenerateRequest,
    console: Console,
    tls: ClientTls | None = None,
    api_key: str | None = None,
) -> Result:
    """Streams a generation to the console. What was written ends with a newline in any case.

    Raises:
        grpc.aio.AioRpcError: the call failed.
    """
    result = Result()
    try:
        async for chunk in stream(address, request, result, tls, api_key):
            for text, origin in zip(chunk.token_texts, chunk.origins, strict=True):
                write(console, text, _STYLES.get(origin, ""))
    finally:
        if result.text and not result.text.endswith("\n"):
            write(console, "\n")
    return result


def legend(console: Console) -> Text | None:
    """What the colours mean, if the console shows them."""
    if console.color_system is None or console.no_color:
        return None
    return Text.assemble(
        ("accepted", "green"), " · ", ("correction", "yellow"), " · ", ("bonus", "cyan"), " · plain"
    )
