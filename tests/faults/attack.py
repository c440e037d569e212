"""Sessions at a model service that go wrong at some message, and what has to come of each."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import grpc
from google.protobuf.message import DecodeError, Message

from specdec.errors import reason_of
from specdec.v1 import common_pb2, draft_pb2, verifier_pb2
from tests.faults.fuzzing import corrupted, mutated, serialized
from tests.faults.referee import (
    ANSWERED,
    CONTRADICTION,
    DROPPED,
    INVALID,
    MISMATCH,
    Referee,
)

SECONDS = 20.0
"""The deadline of a call that is not to hang."""
VOCABULARY = 300
CODES = {
    INVALID: grpc.StatusCode.INVALID_ARGUMENT,
    CONTRADICTION: grpc.StatusCode.FAILED_PRECONDITION,
    MISMATCH: grpc.StatusCode.FAILED_PRECONDITION,
    "NOT_READY": grpc.StatusCode.UNAVAILABLE,
    "VERIFIER_UNAVAILABLE": grpc.StatusCode.UNAVAILABLE,
}


def outcome_of(error: grpc.aio.AioRpcError) -> str:
    """The reason of an error that is as the table has it, or all that is known of another."""
    reason = reason_of(error)
    if reason is not None and CODES.get(reason) == error.code():
        return reason
    return f"{error.code().name} with reason {reason}: {error.details()}"


def openings(info: common_pb2.ModelInfo, source: random.Random) -> list[common_pb2.Open]:
    """Opens of every kind, all of them legal."""
    grammar = common_pb2.Grammar(regex="[a-z ]*")
    settings: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.8, "seed": 2**64 - 1},
        {"temperature": 1.0, "top_k": 40, "top_p": 0.9, "min_p": 0.01},
        {"temperature": 0.7, "repetition_penalty": 1.3, "presence_penalty": 0.5},
        {"temperature": 0.0, "frequency_penalty": -0.5, "logit_bias": {3: 5.0, 299: -100.0}},
        {"temperature": 1.0, "allowed_token_ids": range(5, 60), "suppressed_token_ids": [7]},
        {"temperature": 0.0, "min_new_tokens": 9, "stop_token_ids": [0, 8]},
        {"temperature": 0.5, "grammar": grammar},
    ]
    found = []
    for rule in (1, 2, 3):
        for number, setting in enumerate(settings):
            length = source.choice([source.randrange(1, 30), 57, 60])
            prompt = [source.randrange(1, VOCABULARY) for _ in range(length)]
            committed = [source.randrange(1, VOCABULARY) for _ in range(source.randrange(4))]
            committed = [] if "grammar" in setting else committed
            opening = common_pb2.Open(
                session_id="the-same-for-all",
                round=source.choice([0, 1, 5, 2**63]),
                base_length=len(prompt) + len(committed),
                prompt_token_ids=prompt,
                committed_token_ids=committed,
                sampling=common_pb2.Sampling(
                    **{"top_p": 1.0, "repetition_penalty": 1.0, **setting}
                ),
                acceptance_rule=rule,  # type: ignore[arg-type]
                num_draft_tokens=source.choice([0, 2, 4, 8]),
                draft_topk=source.choice([0, 1, 3]),
                run_ahead=source.choice([0, 0, 2]),
                tokenizer_sha256=info.tokenizer_sha256,
                prefix_cache=common_pb2.PrefixCacheParams(bypass=number == 1, salt="s" * number),
                draft_costs=common_pb2.DraftCosts(row=0.1, step=0.1) if number % 2 else None,
            )
            if number in (0, 3):
                opening.logprobs.num_top, opening.logprobs.prompt = 2, number == 3
            found.append(opening)
    return found


@dataclass
class Target(ABC):
    """A model service under attack."""

    channel: grpc.aio.Channel
    info: common_pb2.ModelInfo
    path: ClassVar[str]
    request: ClassVar[Callable[..., Any]]
    response: ClassVar[Any]

    def call(self) -> Any:
        """A stream of bytes."""
        return self.channel.stream_stream(self.path)(timeout=SECONDS)

    @abstractmethod
    def honest(self, source: random.Random, referee: Referee) -> Message:
        """A message that may follow, but for the context's length at times."""

    @abstractmethod
    def is_answer(self, response: Any, request: Any) -> bool:
        """Whether a response is the last that follows a request."""

    @abstractmethod
    def check(self, response: Any, request: Any, referee: Referee) -> None:
        """Asserts that an answer is a right one, and tells the referee of it."""


