"""`specdec up`: the three services on this machine."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Annotated

import typer
from rich.console import Console

from specdec import services
from specdec.cli import foreground, pair
from specdec.cli.generate import Rule
from specdec.cli.supervisor import Child, ServiceDied, running
from specdec.cli.terminal import fail, stdout, tell
from specdec.models.cache import default_target_path, is_pulled


def up(
    target: Annotated[
        str | None,
        typer.Option(help="Target model: hub id, folder or GGUF file. [the embedded default]"),
    ] = None,
    draft: Annotated[
        str | None,
        typer.Option(help="Draft model with the same tokenizer. [distilled from the default]"),
    ] = None,
    translate: Annotated[
        bool,
        typer.Option("--translate", help="Whether --draft may have another tokenizer."),
    ] = False,
    drafters: Annotated[
        str | None,
        typer.Option(
            help="What drafts, the preferred first: model, lookup, suffix. Only model needs a "
            "--draft. [lookup,model]"
        ),
    ] = None,
    target_device: Annotated[str, typer.Option(help="Torch device of the target.")] = "auto",
    draft_device: Annotated[str, typer.Option(help="Torch device of the draft.")] = "auto",
    dtype: Annotated[
        str, typer.Option(help="auto, float32, bfloat16 or float16, for both models.")
    ] = "auto",
    num_threads: Annotated[
        int | None, typer.Option(min=1, help="Cores for each model. [half of them]")
    ] = None,
    rule: Annotated[Rule, typer.Option(help="Default acceptance rule.")] = Rule.COUPLED,
    num_draft_tokens: Annotated[
        int | None,
        typer.Option(
            "-k", "--num-draft-tokens", min=0, help="Most drafted tokens a round, by default."
        ),
    ] = None,
    draft_topk: Annotated[
        int | None,
        typer.Option(
            min=1, help="Most of them that follow one and the same token, by default; 1: chains."
        ),
    ] = None,
    run_ahead: Annotated[
        int | None,
        typer.Option(
            min=0, help="For how many verdicts the next proposal is prepared, by default."
        ),
    ] = None,
    gateway_port: Annotated[
        int, typer.Option(min=1, max=65535, help="Port of the gateway.")
    ] = services.GATEWAY.port,
    draft_port: Annotated[
        int, typer.Option(min=1, max=65535, help="Port of the draft.")
    ] = services.DRAFT.port,
    verifier_port: Annotated[
        int, typer.Option(min=1, max=65535, help="Port of the verifier.")
    ] = services.VERIFIER.port,
) -> None:
    """Keep all three services up on this machine until Ctrl-C."""
    if target is None and draft is not None:
        raise typer.BadParameter("name the --target that it is for", param_hint="--draft")
    if translate and draft is None:
        raise typer.BadParameter(
            "name the --draft that has another tokenizer", param_hint="--translate"
        )
    if target is not None and draft is None and "model" in (drafters or "").split(","):
        raise typer.BadParameter("name the --draft that is the model", param_hint="--drafters")
    if target is None and not is_pulled(default_target_path()):
        fail("the default model is not there: run `specdec models pull` first")
    common = ("--dtype", dtype, "--num-threads", str(num_threads or pair.shared_cores()))
    children = pair.children(
        target=target,
        draft=draft,
        drafters=drafters,
        ports=(gateway_port, draft_port, verifier_port),
        target_options=(*common, "--device", target_device),
        draft_options=(
            *common,
            *("--device", draft_device),
            *(("--target-tokenizer", target) if translate and target else ()),
        ),
        gateway_options=(
            *("--acceptance-rule", rule),
            *_given("--num-draft-tokens", num_draft_tokens),
            *_given("--draft-topk", draft_topk),
            *_given("--run-ahead", run_ahead),
        ),
    )
    _refuse_taken_ports(children)
    console = stdout()
    try:
        foreground.run(
            _stay(children, console),
            lambda: tell(console, "\nstopping: calls may finish; Ctrl-C again ends them"),
        )
    except ServiceDied as error:
        fail(str(error))
    except foreground.Stopped:
        tell(console, "stopped")


def _given(flag: str, value: int | None) -> tuple[str, ...]:
    return () if value is None else (flag, str(value))


async def _stay(children: Sequence[Child], console: Console) -> None:
    tell(console, "Starting; the models take some seconds.")
    async with running(children, pair.reporter(console)) as keeper:
        port = children[0].port
        address = "" if port == services.GATEWAY.port else f" --address 127.0.0.1:{port}"
        tell(console, f'\nReady. Try: specdec generate{address} "Once upon a time"')
        if len(children) < len(services.ALL):
            tell(console, "There is no --draft, so every token is decoded plainly. See --drafters.")
        tell(console, f"Ctrl-C stops {'all three' if len(children) > 2 else 'both'}.\n")
        await keeper


def _refuse_taken_ports(children: Sequence[Child]) -> None:
    """Fails at once and by the name of a flag, where a service would after loading its model."""
    sockets = []
    try:
        for child in children:
            sockets.append(probe := socket.socket())
            # As the services do, or what a stopped one leaves behind would look like a service.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", child.port))
            probe.listen()
    except OSError as error:
        name = child.service.name
        fail(
            f"the {name} cannot listen on 127.0.0.1:{child.port} ({error.strerror}): "
            f"choose another port with --{name}-port, or stop what has this one"
        )
    finally:
        for probe in sockets:
            probe.close()
