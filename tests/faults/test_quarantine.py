"""What fails in one session fails that session, says which, and reaches nobody else."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from structlog.testing import capture_logs

import draft_service.drafting
from draft_service.drafting import Proposing
from draft_service.growing import GrowingProposal
from draft_service.tree import Growth, Tree
from specdec.errors import SpecdecError
from specdec.lm.batch import Segment
from specdec.lm.grammar import GrammarState
from specdec.lm.loading import LoadedModel, load
from specdec.lm.processing import join, process
from specdec.lm.runtime import ScoredPrefill, Session
from specdec.lm.work import NotNumbers, Prefill, Work
from specdec.v1 import common_pb2
from tests import stack
from tests.faults.raw_sessions import (
    VerifySession,
    draft_session,
    failure_of,
    nothing_is_left,
    opening,
    told,
    until,
)
from tests.processing import resolved
from tests.test_scheduler import Bench, Request, opened, prompt
from verifier_service.verification import Verification, Verified

MODEL_FAILURE = (grpc.StatusCode.INTERNAL, "MODEL_FAILURE", False)
NOISY = {"temperature": 0.9, "seed": 3, "top_p": 0.9}


@pytest.fixture(scope="module")
def target(target_folder: Path) -> LoadedModel:
    return load(str(target_folder), device="cpu", dtype="float32")


def blocks(sessions: Sequence[Session]) -> list[Verification]:
    return [Verification(session, [5 + i, 6, 7], []) for i, session in enumerate(sessions)]


def undisturbed(target: LoadedModel, count: int, **options: Any) -> list[Any]:
    bench = Bench(target)
    return bench.run(*blocks(opened(bench, count, **options)))


def close(bench: Bench, sessions: Sequence[Session]) -> None:
    for session in sessions:
        bench.close(session)
    bench.assert_nothing_is_left()


# A pass that raises.


@pytest.mark.parametrize("at_fault", [{0}, {11}, {15}, {3, 12}])
def test_the_smallest_set_that_fails_is_failed(target: LoadedModel, at_fault: set[int]) -> None:
    expected = undisturbed(target, 16)
    bench = Bench(target)
    sessions = opened(bench, 16)

    def before(segments: Sequence[Segment]) -> None:
        if any(s.pages is sessions[i].sequence.pages for s in segments for i in at_fault):
            raise RuntimeError("planted")

    bench.model.before = before
    passes = len(bench.model.passes)
    found = bench.run(*blocks(sessions))
    for index, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert str(one) == "planted" if index in at_fault else one == other
    # By halves: one after the other it were seventeen.
    assert len(bench.model.passes) - passes <= 1 + 8 * len(at_fault)
    bench.model.before = lambda segments: None
    # The others' caches are what they would be.
    well = [i for i in range(16) if i not in at_fault]
    again = Bench(target)
    twice = opened(again, 16)
    again.run(*blocks(twice))
    expected = again.run(*blocks([twice[i] for i in well]))
    assert bench.run(*blocks([sessions[i] for i in well])) == expected
    close(bench, sessions)


def out_of_memory_beyond(bench: Bench, rows: int) -> list[int]:
    """Has passes of more rows fail. Gives how often memory was freed."""
    freed: list[int] = []
    free = bench.model.model.free_memory

    def before(segments: Sequence[Segment]) -> None:
        if sum(len(segment.token_ids) for segment in segments) > rows:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    def note() -> None:
        freed.append(1)
        free()

    bench.model.before = before
    bench.model.free_memory = note  # type: ignore[attr-defined]
    return freed


@pytest.mark.parametrize("rows", [1, 3, 9])
def test_too_much_at_once_is_done_in_parts(target: LoadedModel, rows: int) -> None:
    expected = undisturbed(target, 6)
    bench = Bench(target)
    freed = out_of_memory_beyond(bench, rows)
    sessions = opened(bench, 6)
    found = bench.run(*blocks(sessions))
    assert [one.token_ids for one in found] == [one.token_ids for one in expected]
    assert freed
    close(bench, sessions)


def test_who_does_not_fit_alone_is_told_so(target: LoadedModel) -> None:
    bench = Bench(target)
    sessions = opened(bench, 3)
    expected = undisturbed(target, 3)

    def before(segments: Sequence[Segment]) -> None:
        if any(segment.pages is sessions[1].sequence.pages for segment in segments):
            raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory")

    bench.model.before = before
    found = bench.run(*blocks(sessions))
    assert isinstance(found[1], SpecdecError)
    assert found[1].code == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert [found[0], found[2]] == [expected[0], expected[2]]
    close(bench, sessions)


# What follows from a pass.


@pytest.mark.parametrize("sampling", [{}, NOISY], ids=["plain", "processed"])
def test_what_follows_a_pass_is_tried_in_parts_too(
    target: LoadedModel, sampling: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """For instance there is no memory for the scores of all sessions together."""

    def sessions_of(bench: Bench) -> list[Session]:
        made = [bench.open(Request(tuple(prompt(20 + i, i)), sampling=sampling)) for i in range(5)]
        bench.run(*(Prefill(session.sequence) for session in made))
        return made

    calm = Bench(target)
    expected = calm.run(*blocks(sessions_of(calm)))
    bench = Bench(target)
    sessions = sessions_of(bench)
    consume = Verification.consume.__func__  # type: ignore[attr-defined]

    def narrow(cls: type[Verification], works: Sequence[Verification]) -> None:
        if len(works) > 1:
            for work in works:
                work.collect()
            raise torch.OutOfMemoryError("CUDA out of memory")
        consume(cls, works)

    monkeypatch.setattr(Verification, "consume", classmethod(narrow))
    assert bench.run(*blocks(sessions)) == expected
    close(bench, sessions)


def test_who_went_on_already_does_not_go_on_twice(
    target: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy drafts have their token when the joint processing of the others fails."""
    calm = Bench(target)
    kinds = [{}, NOISY, {}, {**NOISY, "seed": 4}]

    def proposing(bench: Bench) -> list[Proposing]:
        made = [
            bench.open(Request(tuple(prompt(20 + i, i)), sampling=kind))
            for i, kind in enumerate(kinds)
        ]
        return [Proposing(session, 4, 64) for session in made]

    expected = [draft.token_ids for draft in calm.run(*proposing(calm))]
    bench = Bench(target)
    failures = 0

    def failing(logits: torch.Tensor, rows: Any) -> torch.Tensor:
        nonlocal failures
        if len(logits) > 1:
            failures += 1
            raise RuntimeError("planted")
        return process(logits, rows)

    monkeypatch.setattr(draft_service.drafting, "process", failing)
    found = bench.run(*proposing(bench))
    assert failures == 4
    assert [draft.token_ids for draft in found] == expected


