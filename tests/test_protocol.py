"""The two internal streams by random schedules: what docs/protocol.md says holds, whatever comes.

Each schedule is made by a seed, which a failure names.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
import torch
from google.protobuf import text_format

from draft_service.combination import CombinedSession
from draft_service.drafter import Draft, DraftSession, Prepared
from gateway.controller import Controller, DraftPlan
from gateway.free_drafts import FreeDrafts
from specdec import streams
from specdec.drafting import DraftRounds, Timeliness
from specdec.errors import SpecdecError, reason_of
from specdec.lm.randomness import Stream, gumbel, key, seed_tensor, uniform
from specdec.sessions import ACCEPTANCE_RULES, SessionContract
from specdec.v1 import (
    common_pb2,
    draft_pb2,
    draft_pb2_grpc,
    gateway_pb2,
    gateway_pb2_grpc,
    verifier_pb2,
    verifier_pb2_grpc,
)
from tests.protocol import (
    BREAKS_OFF,
    FAULTS,
    Asked,
    Script,
    ScriptedDraft,
    ScriptedVerifier,
)
from tests.stack import RULES, Gateway, draft, gateway, verifier
from tests.test_streams import PROMPT, VerifyClient, opening, plain

pytestmark = pytest.mark.usefixtures("forgiving")

DOCUMENT = Path(__file__).parent.parent / "docs" / "protocol.md"
LATE = 0.1
"""Seconds: a gateway of less patience gives a late draft up."""
SCHEDULES = pytest.mark.parametrize(
    "seeds", [range(4), pytest.param(range(4, 50), marks=pytest.mark.slow)], ids=["few", "many"]
)

CASES: dict[str, list[str]] = {
    "on time": ["shorter"],
    "empty": ["shorter", "empty"],
    "duplicate": ["shorter", "duplicate"],
    "stale": ["shorter", "stale"],
    "pushed for other verdicts": ["shorter", "wrong"],
    "pushed for the verdict that comes": ["shorter", "right"],
    "several for one verdict": ["shorter", "right", "again"],
    "reordered": ["shorter", "right", "wrong", "far", "reordered"],
    "all of it": [
        *("shorter", "empty", "duplicate", "stale", "wrong", "right", "again", "far", "reordered")
    ],
    "unusable": ["shorter", "right", "stale", *(f for f in FAULTS if f not in BREAKS_OFF)],
    "broken off": ["shorter", "duplicate", *(f for f in BREAKS_OFF if f != "late")],
}


@dataclass
class Bench:
    """A gateway between a real verifier and a draft that follows scripts."""

    gateway: Gateway
    impatient: Gateway
    """One more, that waits for LATE seconds only."""
    draft: ScriptedDraft
    draft_address: str
    verifier_address: str
    lost: bool = True
    """Whether the gateway may have to shake hands with the draft again."""
    references: dict[tuple[float, int], list[int]] = field(default_factory=dict)

    async def reference(self, temperature: float, seed: int) -> list[int]:
        """What the target says alone."""
        if (temperature, seed) not in self.references:
            result = await self.gateway.generate(
                PROMPT, k=0, temperature=temperature, seed=seed, max_new_tokens=30, ignore_eos=True
            )
            self.references[temperature, seed] = result.token_ids
        return self.references[temperature, seed]

    async def draft_is_known(self, running: Gateway) -> None:
        """Waits until the draft would be asked."""
        self.draft.script = None
        for _ in range(500):
            result = await running.generate([1], k=1, max_new_tokens=2, ignore_eos=True)
            if result.speculation.fallback_reason in ("", "the draft proposed nothing"):
                return
            await asyncio.sleep(0.01)
        raise AssertionError(f"the draft is not used: {result.speculation.fallback_reason}")


@asynccontextmanager
async def serving(register: Any) -> AsyncIterator[str]:
    server = grpc.aio.server()
    register(server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


@pytest_asyncio.fixture(scope="module")
async def bench(target_folder: Path) -> AsyncIterator[Bench]:
    async with AsyncExitStack() as stack:
        verifier_address, servicer = await stack.enter_async_context(verifier(target_folder))
        assert servicer.runtime is not None
        fake = ScriptedDraft(servicer.runtime.info)
        address = await stack.enter_async_context(serving(fake.register))
        patient = await stack.enter_async_context(
            gateway(verifier_address, address, draft_patience_seconds=60.0)
        )
        impatient = await stack.enter_async_context(
            gateway(verifier_address, address, draft_patience_seconds=LATE)
        )
        yield Bench(patient, impatient, fake, address, verifier_address)


class Plans:
    """Decides how much is drafted, in the place of the controller: with pauses."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        """For how many tokens the draft is asked in each round."""
        self._random: random.Random | None = None
        self._pause = 0
        self._limit = 0

    def begin(self, seed: int | None) -> None:
        """From now on at random, or with None all that may be."""
        self.asked, self._pause = [], 0
        self._random = None if seed is None else random.Random(seed)

    def make(self, limit: int) -> DraftPlan:
        count = self._limit = limit
        if self._random is not None:
            if self._pause == 0 and self._random.random() < 0.2:
                self._pause = self._random.randint(1, 3)
            elif self._random.random() < 0.5:
                count = self._random.randint(1, limit)
            if self._pause:
                self._pause -= 1
                count = 0
        self.asked.append(count)
        return DraftPlan(count)

    def ask_all_the_same(self) -> bool:
        """Whether to ask in a pause, too, for what costs nothing."""
        asks = self._random is not None and self._random.random() < 0.2
        self.asked[-1] = self._limit if asks else 0
        return asks

    def rounds(self, script: Script, chunks: list[list[int]]) -> list[Asked]:
        """The rounds in which a draft was asked that follows a script."""
        tokens, found = list(PROMPT), []
        for number, (count, chunk) in enumerate(zip(self.asked, chunks, strict=False), 1):
            if count:
                # The first proposal is of as many tokens as the session may have.
                most = script.asked[0].limit if number == 1 else count
                found.append(Asked(number, list(tokens), most))
            tokens += chunk
        return found


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> Plans:
    made = Plans()
    monkeypatch.setattr(Controller, "plan", lambda _, limit: made.make(limit))
    monkeypatch.setattr(FreeDrafts, "wanted", lambda _: made.ask_all_the_same())
    return made


async def stream(
    running: Gateway, request: gateway_pb2.GenerateRequest, reference: list[int]
) -> tuple[gateway_pb2.Completion, list[list[int]]]:
    """Generates all of the reference. What has come is at each moment a beginning of it.

    Returns:
        The completion, and what each round committed.
    """
    tokens: list[int] = []
    chunks: list[list[int]] = []
    completion = gateway_pb2.Completion()
    call = gateway_pb2_grpc.GenerationServiceStub(running.channel).Generate(request)
    try:
        async for response in call:
            if response.HasField("completion"):
                completion = response.completion
                break
            chunks.append(list(response.chunk.token_ids))
            tokens += response.chunk.token_ids
            assert tokens == reference[: len(tokens)]
    finally:
        call.cancel()
    assert tokens == reference
    assert completion.usage.completion_tokens == len(reference)
    return completion, chunks


def request_of(
    running: Gateway, seed: int, temperature: float, topk: int
) -> gateway_pb2.GenerateRequest:
    request = running.request(
        PROMPT,
        k=4,
        rule=random.Random(seed).choice(list(RULES)) if temperature == 0.0 else "coupled",
        temperature=temperature,
        seed=7,
        max_new_tokens=30,
        ignore_eos=True,
    )
    request.speculation.adaptive = True
    request.speculation.run_ahead = 2
    request.speculation.draft_topk = topk
    return request


async def follow(
    bench: Bench, plans: Plans, seed: int, case: str
) -> gateway_pb2.SpeculationStatistics:
    """One generation with a draft that follows a schedule of the case."""
    temperature, topk = random.Random(seed).choice([(0.0, 1), (0.0, 2), (0.9, 1), (0.9, 3)])
    reference = await bench.reference(temperature, 7)
    if bench.lost:
        plans.begin(None)
        await bench.draft_is_known(bench.gateway)
        bench.lost = False
    script = Script(seed, CASES[case], reference, topk=topk)
    bench.draft.script = script
    plans.begin(seed)
    request = request_of(bench.gateway, seed, temperature, topk)
    completion, chunks = await stream(bench.gateway, request, reference)
    assert script.contradiction is None
    spoke = completion.speculation
    assert spoke.rounds == len(chunks)
    assert spoke.undrafted_rounds >= plans.asked.count(0)
    if script.fault in BREAKS_OFF:
        bench.lost = True
        return spoke
    rounds = plans.rounds(script, chunks)
    expected = script.expected(rounds)
    assert spoke.num_draft_tokens == sum(expected.used)
    assert spoke.num_accepted_tokens == expected.accepted
    speculative = sum(count > 0 for count in expected.used)
    # For the last token alone nothing is drafted.
    lengths = itertools.accumulate([0, *map(len, chunks[:-1])])
    could = sum(length < len(reference) - 1 for length in lengths)
    assert spoke.fallback_rounds + spoke.undrafted_rounds == could - speculative
    assert spoke.stale_proposals == expected.stale
    assert spoke.run_ahead_hits == expected.hits
    if expected.fault:
        assert script.fault is not None
        assert FAULTS[script.fault] in spoke.fallback_reason
    else:
        assert len(expected.used) == len(rounds)
    return spoke


@SCHEDULES
@pytest.mark.parametrize("case", CASES)
async def test_the_client_gets_what_the_target_says_alone(
    bench: Bench, plans: Plans, case: str, seeds: range
) -> None:
    total = gateway_pb2.SpeculationStatistics()
    for seed in seeds:
        try:
            spoke = await follow(bench, plans, seed, case)
        except AssertionError as error:
            raise AssertionError(f"schedule {seed} of {case!r}: {error}") from error
        for name in ("num_accepted_tokens", "stale_proposals", "run_ahead_hits", "fallback_rounds"):
            setattr(total, name, getattr(total, name) + getattr(spoke, name))
    # The schedules are not idle.
    assert total.num_accepted_tokens > 0
    assert total.stale_proposals > 0
    assert total.run_ahead_hits > 0 or "right" not in CASES[case]
    assert total.fallback_rounds > 0 or not {"empty", *FAULTS} & set(CASES[case])


async def test_a_draft_that_is_late_is_given_up_for_this_generation(
    bench: Bench, plans: Plans
) -> None:
    given_up = 0
    for seed in range(6):
        reference = await bench.reference(0.0, 7)
        plans.begin(None)
        await bench.draft_is_known(bench.impatient)
        script = Script(seed, ["shorter", "late"], reference, late_seconds=3 * LATE)
        bench.draft.script = script
        plans.begin(seed)
        request = request_of(bench.impatient, seed, 0.0, 1)
        completion, _ = await stream(bench.impatient, request, reference)
        if script.fault == "late" and completion.speculation.fallback_rounds > 0:
            given_up += FAULTS["late"] in completion.speculation.fallback_reason
    assert given_up > 0


@pytest.mark.parametrize(
    "numbers",
    [
        {"timings": common_pb2.Timings(compute_us=2**64 - 1, queue_us=2**64 - 1)},
        {"probabilities": [math.nan, math.inf, -1.0]},
        {"probabilities": [1e30] * 1000},
    ],
    ids=["times", "no numbers", "too many"],
)
async def test_no_number_of_a_draft_reaches_the_client_as_an_error(
    bench: Bench, plans: Plans, numbers: dict[str, Any]
) -> None:
    reference = await bench.reference(0.0, 7)
    plans.begin(None)
    await bench.draft_is_known(bench.gateway)

    class Odd(Script):
        async def answer(self, context: Any) -> AsyncIterator[draft_pb2.DraftResponse | bytes]:
            async for response in super().answer(context):
                assert isinstance(response, draft_pb2.DraftResponse)
                if response.HasField("proposal"):
                    del response.proposal.probabilities[:]
                    response.proposal.MergeFrom(draft_pb2.Proposal(**numbers))
                yield response

    bench.draft.script = Odd(1, [], reference)
    request = request_of(bench.gateway, 1, 0.0, 1)
    await stream(bench.gateway, request, reference)
    again = request_of(bench.gateway, 1, 0.0, 1)
    await stream(bench.gateway, again, reference)


@SCHEDULES
async def test_a_miss_is_a_round_that_was_prepared_for_other_verdicts_only(
    bench: Bench, plans: Plans, seeds: range
) -> None:
    """What is left over of earlier rounds is stale, and no miss of this one."""
    for seed in seeds:
        reference = await bench.reference(0.0, 7)
        plans.begin(None)
        await bench.draft_is_known(bench.gateway)
        script = Script(seed, ["right", "wrong"], reference)
        bench.draft.script = script
        plans.begin(seed)
        request = request_of(bench.gateway, seed, 0.0, 1)
        completion, chunks = await stream(bench.gateway, request, reference)
        expected = script.expected(plans.rounds(script, chunks))
        assert completion.speculation.run_ahead_misses == expected.misses, f"schedule {seed}"


class Wrong:
    """Verdicts that contradict what was asked, made of the right one."""

    @staticmethod
    def stale(right: verifier_pb2.Verdict, _: Any) -> list[Any]:
        right.round -= 1
        return [right]

    @staticmethod
    def early(right: verifier_pb2.Verdict, _: Any) -> list[Any]:
        right.round += 1
        return [right]

    @staticmethod
    def duplicate(right: verifier_pb2.Verdict, _: Any) -> list[Any]:
        return [right, right]

    @staticmethod
    def base_length(right: verifier_pb2.Verdict, _: Any) -> list[Any]:
        right.base_length += 1
        return [right]

    @staticmethod
    def too_many_accepted(right: verifier_pb2.Verdict, asked: verifier_pb2.Candidates) -> list[Any]:
        right.num_accepted = len(asked.token_ids) + 1
        right.token_ids[:] = [*asked.token_ids, 1, 2]
        return [right]

    @staticmethod
    def one_token_missing(right: verifier_pb2.Verdict, _: Any) -> list[Any]:
        del right.token_ids[-1]
        return [right]

    @staticmethod
    def one_token_more(right: verifier_pb2.Verdict, _: Any) -> list[Any]:
        right.token_ids.append(1)
        return [right]

    @staticmethod
    def other_tokens(right: verifier_pb2.Verdict, asked: verifier_pb2.Candidates) -> list[Any]:
        right.num_accepted = 1
        right.token_ids[:] = [(t + 1) % 300 for t in list(asked.token_ids[:1]) or [0]] + [1]
        return [right]

    @staticmethod
    def vocabulary(right: verifier_pb2.Verdict, _: Any) -> list[Any]:
        right.token_ids[-1] = 300
        return [right]

    @staticmethod
    def opened_again(right: verifier_pb2.Verdict, _: Any) -> list[Any]:
        return [common_pb2.Opened(round=right.round, base_length=right.base_length)]


@dataclass
class Verified:
    """A gateway between a scripted verifier and a scripted draft."""

    gateway: Gateway
    verifier: ScriptedVerifier
    draft: ScriptedDraft
    reference: list[int]

    async def fail(
        self, seed: int, wrong: Any, *, drafted: bool
    ) -> tuple[list[int], grpc.aio.AioRpcError]:
        """Generates until the verifier is wrong. Returns the tokens so far and the error."""
        script = Script(seed, ["shorter"], self.reference)
        self.draft.script = script if drafted else None
        self.verifier.wrong, self.verifier.wrong_round = wrong, random.Random(seed).randint(1, 6)
        call_request = self.gateway.request(
            PROMPT, k=2 if drafted else 0, temperature=0.0, max_new_tokens=30, ignore_eos=True
        )
        tokens: list[int] = []
        call = gateway_pb2_grpc.GenerationServiceStub(self.gateway.channel).Generate(call_request)
        try:
            async for response in call:
                tokens += response.chunk.token_ids
                assert tokens == self.reference[: len(tokens)]
        except grpc.aio.AioRpcError as error:
            return tokens, error
        finally:
            call.cancel()
            self.verifier.wrong_round = 0
        raise AssertionError("the call did not fail")


@pytest_asyncio.fixture(scope="module")
async def verified(bench: Bench) -> AsyncIterator[Verified]:
    async with AsyncExitStack() as stack:
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(bench.verifier_address))
        fake = ScriptedVerifier(verifier_pb2_grpc.VerifierServiceStub(channel))
        fake.reference = await bench.reference(0.0, 7)
        address = await stack.enter_async_context(
            serving(lambda s: verifier_pb2_grpc.add_VerifierServiceServicer_to_server(fake, s))
        )
        # What breaks is told, and not taken elsewhere.
        settings = {"failover_seconds": 0.0}
        running = await stack.enter_async_context(gateway(address, bench.draft_address, **settings))
        await bench.draft_is_known(running)
        yield Verified(running, fake, bench.draft, list(fake.reference))


@pytest.mark.parametrize("drafted", [False, True], ids=["plain", "drafted"])
@pytest.mark.parametrize("name", [name for name in vars(Wrong) if not name.startswith("_")])
async def test_a_verdict_that_does_not_fit_fails_the_call(
    verified: Verified, name: str, drafted: bool
) -> None:
    for seed in range(4):
        tokens, error = await verified.fail(seed, getattr(Wrong, name), drafted=drafted)
        assert reason_of(error) == "CONTRACT_VIOLATION", f"schedule {seed}"
        assert error.code() == grpc.StatusCode.FAILED_PRECONDITION
        assert tokens == verified.reference[: len(tokens)]
        if not drafted:
            # A duplicate is found one round later: it is stale then.
            rounds = random.Random(seed).randint(1, 6)
            assert len(tokens) == rounds - (name != "duplicate")
    assert not verified.verifier.faults


@pytest.mark.parametrize(
    ("outcome", "reason"),
    [
        (None, "VERIFIER_UNAVAILABLE"),
        ((grpc.StatusCode.UNAVAILABLE, "gone"), "VERIFIER_UNAVAILABLE"),
        ((grpc.StatusCode.RESOURCE_EXHAUSTED, "full"), "VERIFIER_UNAVAILABLE"),
        ((grpc.StatusCode.CANCELLED, "had enough"), "VERIFIER_UNAVAILABLE"),
    ],
)
async def test_a_verify_stream_that_breaks_is_told_as_such(
    verified: Verified, outcome: Any, reason: str
) -> None:
    for seed in range(2):
        for _ in range(200):
            result = await _try(verified.gateway)
            if result is None:
                break
            await asyncio.sleep(0.02)
        tokens, error = await verified.fail(seed, lambda *_: outcome, drafted=False)
        assert reason_of(error) == reason
        assert error.code() == grpc.StatusCode.UNAVAILABLE
        assert tokens == verified.reference[: len(tokens)]
    for _ in range(200):
        if await _try(verified.gateway) is None:
            break
        await asyncio.sleep(0.02)


async def _try(running: Gateway) -> grpc.aio.AioRpcError | None:
    """The error of a short generation, if the verifier is not known yet."""
    try:
        await running.generate(PROMPT, k=0, temperature=0.0, max_new_tokens=1)
    except grpc.aio.AioRpcError as error:
        return error
    return None


class Peer:
    """A gateway's side of a Draft stream, which keeps all that comes."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.proposals: list[draft_pb2.Proposal] = []
        self.error: grpc.aio.AioRpcError | None = None
        self._call = draft_pb2_grpc.DraftServiceStub(channel).Draft()
        self._came = asyncio.Event()
        self._reading = asyncio.create_task(self._read())

    async def send(self, **message: Any) -> None:
        await self._call.write(draft_pb2.DraftRequest(**message))

    async def wait(self, fits: Any, seconds: float = 20.0) -> bool:
        """Waits until a proposal is there that fits, for so long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not any(fits(p) for p in self.proposals) and not self._reading.done():
                    self._came.clear()
                    await self._came.wait()
        return any(fits(p) for p in self.proposals)

    async def end(self) -> None:
        """Ends the stream, and waits for what is on its way."""
        await self._call.done_writing()
        await self._reading

    async def failed(self) -> grpc.aio.AioRpcError:
        await self._reading
        assert self.error is not None
        return self.error

    def close(self) -> None:
        self._reading.cancel()
        self._call.cancel()

    async def _read(self) -> None:
        try:
            async for response in self._call:
                if response.HasField("proposal"):
                    self.proposals.append(response.proposal)
                    self._came.set()
        except grpc.aio.AioRpcError as error:
            self.error = error
        finally:
            self._came.set()


class Logged:
    """Stands in for a log, and keeps what it is told."""

    def __init__(self) -> None:
        self.closed: list[dict[str, Any]] = []

    def info(self, event: str, **facts: Any) -> None:
        if event == "session closed":
            self.closed.append(facts)

    def warning(self, event: str, **facts: Any) -> None:
        """Of failures the client's error tells as much."""

    exception = warning


