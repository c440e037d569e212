"""`specdec demo`: models, services, one generation, and everything cleaned up."""

from __future__ import annotations

from typing import Annotated

import grpc
import typer
from rich.text import Text

from specdec.cli import foreground, models, pair
from specdec.cli.client import Result, explain
from specdec.cli.display import legend, show
from specdec.cli.supervisor import ServiceDied, running
from specdec.cli.terminal import fail, stdout, tell
from specdec.models.cache import default_target_path, is_pulled
from specdec.models.child import ModelPullError
from specdec.v1 import gateway_pb2


def demo(
    prompt: Annotated[
        str, typer.Option(help="What to ask.")
    ] = "Write a Python function that reverses a string.",
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Most tokens to generate.")] = 128,
) -> None:
    """Pull the default model, stream one answer, clean up."""
    if not is_pulled(default_target_path()):
        try:
            models.pull_with_progress()
        except ModelPullError as error:
            fail(str(error))
    options = ("--num-threads", str(pair.shared_cores()))
    children = pair.children(
        target=None,
        draft=None,
        ports=pair.free_ports(),
        target_options=options,
        draft_options=options,
    )
    address = f"127.0.0.1:{children[0].port}"
    request = gateway_pb2.GenerateRequest(
        chat=gateway_pb2.ChatInput(messages=[gateway_pb2.ChatMessage(role="user", content=prompt)]),
        sampling=gateway_pb2.SamplingParams(temperature=0.0),
        stopping=gateway_pb2.StoppingParams(max_new_tokens=max_new_tokens),
    )
    console = stdout()

    async def play() -> Result:
        tell(console, "Starting three services; the models take some seconds.")
        async with running(children, pair.reporter(console)):
            console.print(Text(f"\n{prompt}\n", "bold"))
            return await show(address, request, console)

    try:
        result = foreground.run(play(), lambda: tell(console, "\nstopping"))
    except ServiceDied as error:
        fail(str(error))
    except grpc.aio.AioRpcError as error:
        fail(explain(error, address))
    except foreground.Stopped as stopped:
        raise typer.Exit(stopped.exit_code) from None
    console.print()
    colours = legend(console)
    if colours is not None:
        console.print(colours)
    console.print(Text(result.summary()))
    console.print("The services are stopped. `specdec up` keeps them running.")