# Numbers that are none.

BAD = [torch.nan, torch.inf]


def spoiling(session: Session, bad: float, rows: slice = slice(None)) -> Callable[..., None]:
    def after(segments: Sequence[Segment], logits: torch.Tensor) -> None:
        row = 0
        for segment in segments:
            if segment.pages is session.sequence.pages:
                logits[row : row + segment.num_logits][rows, 7] = bad
            row += segment.num_logits

    return after


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("row", range(4))
@pytest.mark.parametrize(
    "sampling", [{}, NOISY, {"temperature": 1.0, "seed": 1}, {"presence_penalty": 1.0}]
)
def test_one_bad_number_in_any_row_of_a_block_is_found(
    target: LoadedModel, bad: float, row: int, sampling: dict[str, Any]
) -> None:
    bench = Bench(target)
    session = bench.open(Request(tuple(prompt(20)), sampling=sampling))
    bench.model.after = spoiling(session, bad, slice(row, row + 1))
    (error,) = bench.run(Verification(session, [5, 6, 7], []))
    assert isinstance(error, NotNumbers)


def growing(session: Session) -> Work:
    tree = Tree(len(session.sequence.tokens), 100)
    growth = Growth(tree.root, 4, 2, common_pb2.DraftCosts())
    return GrowingProposal(session, tree, 4, [], growth)


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("sampling", [{}, NOISY, {"temperature": 1.0}, {"presence_penalty": 1.0}])
@pytest.mark.parametrize(
    "work", [growing, lambda session: Proposing(session, 3, 64)], ids=["growing", "proposing"]
)
def test_a_draft_of_bad_numbers_fails_instead_of_proposing_anything(
    target: LoadedModel,
    bad: float,
    sampling: dict[str, Any],
    work: Callable[[Session], Work],
) -> None:
    bench = Bench(target)
    session, other = (bench.open(Request(tuple(prompt(20, i)), sampling=sampling)) for i in (1, 2))
    bench.model.after = spoiling(session, bad)
    error, draft = bench.run(work(session), work(other))
    assert isinstance(error, NotNumbers)
    assert not isinstance(draft, Exception)