@pytest.fixture
def logged(monkeypatch: pytest.MonkeyPatch) -> Logged:
    log = Logged()
    monkeypatch.setattr(streams, "_log", log)
    return log


@pytest_asyncio.fixture(
    scope="module", params=["model", pytest.param("lookup,model", marks=pytest.mark.slow)]
)
async def drafting(
    draft_folder: Path, request: pytest.FixtureRequest
) -> AsyncIterator[grpc.aio.Channel]:
    async with (
        draft(draft_folder, max_num_draft_tokens=8, drafters=request.param) as (address, _),
        grpc.aio.insecure_channel(address) as channel,
    ):
        yield channel


@pytest_asyncio.fixture(scope="module")
async def verifying(bench: Bench) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel(bench.verifier_address) as channel:
        yield channel


def opening_of(chance: random.Random, committed: list[int], number: int) -> common_pb2.Open:
    """An Open of a session that runs ahead."""
    message = opening(committed, round=number)
    message.sampling.temperature = chance.choice([0.0, 0.8])
    message.num_draft_tokens = chance.randint(1, 4)
    message.run_ahead = chance.choice([0, 1, 3])
    message.draft_topk = chance.choice([1, 2])
    return message


async def converse(channel: grpc.aio.Channel, seed: int, log: Logged) -> int:
    """A Draft stream by a random schedule. Returns how many Advances had been answered before."""
    chance = random.Random(seed)
    committed = [chance.randrange(1, 300) for _ in range(chance.randint(0, 4))]
    number = chance.randint(1, 1000)
    message = opening_of(chance, committed, number)
    peer = Peer(channel)
    await peer.send(open=message)
    asked: dict[int, tuple[int, ...]] = {}
    lengths = {number: message.base_length}
    length, stale, last = message.base_length, 0, number
    try:
        assert await peer.wait(lambda p: p.round == number)
        for _ in range(10):
            if message.run_ahead and chance.random() < 0.7:
                await peer.wait(lambda p, r=last + 1: p.round == r and p.presumed_token_ids, 0.1)
            if chance.random() < 0.2:
                stale += 1
                old = draft_pb2.Advance(
                    round=chance.randint(0, last), base_length=chance.randrange(99), token_ids=[9]
                )
                await peer.send(advance=old)
            skipped = chance.choice([0, 0, 0, 1, 5])
            pushed = [p for p in peer.proposals if p.presumed_token_ids and p.round == last + 1]
            token_ids = [chance.randrange(1, 300) for _ in range(chance.randint(1, 5))]
            if pushed and chance.random() < 0.7:
                token_ids = list(chance.choice(pushed).presumed_token_ids)
            last += 1 + skipped
            await peer.send(
                advance=draft_pb2.Advance(
                    round=last,
                    base_length=length,
                    token_ids=token_ids,
                    num_draft_tokens=chance.randint(0, message.num_draft_tokens),
                )
            )
            asked[last] = tuple(token_ids)
            length += len(token_ids)
            committed += token_ids
            lengths[last] = length
            assert await peer.wait(lambda p, r=last: p.round == r)
        await peer.end()
    finally:
        peer.close()
    assert peer.error is None
    assert log.closed[-1]["stale_messages"] == stale
    return check(peer.proposals, asked, lengths, message)


