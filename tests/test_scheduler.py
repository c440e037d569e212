"""The scheduler: what goes into a pass, who waits, and that nobody feels anybody else."""

from __future__ import annotations

import asyncio
import itertools
import math
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from draft_service.drafter import Draft
from draft_service.drafting import Proposing
from specdec.lm import residents, thread
from specdec.lm.batch import Segment
from specdec.lm.grammar import GrammarCompiler
from specdec.lm.history import History
from specdec.lm.loading import LoadedModel, load
from specdec.lm.pace import Paces
from specdec.lm.pages import PAGE_SIZE, pages_for
from specdec.lm.runtime import ScoredPrefill, Session
from specdec.lm.scheduler import Scheduler
from specdec.lm.sequence import CachedSequence
from specdec.lm.thread import ModelThread
from specdec.lm.work import Prefill, Work
from specdec.v1 import common_pb2
from specdec.v1.common_pb2 import Grammar, Sampling
from tests.processing import resolved
from tests.stack import RULES
from verifier_service.verification import Verification, Verified

TOP_N = 64
EOS = 0


@pytest.fixture(scope="module")
def target(target_folder: Path) -> LoadedModel:
    return load(str(target_folder), device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def drafter(draft_folder: Path) -> LoadedModel:
    return load(str(draft_folder), device="cpu", dtype="float32")


@pytest.fixture(autouse=True)
def nobody_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow the machine is, no session counts as resting unless a test says so."""
    let_rest_after(monkeypatch, 1000.0)


def let_rest_after(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    for module in (residents, thread):
        monkeypatch.setattr(module, "IDLE_SECONDS", seconds)


def prompt(length: int, seed: int = 0) -> list[int]:
    """Tokens without an end; different seeds differ from the first token on."""
    return [1 + (seed * 37 + i * (i + seed)) % 290 for i in range(1, length + 1)]


class Recorder:
    """A model that notes what it is fed; tests may spoil what goes in or comes out."""

    def __init__(self, loaded: LoadedModel) -> None:
        self.model = loaded.model
        self.passes: list[list[Segment]] = []
        self.names: list[list[str]] = []
        """Whose the segments of each pass were."""
        self.name_of: Callable[[Segment], str] = lambda segment: ""
        self.before: Callable[[Sequence[Segment]], None] = lambda segments: None
        self.after: Callable[[Sequence[Segment], torch.Tensor], None] = lambda segments, out: None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def forward(self, segments: Sequence[Segment]) -> torch.Tensor:
        self.passes.append([s._replace(pages=list(s.pages)) for s in segments])
        self.names.append([self.name_of(segment) for segment in segments])
        self.before(segments)
        logits = self.model.forward(segments).clone()
        self.after(segments, logits)
        return logits


@dataclass(frozen=True)
class Request:
    """What a client of both services wants."""

    prompt: tuple[int, ...]
    k: int = 0
    rule: str = "coupled"
    count: int = 24
    salt: str = ""
    bypass: bool = False
    scored: bool = False
    sampling: dict[str, Any] = field(default_factory=dict, hash=False)


class Bench:
    """A scheduler with a model. Every step checks the books and the token budget."""

    def __init__(self, loaded: LoadedModel, *, pages: int = 400, rows: int = 256) -> None:
        self.loaded = loaded
        self.model = Recorder(loaded)
        self.scheduler = Scheduler(self.model, pages, rows)  # type: ignore[arg-type]
        self.names: dict[str, Session] = {}
        self.model.name_of = self._name_of

    def open(self, request: Request, name: str = "") -> Session:
        sampling = resolved(Sampling(**request.sampling))
        opening = common_pb2.Open(
            session_id="bench",
            base_length=len(request.prompt),
            prompt_token_ids=request.prompt,
            sampling=sampling,
            acceptance_rule=RULES[request.rule],
        )
        model = self.loaded.model
        grammar = None
        if sampling.HasField("grammar"):
            compiler = GrammarCompiler(
                self.loaded.tokenizer.content, model.effective_vocab_size, [EOS]
            )
            grammar = compiler.start(sampling.grammar)
        history = History(
            sampling, request.prompt, model.effective_vocab_size, model.device, grammar
        )
        sequence = CachedSequence(
            self.scheduler.residents.pool,
            request.prompt,
            salt=request.salt,
            shared=not request.bypass,
        )
        self.scheduler.open(sequence)
        session = Session(opening, sequence, history, common_pb2.Opened())
        if name:
            self.names[name] = session
        return session

    def close(self, session: Session) -> None:
        self.scheduler.close(session.sequence)
        self.scheduler.residents.check_integrity()

    def add(self, work: Work) -> Work:
        self.scheduler.add(work, lambda: None)
        return work

    def step(self) -> bool:
        count = len(self.model.passes)
        done = self.scheduler.step()
        self.scheduler.residents.check_integrity()
        for segments in self.model.passes[count:]:
            assert sum(len(s.token_ids) for s in segments) <= self.scheduler.max_rows
            lists = [page for s in segments for page in s.pages[s.start // PAGE_SIZE :]]
            assert len(set(lists)) == len(lists), "two sessions write to one page"
        return done

    def run(self, *works: Work) -> list[Any]:
        """Adds works, and steps until they are done."""
        for work in works:
            if work not in self.scheduler._works:
                self.add(work)
        while not all(work.done for work in works):
            assert self.step(), "nothing can be done"
        return [work.error or work.result for work in works]

    def rows(self, index: int = -1) -> dict[str, tuple[int, int, int]]:
        """A pass by the names of the sessions: (start, number of tokens, number of logits)."""
        return {
            name: (segment.start, len(segment.token_ids), segment.num_logits)
            for name, segment in zip(self.model.names[index], self.model.passes[index], strict=True)
        }

    def _name_of(self, segment: Segment) -> str:
        for name, session in self.names.items():
            if session.sequence.pages is segment.pages:
                return name
        return ""

    def count_rows(self) -> int:
        """How many rows were fed so far."""
        return sum(len(s.token_ids) for segments in self.model.passes for s in segments)

    def assert_nothing_is_left(self) -> None:
        pool, prefixes = self.scheduler.residents.pool, self.scheduler.residents.prefixes
        self.scheduler.residents.check_integrity()
        assert not self.scheduler.has_work
        assert self.scheduler.residents.sequences == []
        assert pool.num_free + prefixes.num_pages == pool.num_pages
        prefixes.evict(pool.num_pages)
        assert pool.num_free == pool.num_pages


class Round(NamedTuple):
    drafted: list[int]
    num_accepted: int
    committed: list[int]


class Output(NamedTuple):
    rounds: list[Round]
    prompt_logprobs: list[float]

    @property
    def token_ids(self) -> list[int]:
        return [token for each in self.rounds for token in each.committed]


Client = Generator[tuple[Bench, Work], Any, Output]


def client(request: Request, verifier: Bench, draft: Bench) -> Client:
    """A request from its opening to its end, round by round, as the gateway has it done."""
    here, there = verifier.open(request), draft.open(request)
    kind = ScoredPrefill(here.sequence, 0) if request.scored else Prefill(here.sequence)
    scored = yield verifier, kind
    yield draft, Prefill(there.sequence)
    rounds: list[Round] = []
    drafted: Draft = yield draft, Proposing(there, request.k, TOP_N)
    length = len(request.prompt)
    while length < len(request.prompt) + request.count:
        verified: Verified = yield (
            verifier,
            Verification(here, drafted.token_ids, drafted.distributions),
        )
        n = verified.num_accepted
        committed = verified.token_ids
        rounds.append(Round(drafted.token_ids, n, committed))
        if EOS in committed:
            break
        drafted = yield draft, Proposing(there, request.k, TOP_N, (length, committed))
        length += len(committed)
    verifier.close(here)
    draft.close(there)
    return Output(rounds, [each.logprob for each in scored])


def run_clients(
    clients: Sequence[Client],
    *benches: Bench,
    between: Callable[[Bench], None] = lambda bench: None,
) -> list[Output]:
    """Runs clients to their ends; the benches step in turn, each followed by `between`."""
    outputs: dict[int, Output] = {}
    works: dict[int, Work] = {}

    def resume(index: int, result: Any) -> None:
        try:
            bench, work = clients[index].send(result)
        except StopIteration as end:
            outputs[index] = end.value
            works.pop(index, None)
        else:
            works[index] = bench.add(work)

    for index in range(len(clients)):
        resume(index, None)
    while works:
        progress = False
        for bench in benches:
            progress |= bench.step()
            between(bench)
        assert progress, "nothing can be done"
        for index, work in list(works.items()):
            if work.done:
                assert work.error is None, work.error
                resume(index, work.result)
    for bench in benches:
        bench.assert_nothing_is_left()
    return [outputs[index] for index in range(len(clients))]


SHARED = prompt(70, 5)
REQUESTS = [
    Request(tuple(prompt(20, 1)), k=3),
    Request(tuple(prompt(90, 2)), k=0, sampling={"temperature": 0.8, "seed": 1}),
    Request(tuple(SHARED), k=7, sampling={"temperature": 1.0, "seed": 2}),
    Request((*SHARED, 7, 8), k=5, rule="rejection", sampling={"temperature": 0.9, "seed": 3}),
    Request((*SHARED, 7, 9), k=4, rule="block", sampling={"temperature": 1.1, "seed": 4}),
    Request((*SHARED, 7, 9), k=1, bypass=True),
    Request(tuple(SHARED), k=2, salt="mine", sampling={"repetition_penalty": 1.7}),
    Request(
        tuple(prompt(33, 6)),
        k=6,
        sampling={
            "temperature": 0.7,
            "seed": 5,
            "presence_penalty": 1.0,
            "frequency_penalty": 0.5,
            "top_k": 20,
        },
    ),
    Request(
        tuple(prompt(16, 7)), k=4, sampling={"grammar": Grammar(regex="[I-N]{30,40}"), "seed": 6}
    ),
    Request(
        tuple(prompt(17, 8)),
        k=3,
        rule="block",
        sampling={"temperature": 0.9, "grammar": Grammar(regex="([a-f]{3} )+"), "seed": 7},
    ),
    Request(
        tuple(prompt(15, 9)),
        k=5,
        rule="rejection",
        sampling={"temperature": 1.3, "top_p": 0.8, "min_p": 0.02, "seed": 8},
    ),
    Request(
        tuple(prompt(40, 10)),
        k=2,
        sampling={
            "logit_bias": {5: 3.0, 0: 6.0},
            "min_new_tokens": 10,
            "stop_token_ids": [0],
        },
    ),
    Request(
        tuple(prompt(30, 11)),
        k=3,
        sampling={"temperature": 0.9, "seed": 9, "allowed_token_ids": range(30, 90)},
    ),
    Request(tuple(prompt(150, 12)), k=3, scored=True),
    Request((*SHARED, 1), k=8, scored=True, sampling={"temperature": 1.0, "seed": 10}),
    Request((11,), k=4, sampling={"suppressed_token_ids": range(100, 300)}),
]


@pytest.fixture(scope="module")
def alone(target: LoadedModel, drafter: LoadedModel) -> list[Output]:
    """Each request on its own, on fresh schedulers with room for everything."""
    outputs = []
    for request in REQUESTS:
        benches = Bench(target), Bench(drafter)
        outputs += run_clients([client(request, *benches)], *benches)
    return outputs


def assert_equal(found: Sequence[Output], expected: Sequence[Output]) -> None:
    for request, one, other in zip(REQUESTS, found, expected, strict=True):
        assert one.rounds == other.rounds, request
        assert one.prompt_logprobs == pytest.approx(other.prompt_logprobs, abs=1e-4)
        assert len(one.prompt_logprobs) == (len(request.prompt) - 1 if request.scored else 0)


def test_the_lone_runs_are_worth_comparing_with(alone: list[Output]) -> None:
    accepted = sum(each.num_accepted for output in alone for each in output.rounds)
    drafted = sum(len(each.drafted) for output in alone for each in output.rounds)
    assert 0.2 < accepted / drafted < 0.8
    assert len({tuple(output.token_ids) for output in alone}) >= len(alone) - 2


@pytest.fixture(autouse=True)
def rows_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that what goes into a pass does not depend on how fast this machine is."""
    monkeypatch.setattr(Paces, "prompt_rows", lambda self, most, **_: most)


# What goes into a pass.


def test_one_pass_takes_rows_of_every_kind(target: LoadedModel) -> None:
    bench = Bench(target, rows=256)
    sessions = {
        name: bench.open(Request(tuple(prompt(length, seed))), name)
        for seed, (name, length) in enumerate(
            {"plain": 20, "block": 35, "draft": 18, "long": 300, "short": 12}.items()
        )
    }
    running = [sessions[name] for name in ("plain", "block", "draft")]
    bench.run(*(Prefill(session.sequence) for session in running))
    bench.add(Prefill(sessions["long"].sequence))
    bench.add(Verification(sessions["plain"], [], []))
    bench.add(Prefill(sessions["short"].sequence))
    bench.add(Verification(sessions["block"], [3, 4, 5, 6], []))
    bench.add(Proposing(sessions["draft"], 3, TOP_N))
    bench.step()
    # Beside running sessions, prompts get a quarter of the budget, short ones their part of it.
    assert bench.rows() == {
        "plain": (19, 1, 1),
        "block": (34, 5, 5),
        "draft": (17, 1, 1),
        "long": (0, 53, 0),
        "short": (0, 11, 0),
    }
    bench.step()
    assert bench.rows() == {"draft": (18, 1, 1), "long": (53, 64, 0)}
    bench.step()
    assert bench.rows() == {"draft": (19, 1, 1), "long": (117, 64, 0)}
    # Alone they get all of it.
    for session in running:
        bench.close(session)
    bench.step()
    assert bench.rows() == {"long": (181, 118, 0)}
    assert not bench.scheduler.has_work


def test_a_block_larger_than_the_budget_takes_several_passes(target: LoadedModel) -> None:
    request = Request(tuple(prompt(20)))
    outcomes = []
    for rows in (16, 256):
        bench = Bench(target, rows=rows)
        session = bench.open(request, "all")
        bench.run(Prefill(session.sequence))
        count = len(bench.model.passes)
        outcomes += bench.run(Verification(session, prompt(40, 3), []))
        fed = [bench.rows(index)["all"] for index in range(count, len(bench.model.passes))]
        assert sum(n for _, n, _ in fed) == sum(wanted for _, _, wanted in fed) == 41
    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize("rows", [16, 40, 256])
def test_neighbours_of_every_kind_are_not_felt(
    target: LoadedModel, drafter: LoadedModel, alone: list[Output], rows: int
) -> None:
    benches = Bench(target, rows=rows), Bench(drafter, rows=rows)
    outputs = run_clients([client(request, *benches) for request in REQUESTS], *benches)
    assert_equal(outputs, alone)
    assert max(len(segments) for segments in benches[0].model.passes) >= 4
    assert [bench.scheduler.residents.num_preemptions for bench in benches] == [0, 0]


def test_identical_prompts_that_arrive_together_are_fed_once(target: LoadedModel) -> None:
    bench = Bench(target, rows=32)
    same = Request(tuple(prompt(100)))
    sessions = [bench.open(same) for _ in range(5)]
    bench.run(*(Prefill(session.sequence) for session in sessions))
    # Each of the others feeds what follows the last whole page before the last token.
    assert bench.count_rows() == 99 + 4 * 3
    assert [session.sequence.reused_length for session in sessions] == [0, 96, 96, 96, 96]


def test_prompts_with_a_common_beginning_feed_it_once(target: LoadedModel) -> None:
    bench = Bench(target, rows=32)
    sessions = [bench.open(Request((*prompt(64), *prompt(30, seed)))) for seed in range(1, 5)]
    bench.run(*(Prefill(session.sequence) for session in sessions))
    assert bench.count_rows() == 93 + 3 * 29


@pytest.mark.parametrize(
    "requests",
    [
        [Request(tuple(prompt(50)), salt=salt) for salt in "abc"],
        [Request(tuple(prompt(50)), bypass=True) for _ in range(3)],
        [Request(tuple(prompt(50, seed))) for seed in range(3)],
    ],
    ids=["salts", "bypass", "nothing in common"],
)
def test_who_shares_nothing_waits_for_nobody(target: LoadedModel, requests: list[Request]) -> None:
    bench = Bench(target)
    bench.run(*(Prefill(bench.open(request).sequence) for request in requests))
    assert len(bench.model.passes) == 1
    assert bench.count_rows() == 3 * 49


# Fairness.


@dataclass
class Runner:
    """A session that always has a block to verify."""

    bench: Bench
    session: Session
    k: int
    rounds: int = 0

    def go_on(self) -> None:
        drafted = [5] * self.k

        def ended() -> None:
            self.rounds += 1
            self.go_on()

        self.bench.scheduler.add(Verification(self.session, drafted, []), ended)


def runners(bench: Bench, count: int, k: int = 3, length: int = 12) -> list[Runner]:
    found = []
    for index in range(count):
        name = f"runner {index}"
        session = bench.open(Request(tuple(prompt(length, index)), bypass=True), name)
        bench.run(Prefill(session.sequence))
        found.append(Runner(bench, session, k))
    for each in found:
        each.go_on()
    return found


def test_with_more_work_than_the_budget_everyone_advances_alike(target: LoadedModel) -> None:
    bench = Bench(target, rows=16)
    running = runners(bench, 30)
    for _ in range(60):
        bench.step()
    # Four blocks of four rows a pass: each has its turn after seven or eight passes.
    assert {each.rounds for each in running} <= {7, 8, 9}


def test_drafts_advance_with_more_of_them_than_the_budget(target: LoadedModel) -> None:
    bench = Bench(target, rows=16)
    sessions = [bench.open(Request(tuple(prompt(9, i)), bypass=True)) for i in range(40)]
    bench.run(*(Prefill(session.sequence) for session in sessions))
    count = len(bench.model.passes)
    drafts = bench.run(*(Proposing(session, 4, TOP_N) for session in sessions))
    assert {len(draft.token_ids) for draft in drafts} == {4}
    # 16 sessions a pass, each for four passes.
    assert len(bench.model.passes) - count == 3 * 4


def test_a_prefill_advances_beside_any_load(target: LoadedModel) -> None:
    bench = Bench(target, rows=16)
    running = runners(bench, 30)
    session = bench.open(Request(tuple(prompt(200))), "late")
    prefill = bench.add(Prefill(session.sequence))
    while not prefill.done:
        bench.step()
        assert bench.rows()["late"][1] >= 1
    before = [each.rounds for each in running]
    assert sum(before) > 0
    assert len(bench.model.passes) < 30 + 200 // 4 + 5


def test_a_long_prefill_does_not_stop_running_sessions(target: LoadedModel) -> None:
    bench = Bench(target, rows=64)
    running = runners(bench, 6)
    session = bench.open(Request(tuple(prompt(400))), "long")
    prefill = bench.add(Prefill(session.sequence))
    for count in range(1, 1000):
        bench.step()
        assert [each.rounds for each in running] == [count] * 6
        if prefill.done:
            break
    assert count == 400 // 16


def test_a_resumed_session_does_not_stop_running_ones(target: LoadedModel) -> None:
    """What was preempted is fed again at the pace of a prefill."""
    bench = Bench(target, rows=64)
    resumed = bench.open(Request(tuple(prompt(400)), bypass=True), "resumed")
    bench.run(Prefill(resumed.sequence))
    bench.scheduler.residents.preempt(resumed.sequence)
    verification = bench.add(Verification(resumed, [3, 4], []))
    running = [Runner(bench, bench.open(Request((5, index))), 3) for index in range(6)]
    for each in running:
        each.go_on()
    for count in range(1, 1000):
        bench.step()
        assert [each.rounds for each in running] == [count] * 6
        if verification.done:
            break
    assert count <= 402 // 16 + 2


# A pool that is too small.


def test_the_youngest_waits_for_pages_and_then_gets_them(target: LoadedModel) -> None:
    bench = Bench(target, pages=12)
    first, second = (bench.open(Request(tuple(prompt(90, i)), bypass=True)) for i in (1, 2))
    bench.run(Prefill(first.sequence), Prefill(second.sequence))
    third = bench.open(Request(tuple(prompt(60, 3))))
    waiting = bench.add(Prefill(third.sequence))
    assert not bench.step()
    assert not waiting.done
    assert bench.scheduler.residents.num_preemptions == 0
    bench.close(first)
    assert bench.step()
    assert waiting.done
    assert third.sequence.cached_length == 59


def test_the_oldest_takes_pages_from_the_youngest(target: LoadedModel) -> None:
    bench = Bench(target, pages=12)
    sessions = [bench.open(Request(tuple(prompt(60, i)), bypass=True)) for i in range(3)]
    bench.run(*(Prefill(session.sequence) for session in sessions))
    (outcome,) = bench.run(Verification(sessions[0], [5] * 8, []))
    assert isinstance(outcome, Verified)
    assert bench.scheduler.residents.num_preemptions == 1
    assert [len(session.sequence.pages) for session in sessions] == [pages_for(61), 4, 0]


def test_cached_prefixes_go_before_sessions_do(target: LoadedModel) -> None:
    bench = Bench(target, pages=12)
    gone = bench.open(Request(tuple(prompt(60, 1))))
    bench.run(Prefill(gone.sequence))
    bench.close(gone)
    sessions = [bench.open(Request(tuple(prompt(90, i)), bypass=True)) for i in (2, 3)]
    bench.run(*(Prefill(session.sequence) for session in sessions))
    assert bench.scheduler.residents.num_preemptions == 0
    assert bench.scheduler.residents.prefixes.num_pages == 0


def test_who_cannot_have_enough_takes_nothing_from_others(target: LoadedModel) -> None:
    """The oldest is idle and holds what the second wants. The youngest goes on meanwhile."""
    bench = Bench(target, pages=20, rows=16)
    oldest, second, youngest = (
        bench.open(Request(tuple(prompt(n, n)), bypass=True)) for n in (200, 150, 100)
    )
    bench.run(Prefill(oldest.sequence))
    waiting = bench.add(Prefill(second.sequence))
    going = bench.add(Prefill(youngest.sequence))
    for _ in range(40):
        bench.step()
    assert going.done
    assert not waiting.done
    bench.close(oldest)
    bench.run()
    while not waiting.done:
        assert bench.step()


def test_who_rests_yields_to_younger_sessions(
    target: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else sessions could wait for each other for ever, or for a client that does not read."""
    bench = Bench(target, pages=20)
    resting, running = (bench.open(Request(tuple(prompt(120, i)), bypass=True)) for i in (1, 2))
    bench.run(Prefill(resting.sequence), Prefill(running.sequence))
    young = bench.open(Request(tuple(prompt(100, 3)), bypass=True))
    waiting = bench.add(Prefill(young.sequence))
    assert not bench.step()
    let_rest_after(monkeypatch, 0.0)
    while not waiting.done:
        # Who has work does not rest.
        bench.run(Verification(running, [5], []))
    assert [len(s.sequence.pages) for s in (resting, running, young)] == [0, 8, 7]
    let_rest_after(monkeypatch, 1000.0)
    (outcome,) = bench.run(Verification(resting, [5], []))
    assert isinstance(outcome, Verified)


def test_who_waits_for_a_pass_does_not_rest(
    target: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(target, pages=16, rows=16)
    old, young = (bench.open(Request(tuple(prompt(120, i)), bypass=True)) for i in (1, 2))
    bench.run(Prefill(old.sequence), Prefill(young.sequence))
    let_rest_after(monkeypatch, 0.0)
    bench.add(Verification(young, [5] * 15, []))
    bench.add(Verification(old, [5] * 15, []))
    bench.step()
    # Both need another page; the older one comes later in the queue.
    assert (len(old.sequence.pages), len(young.sequence.pages)) == (8, 0)


def test_a_lone_session_can_use_the_whole_pool(target: LoadedModel) -> None:
    """Also when another one left a copy of its beginning in the cache meanwhile."""
    bench = Bench(target, pages=20, rows=64)
    text = prompt(319)
    other = bench.open(Request(tuple(text[:40])))
    bench.run(Prefill(other.sequence))
    # The other has generated just what the session's prompt goes on with.
    other.sequence.commit(40, text[40:81])
    bench.run(Verification(other, [], []))
    session = bench.open(Request(tuple(text[:200])))
    prefill = bench.add(Prefill(session.sequence))
    bench.step()
    bench.close(other)
    assert not prefill.done
    assert bench.scheduler.residents.prefixes.num_pages == 5
    bench.run(prefill)
    # What both computed is held once.
    assert bench.scheduler.residents.pool.num_free == 20 - pages_for(199)
    session.sequence.commit(200, text[200:])
    (outcome,) = bench.run(Verification(session, [], []))
    assert isinstance(outcome, Verified)
    assert len(session.sequence.pages) == 20


@pytest.mark.parametrize(("pages", "rows"), [(14, 64), (20, 16), (30, 256)])
def test_preempted_sessions_lose_nothing(
    target: LoadedModel, drafter: LoadedModel, alone: list[Output], pages: int, rows: int
) -> None:
    benches = Bench(target, pages=pages, rows=rows), Bench(drafter, pages=pages, rows=rows)
    outputs = run_clients([client(request, *benches) for request in REQUESTS], *benches)
    assert_equal(outputs, alone)
    assert min(bench.scheduler.residents.num_preemptions for bench in benches) > 0


@pytest.mark.parametrize("k", [1, 4, 8])
@pytest.mark.parametrize("bypass", [False, True])
def test_a_preemption_at_any_time_is_not_felt(
    target: LoadedModel, drafter: LoadedModel, k: int, bypass: bool
) -> None:
    """Between any two passes, in the middle of a proposal too."""
    request = Request(
        tuple(prompt(50)), k, bypass=bypass, scored=True, sampling={"temperature": 0.8, "seed": 3}
    )
    outputs = []
    for every in (0, 1, 2, 3, 7):
        benches = Bench(target), Bench(drafter)

        def preempt(bench: Bench, every: int = every) -> None:
            for sequence in bench.scheduler.residents.sequences:
                if every and sequence.pages and len(bench.model.passes) % every == 0:
                    bench.scheduler.residents.preempt(sequence)
                    bench.scheduler.residents.check_integrity()
                    known = bench.scheduler.residents.prefixes.num_pages
                    assert known <= (sequence.committed_length // PAGE_SIZE if not bypass else 0)

        outputs += run_clients([client(request, *benches)], *benches, between=preempt)
        if every:
            assert min(bench.scheduler.residents.num_preemptions for bench in benches) > 0
    for other in outputs[1:]:
        assert other.rounds == outputs[0].rounds
        assert other.prompt_logprobs == pytest.approx(outputs[0].prompt_logprobs, abs=1e-4)


def test_a_preemption_amid_prompt_logprobs_starts_them_anew(target: LoadedModel) -> None:
    found = []
    for after in (None, 1, 2):
        bench = Bench(target)
        session = bench.open(Request(tuple(prompt(200))))
        prefill = bench.add(ScoredPrefill(session.sequence, 2))
        while not prefill.done:
            bench.step()
            if len(bench.model.passes) == after:
                bench.scheduler.residents.preempt(session.sequence)
        found.append([each.logprob for each in prefill.result])
        assert len(bench.model.passes) == 4 + (after or 0)
    assert len(found[0]) == 199
    assert found[1] == pytest.approx(found[0], abs=1e-4)
    assert found[2] == pytest.approx(found[0], abs=1e-4)


def test_a_preemption_amid_a_block_starts_it_anew(target: LoadedModel) -> None:
    """The block takes three passes; what the first gave must not be counted twice."""
    outcomes = []
    for after in (None, 1, 2):
        bench = Bench(target, rows=16)
        session = bench.open(Request(tuple(prompt(10))))
        bench.run(Prefill(session.sequence))
        count = len(bench.model.passes)
        work = bench.add(Verification(session, [5] * 40, []))
        while not work.done:
            bench.step()
            if len(bench.model.passes) - count == after:
                bench.scheduler.residents.preempt(session.sequence)
        assert work.error is None
        outcomes.append(work.result)
    assert outcomes[0] == outcomes[1] == outcomes[2]


def test_drafted_tokens_are_never_shared(target: LoadedModel) -> None:
    bench = Bench(target)
    session = bench.open(Request(tuple(prompt(20))))
    bench.run(Prefill(session.sequence))
    bench.add(Proposing(session, 60, TOP_N))
    for _ in range(50):
        bench.step()
    tokens = list(session.sequence.tokens)
    assert len(tokens) == 70
    bench.close(session)
    assert len(bench.scheduler.residents.prefixes.peek(tokens, "")) == 20 // PAGE_SIZE
    bench.assert_nothing_is_left()


def test_a_rollback_after_a_preemption_writes_to_no_shared_page(target: LoadedModel) -> None:
    """While a proposal waits for its pages, another session may publish the very tokens that it has
    drafted. They are not its own to overwrite when the target rejects them."""
    bench = Bench(target)
    session = bench.open(Request(tuple(prompt(20))))
    bench.run(Prefill(session.sequence))
    proposing = bench.add(Proposing(session, 60, TOP_N))
    for _ in range(50):
        bench.step()
    bench.scheduler.residents.preempt(session.sequence)
    other = bench.open(Request(tuple(session.sequence.tokens)))
    bench.scheduler._works.remove(proposing)
    bench.run(Prefill(other.sequence))
    bench.scheduler._works.append(proposing)
    bench.run(proposing)
    shared = set(other.sequence.pages)
    passes = len(bench.model.passes)
    bench.run(Proposing(session, 3, TOP_N, (20, [7, 8])))
    written = [
        page
        for segments in bench.model.passes[passes:]
        for segment in segments
        for page in segment.pages[segment.start // PAGE_SIZE :]
    ]
    assert written
    assert not shared & set(written)


# Failures.


def failing_for(bench: Bench, session: Session) -> Callable[[Sequence[Segment]], None]:
    def before(segments: Sequence[Segment]) -> None:
        if any(segment.pages is session.sequence.pages for segment in segments):
            raise RuntimeError("planted")

    return before


def opened(bench: Bench, count: int, k: int = 0, **options: Any) -> list[Session]:
    """Sessions with different prompts, fed."""
    sessions = [bench.open(Request(tuple(prompt(20 + i, i)), k, **options)) for i in range(count)]
    bench.run(*(Prefill(session.sequence) for session in sessions))
    return sessions


def blocks(sessions: Sequence[Session]) -> list[Verification]:
    return [Verification(session, [5 + i, 6, 7], []) for i, session in enumerate(sessions)]


@pytest.mark.parametrize("at_fault", [0, 2, 4])
def test_a_failing_pass_fails_only_the_work_at_fault(target: LoadedModel, at_fault: int) -> None:
    expected = Bench(target)
    outcomes = expected.run(*blocks(opened(expected, 5)))
    bench = Bench(target)
    sessions = opened(bench, 5)
    bench.model.before = failing_for(bench, sessions[at_fault])
    found = bench.run(*blocks(sessions))
    assert str(found[at_fault]) == "planted"
    found[at_fault] = outcomes[at_fault]
    assert found == outcomes
    for session in sessions:
        bench.close(session)
    bench.assert_nothing_is_left()


def test_a_failing_pass_fails_a_prefill_but_not_who_runs_beside_it(target: LoadedModel) -> None:
    bench = Bench(target)
    running = opened(bench, 3)
    late = bench.open(Request(tuple(prompt(30, 9))))
    bench.model.before = failing_for(bench, late)
    prefill = Prefill(late.sequence)
    *outcomes, error = bench.run(*blocks(running), prefill)
    assert str(error) == "planted"
    assert all(isinstance(outcome, Verified) for outcome in outcomes)
    bench.close(late)
    # What never was fed is not in the cache.
    assert bench.scheduler.residents.prefixes.peek(prompt(30, 9), "") == []


def test_a_work_that_cannot_start_or_take_fails_alone(target: LoadedModel) -> None:
    bench = Bench(target)
    sessions = opened(bench, 4)

    class CannotStart(Verification):
        def start(self) -> None:
            raise ValueError("start")

    class CannotTake(Verification):
        def take(self, logits: torch.Tensor) -> None:
            raise ValueError("take")

    found = bench.run(
        *blocks(sessions[:2]),
        CannotStart(sessions[2], [], []),
        CannotTake(sessions[3], [], []),
    )
    assert [isinstance(each, Verified) for each in found] == [True, True, False, False]
    assert [str(each) for each in found[2:]] == ["start", "take"]


def test_a_kind_that_cannot_consume_fails_no_other_kind(target: LoadedModel) -> None:
    bench = Bench(target)
    sessions = opened(bench, 4)

    class CannotConsume(Verification):
        @classmethod
        def consume(cls, works: Sequence[Verification]) -> None:
            raise ValueError("consume")

    works = [*blocks(sessions[:2]), *(CannotConsume(session, [], []) for session in sessions[2:])]
    found = bench.run(*works)
    assert [isinstance(each, Verified) for each in found] == [True, True, False, False]
    for session in sessions:
        bench.close(session)
    bench.assert_nothing_is_left()


MIXED = [
    {},
    {"temperature": 0.8, "seed": 1},
    {"repetition_penalty": 1.5},
    {"temperature": 1.0, "top_p": 0.9, "seed": 2},
    {"presence_penalty": 1.0},
]


def mixed(bench: Bench, *, bypass: bool = False) -> list[Session]:
    """One session for each of MIXED, fed."""
    sessions = [
        bench.open(Request(tuple(prompt(20 + i, i)), bypass=bypass, sampling=sampling))
        for i, sampling in enumerate(MIXED)
    ]
    bench.run(*(Prefill(session.sequence) for session in sessions))
    return sessions


@pytest.mark.parametrize("at_fault", range(len(MIXED)))
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_logits_that_are_no_numbers_reach_nobody_else(
    target: LoadedModel, at_fault: int, bad: float
) -> None:
    expected = Bench(target)
    outcomes = expected.run(*blocks(mixed(expected)))
    bench = Bench(target)
    sessions = mixed(bench)

    def spoil(segments: Sequence[Segment], logits: torch.Tensor) -> None:
        row = 0
        for segment in segments:
            if segment.pages is sessions[at_fault].sequence.pages:
                logits[row : row + segment.num_logits] = bad
            row += segment.num_logits

    bench.model.after = spoil
    found = bench.run(*blocks(sessions))
    assert isinstance(found[at_fault], FloatingPointError)
    found[at_fault] = outcomes[at_fault]
    assert found == outcomes


def test_a_draft_without_numbers_reaches_no_other_draft(drafter: LoadedModel) -> None:
    expected = Bench(drafter)
    drafts = expected.run(*(Proposing(each, 3, TOP_N) for each in mixed(expected)))
    for at_fault in range(len(MIXED)):
        bench = Bench(drafter)
        sessions = mixed(bench)
        spoiled = sessions[at_fault].sequence

        def spoil(
            segments: Sequence[Segment], logits: torch.Tensor, spoiled: Any = spoiled
        ) -> None:
            for row, segment in enumerate(segments):
                if segment.pages is spoiled.pages:
                    logits[row] = torch.nan

        bench.model.after = spoil
        found = bench.run(*(Proposing(each, 3, TOP_N) for each in sessions))
        for index, (one, other) in enumerate(zip(found, drafts, strict=True)):
            assert index == at_fault or one.token_ids == other.token_ids


def test_pages_full_of_no_numbers_are_cleared_before_others_get_them(target: LoadedModel) -> None:
    expected = Bench(target, pages=10)
    outcomes = expected.run(*blocks(mixed(expected, bypass=True)))
    bench = Bench(target, pages=10)
    failed = bench.open(Request(tuple(prompt(150, 3)), bypass=True))
    bench.run(Prefill(failed.sequence))
    assert len(failed.sequence.pages) == 10
    for base in bench.model._store._bases.values():
        base[:, 1:] = torch.nan
    (error,) = bench.run(Verification(failed, [], []))
    assert isinstance(error, FloatingPointError)
    bench.close(failed)
    assert bench.run(*blocks(mixed(bench, bypass=True))) == outcomes


# Sessions that end early.


@pytest.mark.parametrize("passes", range(8))
def test_a_session_that_ends_at_any_time_leaves_nothing(target: LoadedModel, passes: int) -> None:
    """Queued, in a prefill, in a block, in a proposal."""
    bench = Bench(target, pages=40, rows=16)
    sessions = [bench.open(Request(tuple(prompt(30 + 10 * i, i % 3)))) for i in range(4)]
    prefills = [bench.add(Prefill(session.sequence)) for session in sessions]
    for _ in range(passes):
        bench.step()
    running = []
    for session, prefill in zip(sessions, prefills, strict=True):
        if prefill.done:
            work = Verification(session, [5] * 20, []) if running else Proposing(session, 9, TOP_N)
            running.append(bench.add(work))
    bench.step()
    for session in sessions:
        bench.close(session)
        bench.step()
    bench.assert_nothing_is_left()


def test_a_work_of_a_closed_session_is_not_run(target: LoadedModel) -> None:
    bench = Bench(target)
    sessions = opened(bench, 2)
    for work in blocks(sessions):
        bench.add(work)
    bench.close(sessions[0])
    bench.step()
    assert len(bench.model.passes[-1]) == 1


# On the model thread.


class Gate:
    """Holds a pass until it is opened."""

    def __init__(self, bench: Bench) -> None:
        self._entered = threading.Event()
        self._open = threading.Event()
        bench.model.before = self._before

    def _before(self, segments: Sequence[Segment]) -> None:
        self._entered.set()
        assert self._open.wait(10)

    async def entered(self) -> None:
        """Waits until the pass has begun."""
        assert await asyncio.to_thread(self._entered.wait, 10)

    def open(self) -> None:
        self._open.set()


@pytest.fixture
def model_thread() -> Iterator[ModelThread]:
    running = ModelThread(1)
    yield running
    running.close()


async def test_a_session_cancelled_in_a_pass_frees_its_pages_after_it(
    target: LoadedModel, model_thread: ModelThread
) -> None:
    bench = Bench(target)
    model_thread.attach(bench.scheduler)
    gate = Gate(bench)
    cancelled, other = (bench.open(Request(tuple(prompt(40, i)))) for i in range(2))
    tasks = [
        asyncio.create_task(model_thread.work(Prefill(session.sequence)))
        for session in (cancelled, other)
    ]
    await gate.entered()
    tasks[0].cancel()
    await asyncio.gather(tasks[0], return_exceptions=True)
    model_thread.post(lambda: bench.close(cancelled))
    gate.open()
    await tasks[1]
    verified, timings = await model_thread.work(Verification(other, [5], []))
    assert isinstance(verified, Verified)
    assert timings.compute_us > 0
    await model_thread.run(bench.close, other)
    bench.assert_nothing_is_left()


async def test_the_thread_survives_what_fails_on_it(
    target: LoadedModel, model_thread: ModelThread
) -> None:
    bench = Bench(target)
    model_thread.attach(bench.scheduler)
    (session,) = opened(bench, 1)

    def broken(segments: Sequence[Segment]) -> None:
        raise RuntimeError("planted")

    bench.model.before = broken
    with pytest.raises(RuntimeError, match="planted"):
        await model_thread.work(Verification(session, [], []))
    bench.model.before = lambda segments: None
    model_thread.post(lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        await model_thread.run(lambda: 1 // 0)
    # What fails outside of any work fails all works, and no more.
    choose = bench.scheduler._choose
    bench.scheduler._choose = lambda: 1 // 0  # type: ignore[method-assign]
    (second,) = opened_later(bench)
    with pytest.raises(ZeroDivisionError):
        await model_thread.work(Verification(second, [], []))
    bench.scheduler._choose = choose  # type: ignore[method-assign]
    verified, _ = await model_thread.work(Verification(opened_later(bench)[0], [], []))
    assert isinstance(verified, Verified)


def opened_later(bench: Bench) -> list[Session]:
    """A session that was not fed."""
    return [bench.open(Request(tuple(prompt(25, 8))))]


async def test_closing_the_thread_in_a_pass_ends_it(target: LoadedModel) -> None:
    before = set(threading.enumerate())
    model_thread = ModelThread(1)
    (running,) = set(threading.enumerate()) - before
    bench = Bench(target)
    model_thread.attach(bench.scheduler)
    gate = Gate(bench)
    session = bench.open(Request(tuple(prompt(40))))
    waiting = asyncio.create_task(model_thread.work(Prefill(session.sequence)))
    await gate.entered()
    model_thread.close()
    gate.open()
    await asyncio.to_thread(running.join, 5)
    assert not running.is_alive()
    waiting.cancel()
    bench.scheduler.residents.check_integrity()


async def test_a_thread_whose_works_all_wait_for_an_idle_session_sleeps(
    target: LoadedModel, model_thread: ModelThread
) -> None:
    bench = Bench(target, pages=10)
    old = bench.open(Request(tuple(prompt(150))))
    bench.run(Prefill(old.sequence))
    young = bench.open(Request(tuple(prompt(60, 2))))
    steps = 0
    step = bench.scheduler.step

    def counted() -> bool:
        nonlocal steps
        steps += 1
        return step()

    bench.scheduler.step = counted  # type: ignore[method-assign]
    model_thread.attach(bench.scheduler)
    waiting = asyncio.create_task(model_thread.work(Prefill(young.sequence)))
    begun = time.process_time()
    await asyncio.sleep(0.3)
    assert steps <= 3
    # A loop that spins would take all of it.
    assert time.process_time() - begun < 0.25
    assert not waiting.done()
    model_thread.post(lambda: bench.close(old))
    await asyncio.wait_for(waiting, 5)


async def test_the_thread_finds_by_itself_that_a_session_rests(
    target: LoadedModel, model_thread: ModelThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    let_rest_after(monkeypatch, 0.05)
    bench = Bench(target, pages=10)
    old, young = (bench.open(Request(tuple(prompt(150, i)))) for i in range(2))
    model_thread.attach(bench.scheduler)
    await model_thread.work(Prefill(old.sequence))
    await asyncio.wait_for(model_thread.work(Prefill(young.sequence)), 5)
    assert old.sequence.pages == []


def test_an_older_session_without_pages_is_not_kept_waiting_by_a_younger_one(
    target: LoadedModel,
) -> None:
    """It lost its pages while it rested; the younger one decodes in every pass."""
    bench = Bench(target, pages=11, rows=64)
    older, younger = (bench.open(Request(tuple(prompt(n, n)), bypass=True)) for n in (120, 60))
    bench.run(Prefill(older.sequence))
    older.sequence.idle_since = -math.inf
    bench.run(Prefill(younger.sequence))
    assert not older.sequence.pages
    works = [bench.add(Verification(older, [], [])), bench.add(Verification(younger, [], []))]
    for _ in range(20):
        if works[1].done:
            works[1] = bench.add(Verification(younger, [], []))
        bench.step()
        if works[0].done:
            break
    assert works[0].done


def test_a_large_prompt_is_not_overtaken_for_ever(target: LoadedModel) -> None:
    """Sessions of 4 pages come and go, and it needs 16 of 20."""
    bench = Bench(target, pages=20, rows=64)

    def newcomer() -> tuple[Session, Work]:
        session = bench.open(Request(tuple(prompt(60, next(seeds))), bypass=True))
        return session, bench.add(Prefill(session.sequence))

    seeds = itertools.count()
    small = [newcomer() for _ in range(4)]
    bench.step()
    large = bench.open(Request(tuple(prompt(250, 3)), bypass=True))
    wanted = bench.add(Prefill(large.sequence))
    for turn in range(100):
        if wanted.done:
            break
        bench.step()
        # One ends, and another comes in its place.
        index = turn % len(small)
        bench.close(small[index][0])
        small[index] = newcomer()
    assert wanted.done