def test_bad_numbers_are_not_told_as_log_probabilities(target: LoadedModel) -> None:
    bench = Bench(target)
    session = bench.open(Request(tuple(prompt(20))))
    bench.model.after = spoiling(session, torch.nan)
    (error,) = bench.run(ScoredPrefill(session.sequence, 0))
    assert isinstance(error, NotNumbers)


def test_processing_tells_what_is_no_number_from_what_is_forbidden(target: LoadedModel) -> None:
    bench = Bench(target)
    filters = [{}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.1}, {"top_p": 0.9, "top_k": 9}]
    for sampling in filters:
        session = bench.open(
            Request((5,), sampling={"temperature": 0.7, **sampling, "allowed_token_ids": [4, 9]})
        )
        logits = torch.zeros(4, target.model.effective_vocab_size)
        logits[0, 9], logits[1, 4] = torch.nan, torch.inf
        logits[2, [4, 9]] = -torch.inf
        scores = process(logits, join([session.history.rows([])] * 4))
        assert bool(scores[:2].isnan().all())
        assert bool(scores[2].isneginf().all())
        assert scores[3].max() == 0.0


def test_what_may_be_no_number_is_lent_to_nobody(target: LoadedModel) -> None:
    tokens = tuple(prompt(70))
    bench = Bench(target)
    first = bench.open(Request(tokens))
    bench.run(Prefill(first.sequence))
    shared = bench.open(Request((*prompt(48), 7, 8)))
    bench.run(Prefill(shared.sequence))
    assert shared.sequence.reused_length == 48
    for base in bench.model._store._bases.values():
        base[:, first.sequence.pages[3]] = torch.nan
    (error,) = bench.run(Verification(first, [], []))
    assert isinstance(error, NotNumbers)
    bench.close(first)
    late = bench.open(Request(tokens))
    bench.run(Prefill(late.sequence))
    assert late.sequence.reused_length == 0
    (verified,) = bench.run(Verification(late, [], []))
    assert isinstance(verified, Verified)
    close(bench, [shared, late])


# On the wire.


def spoil(model: Any, wanted: Callable[[Segment], bool]) -> None:
    """Makes the logits of some segments no numbers."""
    forward = model.forward

    def spoiled(segments: Sequence[Segment]) -> torch.Tensor:
        logits: torch.Tensor = forward(segments).clone()
        row = 0
        for segment in segments:
            if wanted(segment):
                logits[row : row + segment.num_logits] = torch.nan
            row += segment.num_logits
        return logits

    model.forward = spoiled


async def test_a_session_fails_with_its_id_and_its_neighbours_go_on(target_folder: Path) -> None:
    prompts = [tuple(prompt(20 + i, i)) for i in range(4)]
    async with (
        stack.verifier(target_folder) as (address, servicer),
        grpc.aio.insecure_channel(address) as channel,
    ):
        runtime = servicer.runtime
        assert runtime is not None

        async def sessions() -> list[VerifySession]:
            made = [VerifySession(channel, opening(f"s{i}", p)) for i, p in enumerate(prompts)]
            for session in made:
                await session.open()
            return made

        calm = await sessions()
        expected = [await session.generate(4) for session in calm]
        for session in calm:
            session.call.cancel()
        await nothing_is_left(runtime)
        with capture_logs() as logs:
            disturbed = await sessions()
            (sequence,) = (
                each
                for each in runtime.scheduler.residents.sequences
                if each.tokens[:22] == list(prompts[2])
            )
            spoil(runtime.loaded.model, lambda segment: segment.pages is sequence.pages)
            found = await asyncio.gather(
                *(session.generate(4) for session in disturbed), return_exceptions=True
            )
        error = found[2]
        assert isinstance(error, grpc.aio.AioRpcError)
        assert told(error) == MODEL_FAILURE
        assert "session s2: NotNumbers" in (error.details() or "")
        (event,) = (each for each in logs if each["event"] == "session broke")
        assert event["log_level"] == "error"
        found[2] = expected[2]
        assert found == expected
        for session in disturbed:
            session.call.cancel()
        await nothing_is_left(runtime)