class Drafting(Target):
    """The draft service."""

    path = "/specdec.v1.DraftService/Draft"
    request = draft_pb2.DraftRequest
    response = draft_pb2.DraftResponse

    def honest(self, source: random.Random, referee: Referee) -> Message:
        assert referee.opening is not None
        room = self.info.max_context_length - referee.base_length
        count = min(source.randrange(5), room + (source.random() < 0.1))
        ids = range(97, 122) if referee.has_grammar else range(1, VOCABULARY)
        advance = draft_pb2.Advance(
            round=referee.next_round + source.choice([0, 0, 0, 1, 100]),
            base_length=referee.base_length,
            token_ids=source.choices(ids, k=count),
            num_draft_tokens=source.randint(0, referee.opening.num_draft_tokens),
            draft_costs=common_pb2.DraftCosts(row=source.random(), step=source.random()),
        )
        return draft_pb2.DraftRequest(advance=advance)

    def is_answer(self, response: Any, request: Any) -> bool:
        proposal = response.proposal
        if request is None or not response.HasField("proposal"):
            return False
        if request.HasField("open"):
            # Not one that was pushed before, if this is an Open in a wrong place.
            return not proposal.presumed_token_ids
        asked, presumed = request.advance, list(proposal.presumed_token_ids)
        if presumed and presumed != list(asked.token_ids):
            return False
        base_length = asked.base_length + len(asked.token_ids)
        return (proposal.round, proposal.base_length) == (asked.round, base_length)

    def check(self, response: Any, request: Any, referee: Referee) -> None:
        proposal = response.proposal
        if request.HasField("open"):
            referee.opened(request.open)
            referee.committed(request.open.round, 0)
            round_number, limit = request.open.round, request.open.num_draft_tokens
        else:
            round_number, limit = request.advance.round, request.advance.num_draft_tokens
            if proposal.presumed_token_ids:
                limit = referee.opening.num_draft_tokens if referee.opening else 0
            referee.committed(round_number, len(request.advance.token_ids))
        told = (proposal.round, proposal.base_length)
        assert told == (round_number, referee.base_length), f"{proposal}"
        fault = referee.drafted_fault(proposal, limit)
        assert fault is None, f"{fault}: {proposal} at most {limit} for {referee.opening}"


class Verifying(Target):
    """The verifier service."""

    path = "/specdec.v1.VerifierService/Verify"
    request = verifier_pb2.VerifyRequest
    response = verifier_pb2.VerifyResponse

    def honest(self, source: random.Random, referee: Referee) -> Message:
        assert referee.opening is not None
        room = self.info.max_context_length - referee.base_length - (source.random() < 0.9)
        count = source.randint(0, max(0, min(referee.opening.num_draft_tokens, room)))
        token_ids = source.sample(range(1, VOCABULARY), count)
        asked = verifier_pb2.Candidates(
            round=referee.next_round + source.choice([0, 0, 0, 1, 100]),
            base_length=referee.base_length,
            token_ids=token_ids,
        )
        sampling, topk = referee.opening.sampling, referee.opening.draft_topk
        if sampling.temperature > 0.0 and referee.opening.acceptance_rule in (1, 2):
            asked.distributions.extend(_around(source, token_id) for token_id in token_ids)
        elif topk > 1 and source.random() < 0.7:
            parents: list[int] = []
            for place in range(count):
                free = [p for p in range(place + 1) if parents.count(p) < topk]
                parents.append(source.choice(free))
            asked.parents.extend(parents)
        return verifier_pb2.VerifyRequest(candidates=asked)

    def is_answer(self, response: Any, request: Any) -> bool:
        return request is not None

    def check(self, response: Any, request: Any, referee: Referee) -> None:
        if request.HasField("open"):
            opened, opening = response.opened, request.open
            assert response.HasField("opened")
            assert (opened.round, opened.base_length) == (opening.round, opening.base_length)
            referee.opened(opening)
            return
        verdict, asked = response.verdict, request.candidates
        assert (verdict.round, verdict.base_length) == (asked.round, asked.base_length)
        assert 1 <= len(verdict.token_ids) == verdict.num_accepted + 1 <= len(asked.token_ids) + 1
        assert max(verdict.token_ids) < VOCABULARY
        assert set(verdict.token_ids[:-1]) <= set(asked.token_ids)
        referee.committed(asked.round, len(verdict.token_ids))