def check(
    proposals: list[draft_pb2.Proposal],
    asked: dict[int, tuple[int, ...]],
    lengths: dict[int, int],
    message: common_pb2.Open,
) -> int:
    """Holds proposals against what was asked. Returns how many rounds had one that was pushed."""
    hits = 0
    for number, token_ids in asked.items():
        here = [p for p in proposals if p.round == number]
        answers = [p for p in here if not p.presumed_token_ids]
        fit = any(p.presumed_token_ids == list(token_ids) for p in here)
        assert len(answers) == (not fit), f"round {number}"
        assert all(p.base_length == lengths[number] for p in answers)
        hits += fit
    for proposal in proposals:
        presumed = len(proposal.presumed_token_ids)
        if presumed:
            assert proposal.base_length == lengths[proposal.round - 1] + presumed
        assert len(proposal.token_ids) <= message.num_draft_tokens
        assert proposal.temperature == message.sampling.temperature
        assert proposal.round - bool(presumed) in lengths
    return hits


@SCHEDULES
async def test_a_draft_service_answers_each_advance_once(
    drafting: grpc.aio.Channel, logged: Logged, seeds: range
) -> None:
    hits = 0
    for seed in seeds:
        try:
            hits += await converse(drafting, seed, logged)
        except AssertionError as error:
            raise AssertionError(f"schedule {seed}: {error}") from error
    assert hits > 0