async def test_a_grammar_that_breaks_breaks_its_session(
    target_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    grammar = common_pb2.Grammar(regex="[a-f]{30,40}")
    async with (
        stack.verifier(target_folder) as (address, servicer),
        grpc.aio.insecure_channel(address) as channel,
    ):
        runtime = servicer.runtime
        assert runtime is not None
        plain = VerifySession(channel, opening("plain"))
        sampling = resolved(common_pb2.Sampling(grammar=grammar))
        formed = VerifySession(channel, opening("formed", sampling=sampling))
        await plain.open()
        await formed.open()
        assert len(await formed.verify()) == 1

        # As if what was emitted had got out of step with the grammar.
        def refuse(*_: Any) -> None:
            raise ValueError("the output does not fit its grammar")

        monkeypatch.setattr(GrammarState, "commit", refuse)
        await formed.ask()
        one, error = await asyncio.gather(plain.verify([5]), failure_of(formed.call))
        assert told(error) == MODEL_FAILURE
        assert "session formed: ValueError" in (error.details() or "")
        assert one
        plain.call.cancel()
        await nothing_is_left(runtime)


async def test_a_draft_of_bad_numbers_is_given_up_and_the_text_stays(
    target_folder: Path, draft_folder: Path
) -> None:
    async with stack.pair(target_folder, draft_folder) as services:
        options = {"max_new_tokens": 20, "ignore_eos": True, "temperature": 0.0}
        expected = await services.generate("once", k=0, **options)
        assert services.draft is not None
        runtime = services.draft.runtime
        assert runtime is not None
        spoil(runtime.loaded.model, lambda segment: segment.end > 10)
        result = await services.generate("once", k=3, **options)
        assert result.token_ids == expected.token_ids
        assert result.speculation.fallback_reason.startswith("MODEL_FAILURE")
        await nothing_is_left(runtime)


# How many.


async def test_more_sessions_than_allowed_are_refused_until_one_ends(target_folder: Path) -> None:
    refused = (grpc.StatusCode.RESOURCE_EXHAUSTED, "RESOURCE_EXHAUSTED", True)
    async with (
        stack.verifier(target_folder, max_sessions=2) as (address, servicer),
        grpc.aio.insecure_channel(address) as channel,
    ):
        runtime = servicer.runtime
        assert runtime is not None
        running = [VerifySession(channel, opening(f"s{i}")) for i in range(2)]
        for session in running:
            await session.open()
        for _ in range(20):
            late = VerifySession(channel, opening("late"))
            assert told(await failure_of(late.call)) == refused
        assert await running[0].verify()
        running[1].call.cancel()
        await until(lambda: runtime.num_sessions == 1)
        late = VerifySession(channel, opening("late"))
        await late.open()
        assert await late.verify()
        for session in (running[0], late):
            session.call.cancel()
        await nothing_is_left(runtime)


async def test_a_full_draft_costs_speed_and_nothing_else(
    target_folder: Path, draft_folder: Path
) -> None:
    async with (
        stack.verifier(target_folder) as (verifier_address, _),
        stack.draft(draft_folder, max_sessions=1) as (draft_address, drafting),
        stack.gateway(verifier_address, draft_address) as front,
        grpc.aio.insecure_channel(draft_address) as channel,
    ):
        await stack.drafts_are_used(front)
        assert drafting.runtime is not None
        await nothing_is_left(drafting.runtime)
        call, _ = await draft_session(channel, opening("first"))
        result = await front.generate("a", k=3, max_new_tokens=8, ignore_eos=True)
        assert len(result.token_ids) == 8
        assert result.speculation.fallback_reason.startswith("RESOURCE_EXHAUSTED")
        call.cancel()