async def attack(target: Target, source: random.Random, corpus: Sequence[common_pb2.Open]) -> int:
    """One session that goes wrong sooner or later. Returns how many messages were sent."""
    call, referee, sent = target.call(), Referee(target.info), 0
    try:
        for data in _messages(target, source, corpus, referee):
            try:
                request = target.request.FromString(data)  # type: ignore[attr-defined]
                right = referee.judge(request)
            except DecodeError:
                request, right = None, {INVALID}
            if right != {DROPPED} and _may_not_fit_its_grammar(target, request, referee):
                right = {*right, CONTRADICTION}
            await call.write(data)
            sent += 1
            if right == {DROPPED}:
                continue
            outcome = await _outcome(target, call, request, referee)
            assert outcome in right, f"{outcome}, not {right}: {request or data!r}"
            if outcome != ANSWERED:
                return sent
        await call.done_writing()
        while (await call.read()) is not grpc.aio.EOF:
            pass  # Proposals that were pushed ahead.
        assert await call.code() == grpc.StatusCode.OK, await call.details()
        return sent
    finally:
        call.cancel()


def _messages(
    target: Target,
    source: random.Random,
    corpus: Sequence[common_pb2.Open],
    referee: Referee,
) -> Iterator[bytes]:
    others = [serialized(target.request(open=opening)) for opening in source.sample(corpus, 3)]
    opening: Message = target.request(open=source.choice(corpus))
    yield spoiled(source, opening, others, 0.25)
    for _ in range(source.randrange(1, 10)):
        if referee.opening is None:
            yield spoiled(source, opening, others, 0.9)  # After one that was dropped.
            continue
        honest = target.honest(source, referee)
        others.append(serialized(honest))
        yield spoiled(source, opening if source.random() < 0.03 else honest, others, 0.45)


def _may_not_fit_its_grammar(target: Target, request: Any, referee: Referee) -> bool:
    """Whether a message commits what a grammar may not allow: the referee has no grammars."""
    if referee.opening is not None:
        return isinstance(target, Drafting) and referee.has_grammar
    opening = common_pb2.Open() if request is None else request.open
    return opening.sampling.HasField("grammar") and len(opening.committed_token_ids) > 0


def spoiled(
    source: random.Random, message: Message, others: Sequence[bytes], chance: float
) -> bytes:
    """The message on the wire, with that chance not as it should be."""
    if source.random() >= chance:
        return serialized(message)
    if source.random() < 0.75:
        return serialized(corrupted(source, message))
    return mutated(source, serialized(message), others)


async def _outcome(target: Target, call: Any, request: Any, referee: Referee) -> str:
    try:
        while (raw := await call.read()) is not grpc.aio.EOF:
            response = target.response.FromString(raw)
            if target.is_answer(response, request):
                target.check(response, request, referee)
                return ANSWERED
    except grpc.aio.AioRpcError as error:
        return outcome_of(error)
    return "the stream ended"


def _around(source: random.Random, token_id: int) -> common_pb2.SparseDistribution:
    ids = {token_id, *source.sample(range(VOCABULARY), source.randrange(4))}
    shares = [source.random() + 0.01 for _ in ids]
    return common_pb2.SparseDistribution(token_ids=ids, probabilities=shares)
