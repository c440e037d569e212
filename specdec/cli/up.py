"""`specdec up`: the three services on this machine."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from specdec import services
from specdec.cli.supervisor import Child, Report, ServiceDied, running
from specdec.models.cache import default_target_path, is_pulled

_COLOURS = {services.GATEWAY: "cyan", services.DRAFT: "green", services.VERIFIER: "magenta"}


def reporter(console: Console) -> Report:
    """Prints what happens to a service, one line each."""

    def report(service: services.Service, line: str) -> None:
        console.print(Text(f"{service.name:9}", _COLOURS[service]), Text(line))

    return report


def children(
    *,
    target: str | None,
    draft: str | None,
    ports: Sequence[int],
    target_options: Sequence[str] = (),
    draft_options: Sequence[str] = (),
    gateway_options: Sequence[str] = (),
) -> list[Child]:
    """The services of a pair of models, in the order in which they are to be ended.

    Args:
        target: hub id, folder or GGUF file; None for the embedded default pair.
        draft: likewise; None with a target means plain decoding.
        ports: of gateway, draft and verifier.
        target_options: further arguments for the verifier.
        draft_options: likewise for the draft.
        gateway_options: likewise for the gateway.
    """
    gateway_port, draft_port, verifier_port = map(str, ports)
    with_draft = draft is not None or target is None
    found = [
        Child(
            services.GATEWAY,
            "gateway",
            (
                *("--port", gateway_port, "--verifier-address", f"127.0.0.1:{verifier_port}"),
                *("--draft-address", f"127.0.0.1:{draft_port}" if with_draft else ""),
                *gateway_options,
            ),
        )
    ]
    if with_draft:
        model = ("--model", draft) if draft else ()
        found.append(
            Child(services.DRAFT, "draft_service", ("--port", draft_port, *model, *draft_options))
        )
    model = ("--model", target) if target else ()
    found.append(
        Child(
            services.VERIFIER,
            "verifier_service",
            ("--port", verifier_port, *model, *target_options),
        )
    )
    return found


def shared_cores() -> int:
    """How many cores each of the two model services should use on a CPU."""
    return max(1, len(os.sched_getaffinity(0)) // 2)


def up(
    target: Annotated[
        str | None,
        typer.Option(help="Target model: hub id, folder or GGUF file. [embedded default]"),
    ] = None,
    draft: Annotated[
        str | None,
        typer.Option(help="Draft model with the same tokenizer. [made from the default target]"),
    ] = None,
    target_device: Annotated[str, typer.Option(help="Torch device of the target.")] = "auto",
    draft_device: Annotated[str, typer.Option(help="Torch device of the draft.")] = "auto",
    dtype: Annotated[
        str, typer.Option(help="auto, float32, bfloat16 or float16, for both models.")
    ] = "auto",
    num_threads: Annotated[
        int | None, typer.Option(min=1, help="Cores for each model. [half of them]")
    ] = None,
    rule: Annotated[
        str, typer.Option(help="Default acceptance rule: rejection, block or coupled.")
    ] = "coupled",
    num_draft_tokens: Annotated[
        int, typer.Option("-k", "--num-draft-tokens", min=0, help="Default drafted tokens a round.")
    ] = 5,
    gateway_port: Annotated[int, typer.Option(help="Port of the gateway.")] = services.GATEWAY.port,
    draft_port: Annotated[int, typer.Option(help="Port of the draft.")] = services.DRAFT.port,
    verifier_port: Annotated[
        int, typer.Option(help="Port of the verifier.")
    ] = services.VERIFIER.port,
) -> None:
    """Start draft, verifier and gateway on this machine, and keep them up until Ctrl-C."""
    console = Console(highlight=False, soft_wrap=True)
    if target is None and draft is not None:
        raise typer.BadParameter("name the --target that this --draft is for")
    if target is None and not is_pulled(default_target_path()):
        console.print("error: the default model is not there: run `specdec models pull` first")
        raise typer.Exit(1)
    common = ("--dtype", dtype, "--num-threads", str(num_threads or shared_cores()))
    pair = children(
        target=target,
        draft=draft,
        ports=(gateway_port, draft_port, verifier_port),
        target_options=(*common, "--device", target_device),
        draft_options=(*common, "--device", draft_device),
        gateway_options=("--acceptance-rule", rule, "--num-draft-tokens", str(num_draft_tokens)),
    )

    async def stay() -> None:
        task = asyncio.current_task()
        assert task is not None
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, task.cancel)
        async with running(pair, reporter(console)) as keeper:
            default = gateway_port == services.GATEWAY.port
            address = "" if default else f" --address 127.0.0.1:{gateway_port}"
            console.print(f'\nReady. Try: specdec generate{address} "Once upon a time"')
            if len(pair) < len(services.ALL):
                console.print("There is no --draft, so every token is decoded plainly.")
            console.print("Ctrl-C stops all three.\n" if len(pair) > 2 else "Ctrl-C stops both.\n")
            await keeper

    try:
        asyncio.run(stay())
    except ServiceDied as error:
        console.print(Text(f"error: {error}", "red"))
        raise typer.Exit(1) from None
    except asyncio.CancelledError:
        console.print("stopped")
