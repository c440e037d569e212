"""`specdec bench --drafts`: one run of the target alone, and drafts that are scored on it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from rich.console import Console

from specdec.bench import draft_plots, draft_scores, record
from specdec.bench.acceptance import acceptance_rate, measured_acceptance_length
from specdec.bench.draft_scores import Trial
from specdec.bench.load import Call
from specdec.bench.prompts import Prompt
from specdec.bench.replay import DraftFault, Replay, replay
from specdec.bench.sweep import Workload
from specdec.bench.target_log import TargetLog
from specdec.channels import ClientTls, open_channel
from specdec.cli import foreground, pair
from specdec.cli.bench_drafts_tables import Steps, show
from specdec.cli.bench_tables import number
from specdec.cli.client import explain
from specdec.cli.draft_names import NamedDraft
from specdec.cli.supervisor import ServiceDied, running
from specdec.cli.terminal import fail, stderr, stdout, tell
from specdec.errors import describe
from specdec.models.cache import default_target_path, is_pulled
from specdec.v1 import draft_pb2_grpc

CURVE_K = 10
"""Each draft is also asked for so many tokens a round, which tells what fewer would give."""


@dataclass(frozen=True)
class Recording:
    """The run of the target."""

    addresses: tuple[str, str] | None
    """host:port of a gateway and a verifier that run. None starts them."""
    target: str | None
    prompts: Sequence[Prompt]
    workload: Workload
    duration: float


@dataclass(frozen=True)
class Comparison:
    """What to do: record or read a log, and score drafts on it."""

    source: Recording | TargetLog
    drafts: Sequence[NamedDraft]
    ks: Sequence[int]
    """Drafted tokens a round; `CURVE_K` comes on top."""
    options: tuple[str, ...]
    """For every model service that is started."""
    timeout: float
    """Seconds after which a request, or the replay of an output, has failed."""
    tls: ClientTls | None
    """For services that run. What is started is on this machine, in plaintext."""
    api_key: str | None
    """For the gateway that runs."""


@dataclass
class _Results:
    """Filled as it goes on, so that what is there survives Ctrl-C."""

    log: TargetLog | None = None
    trials: list[Trial] = field(default_factory=list)


def compare(
    comparison: Comparison,
    *,
    save_log: Path | None,
    json_file: Path | None,
    plot: Path | None,
    settings: dict[str, Any],
) -> int:
    """Runs all of it, prints and writes the results. Gives the exit code.

    That is 1 if a draft failed and other than 0 if a signal ended it, whose results are those that
    were there.
    """
    results = _Results()
    exit_code = _run(comparison, save_log, results, stderr())
    verdicts = []
    if results.log is not None:
        verdicts = [draft_scores.verdict(trial, results.log) for trial in results.trials]
    show(results.log, verdicts, stdout())
    if json_file is not None:
        document = draft_scores.document(
            results.log, verdicts, settings, interrupted=exit_code != 0
        )
        json_file.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    if plot is not None and any(verdict.scores for verdict in verdicts):
        draft_plots.draw(verdicts, plot)
        tell(stderr(), f"plots are in {plot}")
    return exit_code or int(any(verdict.error for verdict in verdicts))


def _run(comparison: Comparison, save_log: Path | None, results: _Results, console: Console) -> int:
    """Fills the results. Gives the exit code: other than 0 if a signal ended it."""

    async def work() -> None:
        with Steps(console) as steps:
            if isinstance(comparison.source, TargetLog):
                results.log = comparison.source
            else:
                await _record(comparison, comparison.source, save_log, results, steps, console)
            assert results.log is not None
            for draft in comparison.drafts:
                results.trials.append(trial := Trial(draft.name))
                await _try(draft, comparison, results.log, trial, steps, console)

    try:
        foreground.run(work(), lambda: tell(console, "\nstopping"))
    except ServiceDied as error:
        fail(str(error))
    except foreground.Stopped as stopped:
        return stopped.exit_code
    return 0


async def _record(
    comparison: Comparison,
    recording: Recording,
    save_log: Path | None,
    results: _Results,
    steps: Steps,
    console: Console,
) -> None:
    """Runs the target, and writes its log even if a signal ends that."""
    count = len(recording.prompts)

    def done(call: Call) -> None:
        steps.advance()
        if call.error is not None:
            tell(console, f"target: {call.prompt_id} failed: {describe(call.error)}")

    tls = None if recording.addresses is None else comparison.tls
    async with _target(recording, comparison.options, console) as (gateway, verifier):
        used = verifier
        try:
            async with open_channel(verifier, tls) as channel:
                info = await record.target_info(channel)
            used = gateway
            results.log = log = record.empty_log(info, recording.workload)
            steps.begin("target", count)
            try:
                async with open_channel(gateway, tls, api_key=comparison.api_key) as channel:
                    await record.record(
                        *(channel, recording.prompts, recording.workload),
                        *(info.max_context_length, log),
                        duration=recording.duration,
                        timeout=comparison.timeout,
                        done=done,
                    )
            finally:
                if save_log is not None and log.outputs:
                    log.write(save_log)
        except grpc.aio.AioRpcError as error:
            if used == verifier:
                fail(f"no verifier at {verifier} ({describe(error)}): see --verifier-address")
            fail(explain(error, gateway))
    steps.end(
        f"target: {len(log.outputs)} of {count} outputs, {log.num_tokens:,} tokens, "
        f"{number(log.step_ms, 2)} ms a token"
    )


@asynccontextmanager
async def _target(
    recording: Recording, options: tuple[str, ...], console: Console
) -> AsyncIterator[tuple[str, str]]:
    """The addresses of gateway and verifier: those that run, or some started for the block."""
    if recording.addresses is not None:
        yield recording.addresses
        return
    if recording.target is None and not is_pulled(default_target_path()):
        fail("the default model is not there: run `specdec models pull` first")
    children = pair.children(
        target=recording.target or str(default_target_path()),
        draft=None,
        ports=pair.free_ports(),
        target_options=options,
    )
    tell(console, "Starting the target; it takes some seconds.")
    async with running(children, pair.reporter(console)):
        gateway, verifier = (f"127.0.0.1:{child.port}" for child in children)
        yield gateway, verifier


async def _try(
    draft: NamedDraft,
    comparison: Comparison,
    log: TargetLog,
    trial: Trial,
    steps: Steps,
    console: Console,
) -> None:
    """Replays the log to a draft at every K. A failure is the trial's, and others go on."""
    tls = None if draft.address is None else comparison.tls
    try:
        async with (
            _draft(draft, comparison.options, console) as address,
            open_channel(address, tls) as channel,
        ):
            stub = draft_pb2_grpc.DraftServiceStub(channel)
            ks = sorted({*comparison.ks, CURVE_K})
            first = TargetLog(log.header, log.outputs[:1])
            steps.begin(f"{draft.name}: warming up", 1)
            await replay(stub, first, ks[0], lambda _: None, timeout=comparison.timeout)
            for k in ks:
                replays = trial.replays.setdefault(k, [])
                steps.begin(f"{draft.name}, K = {k}", len(log.outputs))
                done = _adding(replays, steps.advance)
                await replay(stub, log, k, done, timeout=comparison.timeout)
                steps.end(f"{draft.name}, K = {k}: {_summary(replays)}")
    except (DraftFault, ServiceDied) as error:
        trial.error = str(error)
        steps.end(f"{draft.name}: {trial.error}")


def _adding(replays: list[Replay], then: Callable[[], None]) -> Callable[[Replay], None]:
    def add(one: Replay) -> None:
        replays.append(one)
        then()

    return add


@asynccontextmanager
async def _draft(
    draft: NamedDraft, options: tuple[str, ...], console: Console
) -> AsyncIterator[str]:
    """The draft service's address: of the one that runs, or of one started for the block."""
    if draft.address is not None:
        yield draft.address
        return
    child = draft.child(options)
    async with running([child], pair.reporter(console)):
        yield f"127.0.0.1:{child.port}"


def _summary(replays: Sequence[Replay]) -> str:
    rounds = [one for replayed in replays for one in replayed.rounds]
    rate, length = acceptance_rate(rounds), measured_acceptance_length(rounds)
    accepted = "nothing drafted" if rate is None else f"accepted {rate:.0%}"
    return f"{len(rounds)} rounds, {accepted}, length {number(length, 2)}"
