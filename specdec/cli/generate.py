"""`specdec generate`: one prompt, streamed."""

from __future__ import annotations

import asyncio
import json
import sys
from enum import StrEnum
from typing import Annotated

import grpc
import typer
from google.protobuf.message import Message
from rich.text import Text

from specdec import services
from specdec.cli.client import Result, explain, stream
from specdec.cli.display import legend, show
from specdec.cli.terminal import fail, stderr, stdout
from specdec.v1 import common_pb2, gateway_pb2


class Rule(StrEnum):
    """The acceptance rules by the names of the command line."""

    REJECTION = "rejection"
    BLOCK = "block"
    COUPLED = "coupled"


def generate(
    prompt: Annotated[
        str,
        typer.Argument(metavar="PROMPT", help="The prompt; - reads it from standard input."),
    ],
    address: Annotated[
        str, typer.Option(help="host:port of the gateway.")
    ] = f"127.0.0.1:{services.GATEWAY.port}",
    chat: Annotated[
        bool, typer.Option("--chat", help="Send the prompt as a user's turn of a conversation.")
    ] = False,
    temperature: Annotated[
        float | None, typer.Option(help="0 decodes greedily; the server's default if left out.")
    ] = None,
    top_k: Annotated[int | None, typer.Option(help="Keep the k likeliest tokens.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Keep the likeliest tokens up to p.")] = None,
    min_p: Annotated[
        float | None, typer.Option(help="Drop tokens below this share of the likeliest.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Makes the output repeatable.")] = None,
    max_new_tokens: Annotated[int | None, typer.Option(help="Most tokens to generate.")] = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="Stop before this string; may be repeated.")
    ] = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Go on after the end of the sequence.")
    ] = False,
    no_speculation: Annotated[
        bool, typer.Option("--no-speculation", help="Decode with the target alone.")
    ] = False,
    rule: Annotated[
        Rule | None, typer.Option(help="The acceptance rule; the server's default if left out.")
    ] = None,
    num_draft_tokens: Annotated[
        int | None, typer.Option("-k", "--num-draft-tokens", help="Drafted tokens a round.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object with the text and statistics.")
    ] = False,
) -> None:
    """Generate text from a prompt; show what the draft got right.

    The text goes to standard output, statistics to standard error.
    """
    text = _utf8(prompt, "PROMPT")
    request = gateway_pb2.GenerateRequest()
    _set(
        request.sampling, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed
    )
    _set(request.stopping, max_new_tokens=max_new_tokens, ignore_eos=ignore_eos)
    request.stopping.stop_strings.extend(_utf8(string, "--stop") for string in stop or ())
    _set(request.speculation, num_draft_tokens=num_draft_tokens)
    if no_speculation:
        request.speculation.enabled = False
    if rule is not None:
        name = f"ACCEPTANCE_RULE_{rule.name}"
        request.speculation.acceptance_rule = common_pb2.AcceptanceRule.Value(name)
    if prompt == "-":
        text = _standard_input()
    if chat:
        request.chat.messages.add(role="user", content=text)
    else:
        request.text = text
    _run(address, request, as_json=as_json)


def _set(message: Message, **values: float | None) -> None:
    """Sets the fields that were given.

    Raises:
        typer.BadParameter: a number does not fit its field. Its name is that of the flag.
    """
    for name, value in values.items():
        if value is None:
            continue
        try:
            setattr(message, name, value)
        except ValueError:
            flag = f"--{name.replace('_', '-')}"
            raise typer.BadParameter(f"{value} is out of range", param_hint=flag) from None


def _utf8(text: str, hint: str) -> str:
    try:
        text.encode()
    except UnicodeError:
        raise typer.BadParameter("this is not UTF-8 text", param_hint=hint) from None
    return text


def _standard_input() -> str:
    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeError:
        fail("standard input is not UTF-8 text")


def _run(address: str, request: gateway_pb2.GenerateRequest, *, as_json: bool) -> None:
    """Generates and prints. Statistics go to standard error, so that a pipe gets the text alone.

    Raises:
        typer.Exit: 1 after one line that says what went wrong, 130 at Ctrl-C.
    """
    console, aside = stdout(), stderr()
    try:
        if as_json:
            result = asyncio.run(_collect(address, request))
            typer.echo(json.dumps(result.to_dict()))
            return
        result = asyncio.run(show(address, request, console))
    except grpc.aio.AioRpcError as error:
        fail(explain(error, address))
    except KeyboardInterrupt:
        aside.print("\nstopped")
        raise typer.Exit(130) from None
    colours = legend(console)
    if colours is not None and aside.is_terminal:
        aside.print(colours)
    aside.print(Text(result.summary(), "dim"))


async def _collect(address: str, request: gateway_pb2.GenerateRequest) -> Result:
    result = Result()
    async for _ in stream(address, request, result):
        pass
    return result
