"""`specdec demo`: models, services, one generation, and everything cleaned up."""

from __future__ import annotations

import asyncio
import socket
from typing import Annotated

import grpc
import typer
from rich.console import Console
from rich.text import Text

from specdec.cli import generate, models, up
from specdec.cli.supervisor import ServiceDied, running
from specdec.models.cache import default_target_path, is_pulled
from specdec.models.child import ModelPullError
from specdec.v1 import gateway_pb2


def demo(
    prompt: Annotated[
        str, typer.Option(help="What to ask.")
    ] = "Write a Python function that reverses a string.",
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Most tokens to generate.")] = 128,
) -> None:
    """Pull the default model, start the three services, stream one answer, stop them."""
    console = Console(highlight=False, soft_wrap=True)
    if not is_pulled(default_target_path()):
        try:
            models.pull_with_progress()
        except ModelPullError as error:
            console.print(Text(f"error: {error}", "red"))
            raise typer.Exit(1) from None
    options = ("--num-threads", str(up.shared_cores()))
    pair = up.children(
        target=None, draft=None, ports=_free_ports(3), target_options=options, draft_options=options
    )
    port = pair[0].arguments[1]
    request = gateway_pb2.GenerateRequest(
        chat=gateway_pb2.ChatInput(messages=[gateway_pb2.ChatMessage(role="user", content=prompt)]),
        sampling=gateway_pb2.SamplingParams(temperature=0.0),
        stopping=gateway_pb2.StoppingParams(max_new_tokens=max_new_tokens),
    )

    async def play() -> generate.Result:
        async with running(pair, up.reporter(console)):
            console.print(Text(f"\n{prompt}\n", "bold"))
            return await generate.show(f"127.0.0.1:{port}", request, console)

    try:
        result = asyncio.run(play())
    except ServiceDied as error:
        console.print(Text(f"error: {error}", "red"))
        raise typer.Exit(1) from None
    except grpc.aio.AioRpcError as error:
        console.print(Text(f"error: {generate.explain(error, f'127.0.0.1:{port}')}", "red"))
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        console.print("\nstopped")
        raise typer.Exit(130) from None
    console.print()
    if console.is_terminal:
        console.print(generate.legend())
    console.print(Text(result.summary()))
    console.print("The services are stopped. `specdec up` keeps them running.")


def _free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now, so that a demo runs beside `specdec up`."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for free in sockets:
            free.bind(("127.0.0.1", 0))
        return [free.getsockname()[1] for free in sockets]
    finally:
        for free in sockets:
            free.close()
