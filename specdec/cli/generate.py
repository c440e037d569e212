"""`specdec generate`: one prompt, streamed."""

from __future__ import annotations

import asyncio
import json
from enum import StrEnum
from typing import Annotated

import grpc
import typer
from rich.text import Text

from specdec import services
from specdec.channels import ClientTls
from specdec.cli.api_key import ApiKey, read_api_key
from specdec.cli.client import explain
from specdec.cli.display import legend, show
from specdec.cli.form import grammar as grammar_of
from specdec.cli.form import set_field, set_fields, standard_input, utf8
from specdec.cli.samples import collect, samples_to_dict, show_samples
from specdec.cli.terminal import fail, stderr, stdout
from specdec.cli.tls_flags import TlsCa, TlsCert, TlsKey, TlsName, client_tls
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
    repetition_penalty: Annotated[
        float | None, typer.Option(help="Makes tokens of prompt and output less likely, above 1.")
    ] = None,
    presence_penalty: Annotated[
        float | None, typer.Option(help="Taken off the logits of tokens in the output.")
    ] = None,
    frequency_penalty: Annotated[
        float | None, typer.Option(help="The same, for every time that they occur.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Makes the output repeatable.")] = None,
    json_schema: Annotated[
        str | None,
        typer.Option(metavar="TEXT|@FILE", help="The output is JSON that this schema allows."),
    ] = None,
    regex: Annotated[str | None, typer.Option(help="The whole output matches this.")] = None,
    grammar: Annotated[
        str | None,
        typer.Option(metavar="TEXT|@FILE", help="The output follows this EBNF, written as Lark."),
    ] = None,
    max_new_tokens: Annotated[int | None, typer.Option(help="Most tokens to generate.")] = None,
    min_new_tokens: Annotated[
        int | None, typer.Option(help="Fewest tokens, before anything ends the generation.")
    ] = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="Stop before this string; may be repeated.")
    ] = None,
    include_stop_string: Annotated[
        bool, typer.Option("--include-stop-string", help="Let the text end with what stopped it.")
    ] = False,
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
        int | None, typer.Option("-k", "--num-draft-tokens", help="Most drafted tokens a round.")
    ] = None,
    draft_topk: Annotated[
        int | None,
        typer.Option(help="Most of them that follow one and the same token; 1 is a chain."),
    ] = None,
    adaptive: Annotated[
        bool | None,
        typer.Option(
            "--adaptive/--no-adaptive", help="Whether fewer are drafted where more do not pay."
        ),
    ] = None,
    run_ahead: Annotated[
        int | None,
        typer.Option(help="For how many verdicts the next proposal is prepared meanwhile."),
    ] = None,
    logprobs: Annotated[
        int | None,
        typer.Option(metavar="N", help="Add log-probabilities, and the N likeliest; needs --json."),
    ] = None,
    samples: Annotated[
        int,
        typer.Option(
            "-n",
            "--samples",
            metavar="N",
            help="Generate N answers. With --json and N over 1 they are a list, `samples`.",
        ),
    ] = 1,
    prefix_salt: Annotated[
        str,
        typer.Option(
            metavar="TEXT", help="Share the computation of the prompt only with the same salt."
        ),
    ] = "",
    no_prefix_cache: Annotated[
        bool,
        typer.Option("--no-prefix-cache", help="Share the computation of the prompt with nobody."),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object with the text and statistics.")
    ] = False,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_name: TlsName = None,
    api_key: ApiKey = None,
) -> None:
    """Generate text from a prompt; show what the draft got right.

    The text goes to standard output, statistics to standard error.
    """
    if logprobs is not None and not as_json:
        raise typer.BadParameter(
            "log-probabilities are printed with --json only", param_hint="--logprobs"
        )
    tls = client_tls(tls_ca, tls_cert, tls_key, tls_name)
    key = read_api_key(api_key)
    text = utf8(prompt, "PROMPT")
    request = gateway_pb2.GenerateRequest()
    set_fields(
        request.sampling,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        seed=seed,
    )
    form = grammar_of(json_schema, regex, grammar)
    if form is not None:
        request.sampling.grammar.CopyFrom(form)
    set_fields(
        request.stopping,
        max_new_tokens=max_new_tokens,
        min_new_tokens=min_new_tokens,
        include_stop_string=include_stop_string,
        ignore_eos=ignore_eos,
    )
    request.stopping.stop_strings.extend(utf8(string, "--stop") for string in stop or ())
    set_fields(
        request.speculation,
        num_draft_tokens=num_draft_tokens,
        draft_topk=draft_topk,
        run_ahead=run_ahead,
    )
    if adaptive is not None:
        request.speculation.adaptive = adaptive
    if no_speculation:
        request.speculation.enabled = False
    if rule is not None:
        name = f"ACCEPTANCE_RULE_{rule.name}"
        request.speculation.acceptance_rule = common_pb2.AcceptanceRule.Value(name)
    if logprobs is not None:
        set_field(request.logprobs, "num_top", logprobs, "--logprobs")
    if samples != 1:
        set_field(request, "n", samples, "--samples")
    if prefix_salt:
        request.prefix_cache.salt = utf8(prefix_salt, "--prefix-salt")
    if no_prefix_cache:
        request.prefix_cache.bypass = True
    if prompt == "-":
        text = standard_input()
    if chat:
        request.chat.messages.add(role="user", content=text)
    else:
        request.text = text
    _run(address, request, tls, key, as_json=as_json)


def _run(
    address: str,
    request: gateway_pb2.GenerateRequest,
    tls: ClientTls | None,
    api_key: str | None,
    *,
    as_json: bool,
) -> None:
    """Generates and prints. Statistics go to standard error, so that a pipe gets the text alone.

    Raises:
        typer.Exit: 1 after one line that says what went wrong, 130 at Ctrl-C.
    """
    console, aside = stdout(), stderr()
    try:
        if as_json:
            results = asyncio.run(collect(address, request, tls, api_key))
            typer.echo(json.dumps(samples_to_dict(results)))
            return
        if request.n > 1:
            results = asyncio.run(collect(address, request, tls, api_key))
            show_samples(results, console, aside)
            return
        result = asyncio.run(show(address, request, console, tls, api_key))
    except grpc.aio.AioRpcError as error:
        fail(explain(error, address))
    except KeyboardInterrupt:
        aside.print("\nstopped")
        raise typer.Exit(130) from None
    colours = legend(console)
    if colours is not None and aside.is_terminal:
        aside.print(colours)
    aside.print(Text(result.summary(), "dim"))
