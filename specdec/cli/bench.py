"""`specdec bench`: a load test of a gateway, with and without speculation.

With --drafts it compares drafts instead, see `bench_drafts`.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated

import grpc
import typer
from rich.console import Console

from specdec.bench import plots, prompts, report
from specdec.bench.sweep import MODES, PLAIN, Measurement, Plan, Workload, sweep, warm_up
from specdec.channels import ClientTls, open_channel
from specdec.cli import bench_drafts, bench_flags, foreground, pair
from specdec.cli.api_key import ApiKey, read_api_key
from specdec.cli.bench_drafts import Comparison, Recording
from specdec.cli.bench_tables import Display, show
from specdec.cli.client import explain
from specdec.cli.generate import Rule
from specdec.cli.supervisor import ServiceDied, running
from specdec.cli.terminal import fail, stderr, stdout, tell
from specdec.cli.tls_flags import TlsCa, TlsCert, TlsKey, TlsName, client_tls
from specdec.models.cache import default_target_path, is_pulled
from specdec.services import VERIFIER

_MOST_CLIENTS = 1024
_MOST_DRAFTED = 256


def bench(
    context: typer.Context,
    address: Annotated[
        str | None,
        typer.Option(help="host:port of a running gateway. [starts the services itself]"),
    ] = None,
    remote: Annotated[
        bool, typer.Option("--remote", help="Allow an --address of another machine.")
    ] = False,
    concurrency: Annotated[
        str, typer.Option(help="Numbers of clients at once, separated by commas.")
    ] = "1,2,4,8,16,32",
    modes: Annotated[
        str, typer.Option(help="plain, speculative, or both, separated by commas.")
    ] = ",".join(MODES),
    repeats: Annotated[
        int, typer.Option(min=1, max=100, help="Measure everything so often, for medians.")
    ] = 3,
    requests: Annotated[
        int | None,
        typer.Option(min=1, help="Requests of a measurement. [2 for each client, at least 4]"),
    ] = None,
    duration: Annotated[
        float,
        typer.Option(min=0.1, max=3600, help="Seconds after which a measurement sends no more."),
    ] = 60.0,
    timeout: Annotated[
        float, typer.Option(min=0.1, max=3600, help="Seconds after which a request has failed.")
    ] = 120.0,
    kinds: Annotated[str, typer.Option(help="Kinds of prompts, separated by commas.")] = ",".join(
        prompts.KINDS
    ),
    max_new_tokens: Annotated[
        int, typer.Option(min=1, max=4096, help="Most tokens of a request.")
    ] = 64,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Go on to --max-new-tokens in any case.")
    ] = False,
    num_draft_tokens: Annotated[
        str | None,
        typer.Option(
            "-k",
            "--num-draft-tokens",
            help="Most drafted tokens a round; with --drafts several, separated by commas.",
        ),
    ] = None,
    draft_topk: Annotated[
        int | None, typer.Option(min=1, help="As of `specdec generate`, under load.")
    ] = None,
    adaptive: Annotated[
        bool | None, typer.Option("--adaptive/--no-adaptive", help="Likewise.")
    ] = None,
    run_ahead: Annotated[int | None, typer.Option(min=0, help="Likewise.")] = None,
    rule: Annotated[
        Rule | None, typer.Option(help="The acceptance rule; the server's default if left out.")
    ] = None,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 decodes greedily.")] = 0.0,
    seed: Annotated[int, typer.Option(min=0, help="Of sampling and of the prompts' order.")] = 0,
    target: Annotated[
        str | None, typer.Option(help="As of `specdec up`, for the services that it starts.")
    ] = None,
    draft: Annotated[str | None, typer.Option(help="Likewise.")] = None,
    dtype: Annotated[str, typer.Option(help="Likewise.")] = "auto",
    num_threads: Annotated[
        int | None, typer.Option(min=1, help="Cores for each model. [half; all if only plain]")
    ] = None,
    drafts: Annotated[
        str | None,
        typer.Option(
            help="Score these drafts on one run of the target: default, lookup, suffix, a model or "
            "host:port, separated by commas; + joins some to one, as in lookup+model."
        ),
    ] = None,
    save_log: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Keep what the target wrote, for --from-log."),
    ] = None,
    from_log: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Score --drafts on a kept log, without the target."),
    ] = None,
    verifier_address: Annotated[
        str, typer.Option(help="host:port of the --address's verifier, for logs.")
    ] = f"127.0.0.1:{VERIFIER.port}",
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write all results as JSON.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Draw the results as PNG files.")
    ] = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_name: TlsName = None,
    api_key: ApiKey = None,
) -> None:
    """Measure speed under load, or compare drafts.

    Under load with and without speculation; drafts on one run of the target.

    The table goes to standard output, progress to standard error.
    """
    settings = {
        **{"address": address, "target": target, "draft": draft, "dtype": dtype},
        **{"num_threads": num_threads, "concurrency": concurrency, "modes": modes},
        **{"repeats": repeats, "requests": requests, "duration": duration, "timeout": timeout},
        **{"kinds": kinds, "max_new_tokens": max_new_tokens, "ignore_eos": ignore_eos},
        **{"num_draft_tokens": num_draft_tokens, "rule": rule, "seed": seed},
        **{"draft_topk": draft_topk, "adaptive": adaptive, "run_ahead": run_ahead},
        **{"temperature": temperature, "drafts": drafts, "verifier_address": verifier_address},
        **{"from_log": from_log and str(from_log), "save_log": save_log and str(save_log)},
    }
    tls = client_tls(tls_ca, tls_cert, tls_key, tls_name)
    key = read_api_key(api_key)
    bench_flags.refuse_tls(context, running=address is not None or drafts is not None)
    if target is None and draft is not None:
        raise typer.BadParameter("name the --target that it is for", param_hint="--draft")
    ks = (
        []
        if num_draft_tokens is None
        else bench_flags.numbers(num_draft_tokens, "-k", "tokens", 256)
    )
    workload = Workload(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        seed=seed,
        num_draft_tokens=ks[0] if ks else None,
        draft_topk=draft_topk,
        adaptive=adaptive,
        run_ahead=run_ahead,
        acceptance_rule=bench_flags.rule_value(rule),
        ignore_eos=ignore_eos,
    )
    chosen_prompts = prompts.mixed(bench_flags.choices(kinds, prompts.KINDS, "--kinds"), seed)
    for host in (address, verifier_address):
        bench_flags.refuse_remote(host, remote=remote)
    if plot is not None and (advice := plots.missing()):
        fail(advice)
    for flag, file in (("--json", json_file), ("--save-log", save_log)):
        if file is not None and not file.parent.is_dir():
            fail(f"there is no folder {file.parent} for {flag}")
    if drafts is not None or save_log is not None or from_log is not None:
        bench_flags.refuse_flags(context, recorded=from_log is not None)
        named = bench_flags.named(drafts, needed=from_log is not None)
        for one in named:
            bench_flags.refuse_remote(one.address, remote=remote)
        recording = Recording(
            addresses=None if address is None else (address, verifier_address),
            target=target,
            prompts=bench_flags.first(chosen_prompts, requests),
            workload=workload,
            duration=duration,
        )
        comparison = Comparison(
            source=recording if from_log is None else bench_flags.read_log(from_log),
            drafts=named,
            ks=ks or [5],
            options=bench_flags.model_options(dtype, num_threads or pair.shared_cores()),
            timeout=timeout,
            tls=tls,
            api_key=key,
        )
        exit_code = bench_drafts.compare(
            comparison, save_log=save_log, json_file=json_file, plot=plot, settings=settings
        )
        raise typer.Exit(exit_code)
    if len(ks) > 1:
        raise typer.BadParameter("several numbers need --drafts", param_hint="-k")
    chosen = bench_flags.choices(modes, MODES, "--modes")
    try:
        plan = Plan(
            prompts=chosen_prompts,
            concurrency=bench_flags.numbers(concurrency, "--concurrency", "clients", _MOST_CLIENTS),
            modes=chosen,
            repeats=repeats,
            requests=requests,
            duration=duration,
            timeout=timeout,
            workload=workload,
        )
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--concurrency") from None
    services = _services(address, target, draft, dtype, num_threads, chosen, stderr())
    # What it starts itself is on this machine, in plaintext.
    tls = tls if address is not None else None
    results: list[Measurement] = []
    exit_code = _run(services, plan, results, tls, key, stderr())
    show(results, stdout())
    interrupted = exit_code != 0
    if json_file is not None:
        document = report.document(results, settings, interrupted=interrupted)
        json_file.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    if plot is not None and results:
        plots.draw(report.levels(results), report.kinds(results), plot)
        tell(stderr(), f"plots are in {plot}")
    raise typer.Exit(exit_code)


def _run(
    services: contextlib.AbstractAsyncContextManager[str],
    plan: Plan,
    results: list[Measurement],
    tls: ClientTls | None,
    api_key: str | None,
    console: Console,
) -> int:
    """Sweeps and fills the results. Gives the exit code: other than 0 if a signal ended it."""
    used = ""

    async def work() -> None:
        nonlocal used
        async with services as used, open_channel(used, tls, api_key=api_key) as channel:
            with Display(console, len(list(plan.points()))) as listener:
                await warm_up(channel, plan)
                await sweep(channel, plan, results, listener)

    try:
        foreground.run(work(), lambda: tell(console, "\nstopping"))
    except ServiceDied as error:
        fail(str(error))
    except grpc.aio.AioRpcError as error:
        fail(explain(error, used))
    except foreground.Stopped as stopped:
        return stopped.exit_code
    return 0


@asynccontextmanager
async def _services(
    address: str | None,
    target: str | None,
    draft: str | None,
    dtype: str,
    num_threads: int | None,
    modes: Sequence[str],
    console: Console,
) -> AsyncIterator[str]:
    """The gateway's address: of the one that is there, or of one started for the block."""
    if address is not None:
        yield address
        return
    if target is None and not is_pulled(default_target_path()):
        fail("the default model is not there: run `specdec models pull` first")
    if list(modes) == [PLAIN]:
        # Without a draft the verifier may have all cores.
        draft, target = None, target or str(default_target_path())
    else:
        num_threads = num_threads or pair.shared_cores()
    options = bench_flags.model_options(dtype, num_threads)
    children = pair.children(
        target=target,
        draft=draft,
        ports=pair.free_ports(),
        target_options=options,
        draft_options=options,
    )
    tell(console, "Starting the services; the models take some seconds.")
    async with running(children, pair.reporter(console)):
        yield f"127.0.0.1:{children[0].port}"
