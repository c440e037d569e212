"""Drafts scored on a log of the target: the formulas, the replay, the command."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import re
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import jsonschema
import pytest
from PIL import Image

from specdec.bench import draft_scores, prompts, record, target_log
from specdec.bench import replay as replaying
from specdec.bench.acceptance import (
    Round,
    acceptance_by_position,
    acceptance_rate,
    mean_acceptance_length,
    measured_acceptance_length,
    predicted_speedup,
    recommended_k,
)
from specdec.bench.draft_scores import Trial
from specdec.bench.load import Call
from specdec.bench.replay import DraftFault, Drafting, Replay, replay
from specdec.bench.sweep import Workload
from specdec.bench.target_log import Header, LogFault, Output, TargetLog
from specdec.channels import open_channel
from specdec.cli.draft_names import parse
from specdec.sessions import PROTOCOL_VERSION
from specdec.v1 import common_pb2, draft_pb2, draft_pb2_grpc, gateway_pb2
from tests import stack
from tests.cli import listening, specdec, started
from tests.models import make_model, permuted_tokens
from tests.test_cli_up import left_running

HASH = "5" * 64


# The formulas.


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.8, 0.999])
@pytest.mark.parametrize("k", [0, 1, 5, 10])
def test_the_length_of_one_alpha_is_the_closed_form(alpha: float, k: int) -> None:
    expected = (1 - alpha ** (k + 1)) / (1 - alpha)
    assert mean_acceptance_length([alpha] * 10, k) == pytest.approx(expected)


def test_the_length_is_the_mean_over_all_ways_a_round_can_go() -> None:
    alphas = [0.9, 0.5, 0.2, 0.7]
    expected = 0.0
    for stood in itertools.product((True, False), repeat=4):
        probability = 1.0
        for alpha, stands in zip(alphas, stood, strict=True):
            probability *= alpha if stands else 1 - alpha
        expected += probability * (1 + len(list(itertools.takewhile(bool, stood))))
    assert mean_acceptance_length(alphas, 4) == pytest.approx(expected)


def test_positions_give_back_the_measured_length() -> None:
    generator = random.Random(1)
    rounds = []
    for _ in range(200):
        drafted = generator.randint(0, 6)
        rounds.append(Round(6, drafted, generator.randint(0, drafted)))
    alphas = acceptance_by_position(rounds, 6)
    for k in range(7):
        # A proposal that was cut to k tokens would have had its first k.
        cut = [Round(k, min(k, one.drafted), min(k, one.accepted)) for one in rounds]
        measured = measured_acceptance_length(cut)
        assert mean_acceptance_length(alphas, k) == pytest.approx(measured)


def test_a_round_without_room_says_nothing_of_a_position() -> None:
    rounds = [Round(3, 3, 3), Round(3, 3, 1), Round(1, 1, 1), Round(3, 0, 0), Round(0, 0, 0)]
    # Four had room for a first token and three got it; of those two had room for a second.
    assert acceptance_by_position(rounds, 4) == [3 / 4, 1 / 2, 1.0, None]
    assert acceptance_rate(rounds) == 5 / 7
    assert measured_acceptance_length(rounds) == 2.0
    assert acceptance_rate([]) is None
    assert measured_acceptance_length([]) is None


def test_speedup_and_the_best_k() -> None:
    assert predicted_speedup(3.0, 4, 0.05) == pytest.approx(3.0 / 1.2)
    assert predicted_speedup(2.0, 5, 0.0) == 2.0
    alphas = [0.8] * 12
    for c in (0.01, 0.05, 0.2, 0.5, 0.9):
        expected = max(range(13), key=lambda k: (1 - 0.8 ** (k + 1)) / (1 - 0.8) / (k * c + 1))
        assert recommended_k(alphas, c) == expected
    assert recommended_k([0.1] * 4, 0.5) == 0
    # Tokens that are never accepted cost nothing here, and are not asked for.
    assert recommended_k([0.5, 0.0, None], 0.0) == 1
    with pytest.raises(ValueError, match="k = 3"):
        mean_acceptance_length([0.5, 0.5], 3)
    with pytest.raises(ValueError, match="must not be negative"):
        predicted_speedup(1.0, 1, float("nan"))


# The replay.


def log_of(*outputs: tuple[Sequence[int], int], temperature: float = 0.0) -> TargetLog:
    header = Header(
        model_id="the target",
        tokenizer_sha256=HASH,
        effective_vocab_size=100,
        temperature=temperature,
        seed=3,
        stop_token_ids=(0,),
    )
    return TargetLog(
        header,
        [
            Output(
                kind="chat",
                prompt_id=f"chat-{index}",
                prompt_token_ids=(90, 91),
                token_ids=tuple(token_ids),
                limit=limit,
                step_ms=2.0 if len(token_ids) > 1 else None,
            )
            for index, (token_ids, limit) in enumerate(outputs)
        ],
    )


class ScriptedDraft(draft_pb2_grpc.DraftServiceServicer):
    """A draft that proposes what a function of the committed output says."""

    def __init__(self, propose: Callable[[list[int], int], list[int]], **info: Any) -> None:
        self._propose = propose
        self.info = common_pb2.ModelInfo(
            **{
                "protocol_version": PROTOCOL_VERSION,
                "tokenizer_sha256": HASH,
                "max_num_draft_tokens": 32,
                **info,
            }
        )
        self.requests: list[draft_pb2.DraftRequest] = []
        self.stale = False
        self.ahead = False
        self.dies_at = self.hangs_at = -1
        self.hanging = asyncio.Event()
        self.address = ""

    async def GetModelInfo(
        self, request: draft_pb2.DraftServiceGetModelInfoRequest, context: Any
    ) -> draft_pb2.DraftServiceGetModelInfoResponse:
        return draft_pb2.DraftServiceGetModelInfoResponse(model_info=self.info)

    async def Draft(
        self, request_iterator: AsyncIterator[draft_pb2.DraftRequest], context: Any
    ) -> AsyncIterator[draft_pb2.DraftResponse]:
        output: list[int] = []
        async for request in request_iterator:
            self.requests.append(request)
            if request.WhichOneof("message") == "open":
                round_number, wanted = request.open.round, request.open.num_draft_tokens
                yield draft_pb2.DraftResponse(opened=common_pb2.Opened(round=1, base_length=2))
            else:
                advance = request.advance
                round_number, wanted = advance.round, advance.num_draft_tokens
                assert advance.base_length == 2 + len(output)
                output += advance.token_ids
            if len(self.requests) == self.hangs_at:
                self.hanging.set()
                await asyncio.Event().wait()
            if len(output) == self.dies_at:
                await context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")
            proposal = draft_pb2.Proposal(
                round=round_number,
                base_length=2 + len(output),
                token_ids=self._propose(output, wanted),
                timings=common_pb2.Timings(compute_us=100 * wanted, queue_us=7),
            )
            if self.stale:
                yield draft_pb2.DraftResponse(proposal=draft_pb2.Proposal(round=round_number - 1))
            if self.ahead:
                # For a verdict that is not given.
                wrong = draft_pb2.Proposal(
                    round=round_number + 1,
                    base_length=2 + len(output) + 1,
                    presumed_token_ids=[99],
                    token_ids=[1],
                )
                yield draft_pb2.DraftResponse(proposal=wrong)
            yield draft_pb2.DraftResponse(proposal=proposal)


@asynccontextmanager
async def drafting(servicer: ScriptedDraft) -> AsyncIterator[ScriptedDraft]:
    add = draft_pb2_grpc.add_DraftServiceServicer_to_server
    async with listening(lambda server: add(servicer, server)) as servicer.address:
        yield servicer


async def played(address: str, log: TargetLog, k: int, timeout: float = 20.0) -> list[Replay]:
    found: list[Replay] = []
    async with open_channel(address) as channel:
        stub = draft_pb2_grpc.DraftServiceStub(channel)
        await replay(stub, log, k, found.append, timeout=timeout)
    return found


def counting(output: list[int], wanted: int) -> list[int]:
    """The next numbers after those that were committed."""
    begin = len(output) + 1
    return list(range(begin, begin + wanted))


def plan_of(rounds: Sequence[Round]) -> list[tuple[int, int, int]]:
    return [(one.room, one.drafted, one.accepted) for one in rounds]


async def test_rounds_of_a_draft_that_is_always_right() -> None:
    async with drafting(ScriptedDraft(counting)) as draft:
        (one,) = await played(draft.address, log_of(([1, 2, 3, 4, 5, 6, 7, 8], 8)), k=3)
    # Three stand and a bonus follows; then there is room for three; then the output is full.
    assert plan_of(one.rounds) == [(3, 3, 3), (3, 3, 3)]
    assert [took.asked for took in one.drafting] == [3, 3]
    assert [took.compute_us for took in one.drafting] == [300, 300]
    opened, *advances = draft.requests
    assert opened.open.tokenizer_sha256 == HASH
    assert opened.open.acceptance_rule == common_pb2.ACCEPTANCE_RULE_COUPLED
    assert [list(request.advance.token_ids) for request in advances] == [[1, 2, 3, 4]]


async def test_a_correction_follows_what_stands() -> None:
    async with drafting(ScriptedDraft(counting)) as draft:
        (one,) = await played(draft.address, log_of(([1, 2, 50, 4, 60, 61], 6)), k=3)
    assert plan_of(one.rounds) == [(3, 3, 2), (2, 2, 1), (0, 0, 0)]
    assert [list(request.advance.token_ids) for request in draft.requests[1:]] == [[1, 2, 50]]
    assert draft.requests[1].advance.num_draft_tokens == 2


async def test_what_follows_a_stop_is_not_judged() -> None:
    async with drafting(ScriptedDraft(lambda output, wanted: [1, 2, 0, 8, 9][:wanted])) as draft:
        (one,) = await played(draft.address, log_of(([1, 2, 0], 64)), k=5)
    assert plan_of(one.rounds) == [(3, 3, 3)]


async def test_short_and_empty_proposals() -> None:
    def propose(output: list[int], wanted: int) -> list[int]:
        return [] if not output else counting(output, wanted)[:1]

    async with drafting(ScriptedDraft(propose)) as draft:
        (one,) = await played(draft.address, log_of(([1, 2, 3, 4, 5], 5)), k=3)
    assert plan_of(one.rounds) == [(3, 0, 0), (3, 1, 1), (1, 1, 1)]


async def test_a_single_token_needs_no_draft() -> None:
    async with drafting(ScriptedDraft(counting)) as draft:
        (one,) = await played(draft.address, log_of(([1], 1)), k=3)
    assert plan_of(one.rounds) == [(0, 0, 0)]
    assert not draft.requests


async def test_proposals_for_other_verdicts_are_dropped() -> None:
    servicer = ScriptedDraft(counting)
    servicer.stale = servicer.ahead = True
    async with drafting(servicer) as draft:
        (one,) = await played(draft.address, log_of(([1, 2, 3, 4, 5, 6, 7, 8], 8)), k=3)
    assert plan_of(one.rounds) == [(3, 3, 3), (3, 3, 3)]


@pytest.mark.parametrize(
    ("servicer", "message"),
    [
        (ScriptedDraft(counting, tokenizer_sha256="6" * 64), f"{'6' * 64}.*{HASH}"),
        (ScriptedDraft(counting, protocol_version=999), "version 999 of the protocol"),
        (ScriptedDraft(counting, max_num_draft_tokens=2), "at most 2 tokens a round, and K is 3"),
        (ScriptedDraft(lambda output, wanted: [1] * 9), "unusable proposal: 9 drafted tokens"),
        (ScriptedDraft(lambda output, wanted: [500]), "unusable proposal: token id 500"),
    ],
)
async def test_a_draft_that_cannot_be_scored(servicer: ScriptedDraft, message: str) -> None:
    async with drafting(servicer) as draft:
        with pytest.raises(DraftFault, match=message):
            await played(draft.address, log_of(([1, 2, 3, 4, 5], 5)), k=3)


async def test_a_draft_of_another_temperature() -> None:
    async with drafting(ScriptedDraft(counting)) as draft:
        with pytest.raises(DraftFault, match="drafted at temperature 0"):
            await played(draft.address, log_of(([1, 2], 2), temperature=0.7), k=1)


async def test_a_draft_that_dies_leaves_what_was_scored() -> None:
    servicer = ScriptedDraft(counting)
    servicer.dies_at = 6
    log = log_of(([1, 2, 3, 4, 5], 5), (range(1, 13), 12))
    found: list[Replay] = []
    async with drafting(servicer) as draft, open_channel(draft.address) as channel:
        stub = draft_pb2_grpc.DraftServiceStub(channel)
        with pytest.raises(DraftFault, match=r"went away \(UNAVAILABLE: Socket closed\)"):
            await replay(stub, log, 2, found.append, timeout=20.0)
    assert [one.prompt_id for one in found] == ["chat-0"]


async def test_a_draft_that_says_nothing_is_given_up() -> None:
    servicer = ScriptedDraft(counting)
    servicer.hangs_at = 1
    async with drafting(servicer) as draft:
        with pytest.raises(DraftFault, match="DEADLINE_EXCEEDED"):
            await played(draft.address, log_of(([1, 2, 3], 3)), k=2, timeout=0.3)


# The scores.


async def test_scores_of_a_trial() -> None:
    log = log_of(([1, 2, 50, 4, 60, 61, 7, 8, 9, 10], 10), (range(1, 11), 10))
    async with drafting(ScriptedDraft(counting)) as draft:
        replays = {k: await played(draft.address, log, k) for k in (2, 4)}
    verdict = draft_scores.verdict(Trial("counting", replays), log)
    for score in verdict.scores:
        rounds = [one for replayed in replays[score.k] for one in replayed.rounds]
        assert score.total.mean_acceptance_length == measured_acceptance_length(rounds)
        assert score.outputs == 2
        # 0.1 ms a token, and the target takes 2 ms.
        assert score.proposal_ms == score.proposal_ms_p50 == pytest.approx(0.1 * score.k)
        assert score.token_ms == pytest.approx(0.1)
        assert score.cost_ratio == pytest.approx(0.05)
        tau = score.total.mean_acceptance_length
        assert tau is not None
        assert score.predicted_speedup == pytest.approx(tau / (0.05 * score.k + 1))
        assert score.kinds == {"chat": score.total}
    alphas = verdict.scores[-1].total.by_position
    assert [point.k for point in verdict.curve] == [1, 2, 3, 4]
    for point in verdict.curve:
        assert point.mean_acceptance_length == mean_acceptance_length(alphas, point.k)
    assert verdict.recommended_k == recommended_k(alphas, 0.05)


def test_what_a_draft_takes_is_the_mean_as_it_may_be_quick_at_times() -> None:
    drafting = [Drafting(4, 4, took) for took in (0, 0, 0, 8000)] + [Drafting(2, 2, 50_000)]
    played = Replay("chat", "chat-0", [Round(4, 4, 4)] * 5, drafting)
    score = draft_scores.verdict(Trial("mixed", {4: [played]}), log_of(([1, 2], 2))).scores[0]
    assert (score.proposal_ms, score.proposal_ms_p50) == (2.0, 0.0)
    assert score.cost_ratio == pytest.approx(2.0 / 4 / 2.0)


def test_a_step_is_the_mean_over_tokens() -> None:
    log = log_of(([1, 2], 2), ([1, 2, 3, 4], 4), ([1], 1))
    times = (1.0, 5.0, None)
    log.outputs = [
        one.model_copy(update={"step_ms": step})
        for one, step in zip(log.outputs, times, strict=True)
    ]
    assert log.step_ms == 4.0
    assert log_of().step_ms is None


def test_scores_of_nothing() -> None:
    verdict = draft_scores.verdict(Trial("none", {5: []}, error="it did not start"), log_of())
    assert (verdict.scores, verdict.curve, verdict.recommended_k) == ([], [], None)


# The same numbers as the gateway's.


@pytest.fixture(scope="module")
def suite() -> list[prompts.Prompt]:
    return prompts.mixed(("chat", "code"), seed=0)[:5]


async def _logged(
    running: stack.Stack, suite: Sequence[prompts.Prompt], workload: Workload
) -> TargetLog:
    info = running.verifier.runtime.info  # type: ignore[union-attr]
    log = record.empty_log(info, workload)
    await record.record(
        *(running.gateway.channel, suite, workload, info.max_context_length, log),
        duration=60.0,
        timeout=60.0,
    )
    return log


async def _statistics(
    running: stack.Stack, log: TargetLog, k: int
) -> list[gateway_pb2.SpeculationStatistics]:
    found = []
    for output in log.outputs:
        result = await running.generate(
            output.prompt_token_ids,
            k=k,
            rule="coupled",
            temperature=log.header.temperature,
            seed=log.header.seed,
            max_new_tokens=len(output.token_ids),
            ignore_eos=not log.header.stop_token_ids,
        )
        assert result.token_ids == list(output.token_ids)
        assert not result.speculation.fallback_rounds
        found.append(result.speculation)
    return found


def _agree(replays: Sequence[Replay], found: Sequence[gateway_pb2.SpeculationStatistics]) -> bool:
    """Whether every output had the same rounds, as far as they were counted."""
    return all(
        (
            len(one.rounds),
            [sum(r.drafted > i for r in one.rounds) for i in range(len(s.drafted_per_position))],
            [sum(r.accepted > i for r in one.rounds) for i in range(len(s.drafted_per_position))],
            measured_acceptance_length(one.rounds),
        )
        == (
            s.rounds,
            list(s.drafted_per_position),
            list(s.accepted_per_position),
            s.mean_acceptance_length,
        )
        for one, s in zip(replays, found, strict=True)
    )


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_a_replay_is_what_the_gateway_counts(
    target_folder: Path,
    draft_folder: Path,
    suite: list[prompts.Prompt],
    temperature: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    workload = Workload(max_new_tokens=24, temperature=temperature, seed=5, ignore_eos=True)
    async with (
        stack.draft(draft_folder) as (alone, _),
        stack.pair(target_folder, draft_folder) as running,
    ):
        log = await _logged(running, suite, workload)
        assert [output.kind for output in log.outputs] == [prompt.kind for prompt in suite]
        assert all(len(output.token_ids) == output.limit == 24 for output in log.outputs)
        assert log.step_ms
        for k in (1, 3, 7):
            statistics = await _statistics(running, log, k)
            assert sum(s.num_accepted_tokens for s in statistics) > 0
            assert _agree(await played(alone, log, k), statistics)

        # A replay that forgot the target's own token of a round would be found out.
        class Forgetful(replaying._Session):
            async def advance(self, token_ids: Sequence[int], num_draft_tokens: int) -> None:
                await super().advance(token_ids[:-1], num_draft_tokens)

        monkeypatch.setattr(replaying, "_Session", Forgetful)
        assert not _agree(await played(alone, log, 3), await _statistics(running, log, 3))


async def test_the_log_of_a_gateway(target_folder: Path, suite: list[prompts.Prompt]) -> None:
    async with stack.pair(target_folder, None) as running:
        log = await _logged(running, suite[:2], Workload(max_new_tokens=6))
        for prompt, output in zip(suite[:2], log.outputs, strict=True):
            request = Workload(max_new_tokens=6).request(prompt, "plain", "")
            result = await running.gateway.send(request)
            assert tuple(result.token_ids) == output.token_ids
            assert result.completion.usage.prompt_tokens == len(output.prompt_token_ids)
        assert running.verifier.runtime is not None
        info = running.verifier.runtime.info
    assert log.header.tokenizer_sha256 == info.tokenizer_sha256
    assert log.header.stop_token_ids == tuple(info.eos_token_ids)


async def test_a_request_that_fails_is_left_out_and_a_cancelled_run_keeps_its_outputs(
    target_folder: Path, suite: list[prompts.Prompt]
) -> None:
    too_long = prompts.Prompt("long-1", "chat", "x" * 600)
    workload = Workload(max_new_tokens=4)
    async with stack.pair(target_folder, None) as running:
        log = await _logged(running, [too_long, *suite[:2]], workload)
        assert [output.prompt_id for output in log.outputs] == [one.id for one in suite[:2]]
        with pytest.raises(grpc.aio.AioRpcError, match="at most 511 tokens"):
            await _logged(running, [too_long], workload)

        kept = TargetLog(log.header)
        task = asyncio.current_task()
        assert task is not None

        def stop(_: Call) -> None:
            task.cancel()

        with pytest.raises(asyncio.CancelledError):
            await record.record(
                *(running.gateway.channel, suite, workload, 512, kept),
                duration=60.0,
                timeout=60.0,
                done=stop,
            )
        task.uncancel()
    assert kept.outputs[0].token_ids == log.outputs[0].token_ids
    assert len(kept.outputs) == 1


# The log's file.


def test_a_log_is_read_as_it_was_written(tmp_path: Path) -> None:
    log, file = log_of(([1, 2], 2), ([3], 64)), tmp_path / "log.jsonl"
    log.write(file)
    assert target_log.read(file) == log


def test_logs_that_cannot_be_used(tmp_path: Path) -> None:
    file = tmp_path / "log.jsonl"
    log = log_of(([1], 3))
    header, first = log.header.model_dump_json(), log.outputs[0].model_dump_json()
    longer = first.replace("[1]", "[1,2,3,4]")
    for text, message in (
        ("", "is not a log of --save-log"),
        ('{"text": "hello"}\n', "is not a log of --save-log: model_id: Field required"),
        (header + "\n", "holds no outputs"),
        (f"{header}\n{first}\n{{}}\n", "line 3: kind: Field required"),
        (f"{header}\n{first.replace('[1]', '[100]')}", "line 2: token id 100 is outside"),
        (
            f"{header}\n{longer}",
            "line 2: 4 tokens are more than the limit",
        ),
    ):
        file.write_text(text)
        with pytest.raises(LogFault, match=message):
            target_log.read(file)
    with pytest.raises(LogFault, match=r"cannot read .*: No such file"):
        target_log.read(tmp_path / "none")


# The command.

SHAPE = {
    "type": "object",
    "required": ["created", "interrupted", "machine", "settings", "target", "drafts"],
    "additionalProperties": False,
    "properties": {
        "created": {"type": "string"},
        "interrupted": {"type": "boolean"},
        "machine": {"type": "object"},
        "settings": {"type": "object"},
        "target": {
            "type": ["object", "null"],
            "required": ["model_id", "tokenizer_sha256", "temperature", "seed", "step_ms"],
        },
        "drafts": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["name", "error", "scores", "curve", "recommended_k"],
                "additionalProperties": False,
                "properties": {
                    "name": {"type": "string"},
                    "error": {"type": "string"},
                    "recommended_k": {"type": ["integer", "null"]},
                    "curve": {
                        "type": "array",
                        "items": {"required": ["k", "mean_acceptance_length", "predicted_speedup"]},
                    },
                    "scores": {
                        "type": "array",
                        "items": {
                            "required": [
                                *("k", "outputs", "total", "kinds", "token_ms"),
                                *("proposal_ms", "proposal_ms_p50"),
                                *("cost_ratio", "predicted_speedup"),
                            ],
                            "additionalProperties": False,
                            "properties": {
                                "proposal_ms": {"type": ["number", "null"]},
                                "proposal_ms_p50": {"type": ["number", "null"]},
                                "token_ms": {"type": ["number", "null"]},
                                "cost_ratio": {"type": ["number", "null"]},
                                "predicted_speedup": {"type": ["number", "null"]},
                                "k": {"type": "integer"},
                                "outputs": {"type": "integer"},
                                "total": {"$ref": "#/$defs/acceptance"},
                                "kinds": {"additionalProperties": {"$ref": "#/$defs/acceptance"}},
                            },
                        },
                    },
                },
            },
        },
    },
    "$defs": {
        "acceptance": {
            "type": "object",
            "required": [
                *("rounds", "drafted", "accepted", "acceptance_rate"),
                *("mean_acceptance_length", "by_position"),
            ],
            "additionalProperties": {"type": ["number", "array", "null"]},
        }
    },
}


def document_of(file: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(file.read_text())
    jsonschema.validate(document, SHAPE)
    return document


async def test_one_run_of_the_target_scores_all_drafts(
    target_folder: Path, draft_folder: Path, tmp_path: Path
) -> None:
    file, folder, log_file = tmp_path / "out.json", tmp_path / "plots", tmp_path / "log.jsonl"
    other = make_model(tmp_path / "other", seed=3, rows=300, table=permuted_tokens(300))
    async with (
        stack.verifier(target_folder) as (verifier, _),
        stack.gateway(verifier) as gateway,
        stack.draft(draft_folder) as (draft, _),
        stack.draft(target_folder) as (copy, _),
        stack.draft(other) as (foreign, _),
    ):
        run = await specdec(
            *("bench", "--address", gateway.address, "--verifier-address", verifier),
            *("--drafts", f"{draft},{copy}", "-k", "2,4", "--requests", "3"),
            *("--kinds", "chat,code", "--max-new-tokens", "12", "--ignore-eos"),
            *("--json", file, "--plot", folder, "--save-log", log_file),
        )
        assert run.status == 0, run
        document = document_of(file)
        again = await specdec(
            *("bench", "--from-log", log_file, "--drafts", f"{draft},{foreign},127.0.0.1:1"),
            *("-k", "4", "--json", file),
        )
    log = target_log.read(log_file)
    assert document["target"]["outputs"] == len(log.outputs) == 3
    assert document["target"]["tokens"] == 36
    near, same = document["drafts"]
    assert (near["name"], near["error"], same["name"]) == (draft, "", copy)
    assert [score["k"] for score in near["scores"]] == [2, 4, 10]
    assert [point["k"] for point in near["curve"]] == list(range(1, 11))
    for score in same["scores"]:
        # The target as its own draft is right everywhere, where there is room.
        assert score["total"]["accepted"] == score["total"]["drafted"] > 0
        assert set(score["kinds"]) == {"chat", "code"}
    assert re.search(rf"^{copy} +2 +3 of 3 +\d+ +100% +3\.00", run.out, re.MULTILINE), run.out
    assert re.search(r"^target: 3 of 3 outputs, 36 tokens", run.err, re.MULTILINE), run.err
    assert {path.stem for path in folder.iterdir()} == {"acceptance", "length", "speedup"}
    for path in folder.iterdir():
        with Image.open(path) as image:
            assert image.format == "PNG"

    # The log alone gives the same numbers, and a draft that fails does not keep others from theirs.
    assert again.status == 1
    first, mismatch, absent = document_of(file)["drafts"]
    assert [s["total"] for s in first["scores"]] == [s["total"] for s in near["scores"][1:]]
    assert log.header.tokenizer_sha256 in mismatch["error"]
    assert "TOKENIZER_MISMATCH" in mismatch["error"]
    assert re.search("failed to connect", absent["error"], re.IGNORECASE)
    assert "TOKENIZER_MISMATCH" in again.out


async def test_ctrl_c_keeps_what_was_scored(tmp_path: Path) -> None:
    file, log_file = tmp_path / "out.json", tmp_path / "log.jsonl"
    log_of(*[(range(1, 9), 8)] * 3).write(log_file)
    servicer = ScriptedDraft(counting)
    async with drafting(servicer) as draft:
        command = ("bench", "--from-log", log_file, "--drafts", draft.address, "-k", "3")

        # Each output takes two requests at K = 3, and one at K = 10: the warm-up, three, and one.
        servicer.hangs_at = 2 + 6 + 2
        async with started(*command, "--json", file) as process:
            await servicer.hanging.wait()
            process.send_signal(signal.SIGINT)
            out, _ = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 130
    assert b"3 of 3" in out
    document = document_of(file)
    assert document["interrupted"] is True
    # Of the second replay only the first output had ended.
    assert [s["outputs"] for s in document["drafts"][0]["scores"]] == [3, 1]


@pytest.mark.parametrize(
    ("options", "status", "message"),
    [
        (("--drafts", "default", "--concurrency", "2"), 2, "does not go with --drafts"),
        (("--drafts", "default", "--rule", "block"), 2, "does not go with --drafts"),
        (("--from-log", "/nowhere"), 2, "name the --drafts to score on it"),
        (("--from-log", "/nowhere", "--drafts", "x"), 1, "cannot read /nowhere: No such file"),
        (("--from-log", "x", "--drafts", "x", "--seed", "1"), 2, "--from-log has already"),
        (("--drafts", "default,"), 2, "an empty name"),
        (("--drafts", "lookup++model"), 2, "has an empty part"),
        (("--drafts", "default", "--requests", "500"), 2, "each prompt is used once"),
        (("--drafts", "198.51.100.7:50052"), 1, "198.51.100.7:50052 is not on this machine"),
        (("--drafts", "x", "--save-log", "/nowhere/x"), 1, "there is no folder /nowhere"),
        (("-k", "1,2"), 2, "several numbers need --drafts"),
        (("-k", "0"), 2, "numbers of tokens are from 1"),
        (
            ("--drafts", "x", "--address", "127.0.0.1:1", "--verifier-address", "127.0.0.1:1"),
            1,
            "no verifier at 127.0.0.1:1",
        ),
    ],
)
async def test_what_cannot_be_compared(options: tuple[str, ...], status: int, message: str) -> None:
    run = await specdec("bench", *options, COLUMNS="200")
    assert run.status == status, run
    assert message in run.err


def test_names_of_drafts(tmp_path: Path) -> None:
    (tmp_path / "a+b").mkdir()
    found = parse(f"default,lookup,suffix+model,lookup+org/name,localhost:5,{tmp_path}/a+b,lookup")
    assert [(one.address, one.drafters, one.model) for one in found] == [
        (None, ("model",), None),
        (None, ("lookup",), None),
        (None, ("suffix", "model"), None),
        (None, ("lookup", "model"), "org/name"),
        ("localhost:5", ("model",), None),
        (None, ("model",), f"{tmp_path}/a+b"),
    ]
    child = found[1].child(("--dtype", "float32"))
    assert child.arguments == (*("--drafters", "lookup", "--dtype", "float32"),)
    assert found[3].child(()).arguments[2:] == ("--model", "org/name")
    with pytest.raises(ValueError, match="names two models"):
        parse("a/b+c/d")
    with pytest.raises(ValueError, match="names lookup twice"):
        parse("lookup+lookup")


@pytest.mark.slow
async def test_it_starts_target_and_drafts_itself_and_leaves_nothing(
    target_folder: Path, draft_folder: Path, tmp_path: Path
) -> None:
    file = tmp_path / "out.json"
    broken = tmp_path / "broken"
    broken.mkdir()
    async with started(
        *("bench", "--target", target_folder),
        *("--drafts", f"{broken},lookup,suffix+{draft_folder}"),
        *("--dtype", "float32", "--num-threads", "1", "--requests", "2", "--kinds", "chat"),
        *("--max-new-tokens", "8", "--temperature", "1", "-k", "3", "--json", file),
    ) as process:
        _, err = await asyncio.wait_for(process.communicate(), 120)
    assert process.returncode == 1
    failed, copying, scored = document_of(file)["drafts"]
    assert "the draft could not start" in failed["error"]
    assert not copying["error"]
    assert copying["scores"]
    assert [score["k"] for score in scored["scores"]] == [3, 10]
    assert scored["scores"][0]["total"]["accepted"] > 0
    assert not left_running(*map(int, re.findall(r"listening on [\d.]+:(\d+)", err.decode())))