@SCHEDULES
async def test_a_draft_session_resumes_anywhere(drafting: grpc.aio.Channel, seeds: range) -> None:
    """What is drafted depends on what is committed, and not on how it came to be."""
    for seed in seeds:
        chance = random.Random(seed)
        message = opening_of(chance, [], 1)
        message.run_ahead = 0
        peer = Peer(drafting)
        await peer.send(open=message)
        committed: list[int] = []
        number = 1
        for _ in range(4):
            assert await peer.wait(lambda p, r=number: p.round == r)
            length = message.base_length + len(committed)
            more = list(peer.proposals[-1].token_ids[: chance.randint(0, 2)])
            more.append(chance.randrange(1, 300))
            committed += more
            number += chance.randint(1, 3)
            await peer.send(
                advance=draft_pb2.Advance(
                    round=number,
                    base_length=length,
                    token_ids=more,
                    num_draft_tokens=message.num_draft_tokens,
                )
            )
            assert await peer.wait(lambda p, r=number: p.round == r)
            resumed = Peer(drafting)
            fresh = common_pb2.Open()
            fresh.CopyFrom(message)
            fresh.round, fresh.base_length = number, message.base_length + len(committed)
            fresh.committed_token_ids.extend(committed)
            await resumed.send(open=fresh)
            assert await resumed.wait(lambda p: True)
            old, new = peer.proposals[-1], resumed.proposals[0]
            for name in ("round", "base_length", "token_ids", "parents"):
                assert getattr(old, name) == getattr(new, name), f"schedule {seed}: {name}"
            resumed.close()
        peer.close()


async def test_a_gap_fails_one_draft_session_and_no_other(drafting: grpc.aio.Channel) -> None:
    for seed in range(6):
        chance = random.Random(seed)
        broken, other = Peer(drafting), Peer(drafting)
        for peer in (broken, other):
            await peer.send(open=opening_of(chance, [], 1))
            assert await peer.wait(lambda p: p.round == 1)
        gap = draft_pb2.Advance(
            round=chance.choice([2, 9]), base_length=chance.choice([0, 3, 5, 99]), token_ids=[9]
        )
        await broken.send(advance=gap)
        assert reason_of(await broken.failed()) == "CONTRACT_VIOLATION"
        await other.send(advance=draft_pb2.Advance(round=2, base_length=4, token_ids=[9]))
        assert await other.wait(lambda p: p.round == 2 and not p.presumed_token_ids)
        await other.end()
        assert other.error is None


@SCHEDULES
async def test_a_verifier_service_keeps_to_its_rounds(
    verifying: grpc.aio.Channel, logged: Logged, seeds: range
) -> None:
    for seed in seeds:
        try:
            await ask(verifying, seed, logged)
        except AssertionError as error:
            raise AssertionError(f"schedule {seed}: {error}") from error


async def ask(channel: grpc.aio.Channel, seed: int, log: Logged) -> None:
    """A Verify stream by a random schedule: stale messages, skipped rounds, resumed, a gap."""
    chance = random.Random(seed)
    temperature = chance.choice([0.0, 0.8])

    def message(committed: list[int], number: int) -> common_pb2.Open:
        found = opening(committed, round=number, num_draft_tokens=4)
        found.sampling.temperature = temperature
        return found

    alone = VerifyClient(channel)
    await alone.open(message([], 1))
    reference = await plain(alone, len(PROMPT), range(1, 31))
    await alone.end()
    client, tokens = VerifyClient(channel), list[int]()
    number, stale = chance.randint(1, 99), 0
    await client.open(message([], number))
    while len(tokens) < 20:
        base = len(PROMPT) + len(tokens)
        right = reference[len(tokens) :]
        for _ in range(chance.choice([0, 0, 1, 2]) if number > 0 else 0):
            await client.send(round=chance.randrange(number), base_length=chance.randrange(99))
            stale += 1
        number += chance.choice([0, 0, 1, 7])
        drafted = right[: chance.randint(0, 4)]
        if drafted and chance.random() < 0.5:
            drafted[-1] = (drafted[-1] + 1) % 300
        verdict = await client.verdict(round=number, base_length=base, token_ids=drafted)
        assert (verdict.round, verdict.base_length) == (number, base)
        assert verdict.token_ids == right[: verdict.num_accepted + 1]
        tokens += verdict.token_ids
        number += 1
        if chance.random() < 0.3:
            await client.end()
            assert log.closed[-1]["stale_messages"] == stale
            client, stale = VerifyClient(channel), 0
            opened = await client.open(message(tokens, number))
            assert (opened.round, opened.base_length) == (number, len(PROMPT) + len(tokens))
    assert tokens == reference[: len(tokens)]
    broken = VerifyClient(channel)
    await broken.open(message(tokens, number))
    length = len(PROMPT) + len(tokens)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await broken.verdict(round=number + chance.randint(0, 3), base_length=length - 1)
    assert reason_of(caught.value) == "CONTRACT_VIOLATION"
    verdict = await client.verdict(round=number, base_length=length)
    assert verdict.token_ids == reference[len(tokens) : len(tokens) + 1]
    await client.end()


async def test_a_stale_advance_has_nothing_pushed_again(drafting: grpc.aio.Channel) -> None:
    message = opening(num_draft_tokens=2, run_ahead=2)
    peer = Peer(drafting)
    await peer.send(open=message)
    assert await peer.wait(lambda p: bool(p.presumed_token_ids))
    assert await peer.wait(lambda _: len(peer.proposals) > message.run_ahead)
    await peer.send(advance=draft_pb2.Advance(round=1, base_length=4, token_ids=[9]))
    await peer.wait(lambda _: len(peer.proposals) > 1 + message.run_ahead, 1.0)
    await peer.end()
    presumed = [tuple(p.presumed_token_ids) for p in peer.proposals if p.presumed_token_ids]
    assert len(presumed) == len(set(presumed))


async def test_what_was_pushed_is_what_would_be_proposed() -> None:
    """Of several drafters, too: the one that copies does not come in between."""

    class Copies(DraftSession):
        async def propose(self, committed: Sequence[int], num_draft_tokens: int) -> Draft:
            return Draft([8, 8], match_length=9) if committed else Draft(())

    class Prepares(DraftSession):
        async def propose(self, committed: Sequence[int], num_draft_tokens: int) -> Draft:
            return Draft([6, 7] if list(committed) == [5] else [1, 2])

        async def prepare(self, count: int) -> Sequence[Prepared]:
            return [Prepared([5], Draft([6, 7]))]

    opened = common_pb2.Opened()
    session = CombinedSession([Copies(opened), Prepares(opened)], min_match=3)
    await session.propose([], 2)
    prepared = await session.prepare(1)
    draft = await session.propose(prepared[0].token_ids, 2)
    assert list(draft.token_ids) == list(prepared[0].draft.token_ids)


@pytest.mark.parametrize(
    "opened",
    [
        common_pb2.Opened(round=2, base_length=len(PROMPT)),
        common_pb2.Opened(round=1, base_length=len(PROMPT) + 1),
    ],
)
async def test_an_opened_that_does_not_fit_fails_the_call(
    verified: Verified, opened: common_pb2.Opened
) -> None:
    verified.verifier.opened = opened
    try:
        error = await _try(verified.gateway)
    finally:
        verified.verifier.opened = None
    assert error is not None
    assert reason_of(error) == "CONTRACT_VIOLATION"


# What the document says in numbers.


def rows_of(header: str) -> list[list[str]]:
    """The cells of the table of the document that has this header."""
    lines = DOCUMENT.read_text().splitlines()
    begin = lines.index(header) + 2
    rows = itertools.takewhile(lambda line: line.startswith("|"), lines[begin:])
    return [[cell.strip(" `") for cell in row.strip("|").split("|")] for row in rows]


WORD = 2**64
GAMMA = 0x9E3779B97F4A7C15


def mix(z: int) -> int:
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % WORD
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % WORD
    return z ^ (z >> 31)


def hashed(seed: int, *words: int) -> int:
    h = mix((seed + GAMMA) % WORD)
    for word in words:
        h = mix(((h ^ word) + GAMMA) % WORD)
    return h


def test_the_keys_of_the_document() -> None:
    rows = rows_of("| seed | stream | words | key | uniform |")
    assert {row[1] for row in rows} == {"1", "2", "3", "4"}
    for seed, stream_tag, words, expected, number in rows:
        numbers = [int(word) for word in words.split(",")]
        found = hashed(int(seed), int(stream_tag), *numbers)
        assert f"{found:016x}" == expected
        assert (mix((found + GAMMA) % WORD) >> 11) * 2.0**-53 == float(number)
        keys = key(seed_tensor(int(seed)), Stream(int(stream_tag)), *numbers)
        assert int(keys) % WORD == found
        assert float(uniform(keys)) == float(number)


def test_the_noise_of_the_document() -> None:
    rows = rows_of("| seed | position | token | gumbel |")
    assert len(rows) >= 4
    for seed, position, token, number in rows:
        found = hashed(int(seed), 1, int(position))
        bits = mix((found + (int(token) + 1) * GAMMA) % WORD) >> 12
        assert -math.log(-math.log((bits + 0.5) * 2.0**-52)) == pytest.approx(float(number))
        keys = key(seed_tensor(int(seed)), Stream.COUPLED, int(position))
        noise = gumbel(keys, torch.tensor([int(token)]))
        assert float(noise[0]) == pytest.approx(float(number), rel=1e-14)


def test_the_reasons_of_the_document() -> None:
    rows = rows_of("| reason | status | retry | from |")
    names = {f"ERROR_REASON_{row[0]}" for row in rows}
    assert names == set(common_pb2.ErrorReason.keys()) - {"ERROR_REASON_UNSPECIFIED"}
    for reason, status, retry, _ in rows:
        number = common_pb2.ErrorReason.Value(f"ERROR_REASON_{reason}")
        error = SpecdecError(number, "")
        assert error.code.name == status
        retryable = any(d.type_url.endswith("RetryInfo") for d in error.to_status().details)
        assert retryable == retry.startswith("yes")


def conversations(kind: str) -> list[list[tuple[str, str, str]]]:
    """Those of the document: of each line its direction, its message and its comment."""
    found = []
    for block in DOCUMENT.read_text().split(f"```{kind}\n")[1:]:
        lines = block.split("```")[0].splitlines()
        parts = [line.partition("  # ") for line in lines]
        found.append([(text[0], text[2:], comment) for text, _, comment in parts])
    return found


INFO = common_pb2.ModelInfo(
    effective_vocab_size=300,
    max_context_length=99,
    acceptance_rules=ACCEPTANCE_RULES,
    max_num_draft_tokens=8,
    any_tokenizer=True,
    trees=True,
)


def contract_of(message: common_pb2.Open) -> SessionContract:
    message.sampling.MergeFrom(common_pb2.Sampling(top_p=1.0, repetition_penalty=1.0))
    message.acceptance_rule = common_pb2.ACCEPTANCE_RULE_COUPLED
    contract = SessionContract(message, INFO)
    contract.opened()
    return contract


@pytest.mark.parametrize("lines", conversations("draft"))
def test_the_conversations_of_the_document(lines: list[tuple[str, str, str]]) -> None:
    requests = [
        text_format.Parse(text, draft_pb2.DraftRequest()) for side, text, _ in lines if side == ">"
    ]
    responses = [
        (text_format.Parse(text, draft_pb2.DraftResponse()), comment)
        for side, text, comment in lines
        if side == "<"
    ]
    line = [(r.proposal, comment) for r, comment in responses if r.HasField("proposal")]
    message = requests[0].open
    contract = contract_of(message)
    contract.end(message.round, 0)
    rounds, number, limit = DraftRounds(message, 300), message.round, message.num_draft_tokens
    for request in requests:
        if request.HasField("advance"):
            asked = request.advance
            for skipped in range(asked.round - number):
                rounds.commit([] if skipped else asked.token_ids)
            number, limit = asked.round, asked.num_draft_tokens
            assert rounds.advance(limit).advance == asked
            assert contract.begin(asked.round, asked.base_length)
            contract.check_advance(asked.token_ids, limit)
            contract.end(asked.round, len(asked.token_ids))
        kept: list[tuple[draft_pb2.Proposal, str]] = []
        while True:
            proposal, comment = line.pop(0)
            timeliness = rounds.timeliness(proposal)
            if timeliness is Timeliness.AHEAD:
                kept.append((proposal, comment))
                continue
            assert comment == ("used" if timeliness is Timeliness.CURRENT else "stale"), proposal
            if timeliness is Timeliness.CURRENT:
                assert rounds.fault(proposal, limit) is None
                break
        line = kept + line
    assert not line


@pytest.mark.parametrize("lines", conversations("verify"))
def test_the_verdicts_of_the_document(lines: list[tuple[str, str, str]]) -> None:
    message = text_format.Parse(lines[0][1], verifier_pb2.VerifyRequest()).open
    contract = contract_of(message)
    asked = verifier_pb2.Candidates()
    for side, text, comment in lines[2:]:
        if side == ">":
            asked = text_format.Parse(text, verifier_pb2.VerifyRequest()).candidates
            assert contract.begin(asked.round, asked.base_length) == (comment != "stale")
            contract.check_candidates(asked.token_ids, [], [], need_distributions=False)
            continue
        verdict = text_format.Parse(text, verifier_pb2.VerifyResponse()).verdict
        assert (verdict.round, verdict.base_length) == (asked.round, asked.base_length)
        n = verdict.num_accepted
        assert verdict.token_ids[:n] == asked.token_ids[:n]
        assert len(verdict.token_ids) == n + 1
        contract.end(verdict.round, len(verdict.token_ids))
