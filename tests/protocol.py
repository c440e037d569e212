"""Peers that speak the two internal streams by a random schedule, and what is to come of it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc

from specdec import trees
from specdec.v1 import (
    common_pb2,
    draft_pb2,
    verifier_pb2,
    verifier_pb2_grpc,
)

FAULTS = {
    "longer": "more than the limit",
    "temperature": "it was drafted at temperature",
    "base": "it starts from base_length",
    "vocabulary": "outside the vocabulary",
    "parents": "does not come before it",
    "twins": "that follow the same one are equal",
    "flood": "too many proposals",
    "end": "the stream has ended",
    "abort": "RESOURCE_EXHAUSTED",
    "cancel": "CANCELLED",
    "garbage": "the stream has ended",
    "late": "no proposal within",
}
"""What a draft may do that ends its part in a session, and how the statistics tell it."""
BREAKS_OFF = ("end", "abort", "cancel", "garbage", "late")
"""Those after which nothing more is read, also of what was sent before."""
GARBAGE = b"\xff\xff\xff"
_ABORTS = {
    "abort": (grpc.StatusCode.RESOURCE_EXHAUSTED, "no memory left"),
    "cancel": (grpc.StatusCode.CANCELLED, "had enough"),
}


@dataclass
class Asked:
    """A round for which a proposal was asked for."""

    round: int
    tokens: list[int]
    """Prompt and committed tokens."""
    limit: int


@dataclass
class Expected:
    """What the statistics are to say."""

    used: list[int] = field(default_factory=list)
    """The number of drafted tokens of each round that had a usable proposal."""
    accepted: int = 0
    stale: int = 0
    hits: int = 0
    misses: int = 0
    fault: bool = False


class Script:
    """What a draft does in one session: a random mixture of `actions`."""

    def __init__(
        self,
        seed: int,
        actions: Sequence[str],
        reference: Sequence[int],
        *,
        topk: int = 1,
        late_seconds: float = 0.0,
    ) -> None:
        """`reference`: what the target alone generates."""
        self.asked: list[Asked] = []
        self.sent: list[draft_pb2.Proposal] = []
        self.fault: str | None = None
        """What ended it, if anything did."""
        self.contradiction: str | None = None
        """What the gateway's messages had wrong."""
        self._random = random.Random(seed)
        self._actions = list(actions)
        self._reference = list(reference)
        self._topk = topk
        self._late_seconds = late_seconds
        self._opening = common_pb2.Open()
        self._tokens: list[int] = []

    def take(self, request: draft_pb2.DraftRequest) -> None:
        """Checks and keeps a message of the gateway."""
        if request.HasField("open"):
            self._opening = request.open
            self._tokens = [*request.open.prompt_token_ids, *request.open.committed_token_ids]
            asked = (request.open.round, request.open.base_length, request.open.num_draft_tokens)
        else:
            advance = request.advance
            if advance.base_length != len(self._tokens) or not advance.token_ids:
                self.contradiction = f"{advance} after {len(self._tokens)} tokens"
            if advance.round <= self.asked[-1].round:
                self.contradiction = f"{advance} after round {self.asked[-1].round}"
            self._tokens += advance.token_ids
            asked = (advance.round, len(self._tokens), advance.num_draft_tokens)
        if asked[1] != len(self._tokens):
            self.contradiction = f"{asked} with {len(self._tokens)} tokens"
        self.asked.append(Asked(asked[0], list(self._tokens), asked[2]))

    async def answer(self, context: Any) -> AsyncIterator[draft_pb2.DraftResponse | bytes]:
        """What follows the message that was taken last."""
        now = self.asked[-1]
        if len(self.asked) == 1 and self._random.random() < 0.8:
            opened = common_pb2.Opened(round=now.round, base_length=len(now.tokens))
            yield draft_pb2.DraftResponse(opened=opened)
        actions = {a for a in self._actions if self._random.random() < 0.5}
        faults = sorted(actions & FAULTS.keys())
        if faults and self.fault is None and self._random.random() < 0.4:
            self.fault = self._random.choice(faults)
        current = self._current(now, actions)
        ahead = self._ahead(now, actions)
        proposals = [*ahead, *current] if "reordered" in actions else [*current, *ahead]
        for _ in range(self._random.randint(1, 3) if "stale" in actions else 0):
            proposals.insert(self._random.randint(0, len(proposals)), self._stale(now))
        match self.fault:
            case "late":
                await asyncio.sleep(self._late_seconds)
            case "abort" | "cancel":
                await context.abort(*_ABORTS[self.fault])
            case "garbage":
                yield GARBAGE
            case "flood":
                flood = [self._proposal(now, now.round + 50) for _ in range(70)]
                proposals = [*flood, *proposals]
            case "end":
                return
        for proposal in proposals:
            self.sent.append(proposal)
            yield draft_pb2.DraftResponse(proposal=proposal)

    def expected(self, asked: Sequence[Asked]) -> Expected:
        """What the documented rules make of all that was sent, in the rounds that were asked for.

        Those are the gateway's own: it may end before its last Advance is taken.
        """
        found = Expected()
        line = list(self.sent)
        prompt = len(self._opening.prompt_token_ids)
        for now in asked:
            at, prepared, used = 0, False, None
            while at < len(line) and used is None:
                proposal = line[at]
                if proposal.round > now.round:
                    at += 1
                    if at > 64:
                        break
                    continue
                del line[at]
                if proposal.round < now.round or not _fits(proposal, now.tokens):
                    found.stale += 1
                    prepared |= proposal.round == now.round
                    continue
                used = proposal
            if used is None or _is_faulty(used, now, self._opening):
                found.fault = True
                return found
            pushed = bool(used.presumed_token_ids)
            found.hits += pushed
            found.misses += prepared and not pushed
            count = min(len(used.token_ids), now.limit)
            found.used.append(count)
            parents = trees.parents_of(used.parents, len(used.token_ids))[:count]
            follows = self._reference[len(now.tokens) - prompt :]
            found.accepted += len(trees.walk(parents, list(used.token_ids)[:count], follows))
        return found

    def _current(self, now: Asked, actions: set[str]) -> list[draft_pb2.Proposal]:
        fitting = [p for p in self.sent if p.round == now.round and _fits(p, now.tokens)]
        if fitting and "again" not in actions:
            return []
        most = now.limit
        if "empty" in actions:
            most = 0
        elif "shorter" in actions:
            most = self._random.randint(0, most)
        proposal = self._proposal(now, now.round, most)
        match self.fault:
            case "longer":
                proposal = self._proposal(now, now.round, now.limit + 1)
            case "temperature":
                proposal.temperature += 0.5
            case "base":
                proposal.base_length += self._random.choice([-1, 1])
            case "vocabulary":
                proposal = self._proposal(now, now.round, now.limit)
                proposal.token_ids[-1] = 300
            case "parents":
                proposal = draft_pb2.Proposal(
                    round=now.round, base_length=len(now.tokens), token_ids=[1], parents=[1]
                )
                proposal.temperature = self._opening.sampling.temperature
            case "twins":
                proposal = self._proposal(now, now.round, now.limit)
                proposal.token_ids[:] = [1] * now.limit
                proposal.parents[:] = [0] * now.limit
        return [proposal] * (self._random.randint(2, 3) if "duplicate" in actions else 1)

    def _ahead(self, now: Asked, actions: set[str]) -> list[draft_pb2.Proposal]:
        """Proposals for rounds that have not begun."""
        found = []
        prompt = len(self._opening.prompt_token_ids)
        done = len(now.tokens) - prompt
        for _ in range(self._random.randint(1, 3) if "wrong" in actions else 0):
            presumed = [self._random.randrange(300) for _ in range(self._random.randint(1, 5))]
            found.append(self._proposal(now, now.round + 1, presumed=presumed))
        for _ in range(self._random.randint(1, 2) if "right" in actions else 0):
            # Of the verdicts that may be given one is: all of them are presumed.
            verdicts = [self._reference[done : done + n] for n in range(1, now.limit + 2)]
            found += [
                self._proposal(now, now.round + 1, now.limit + 2, presumed=verdict)
                for verdict in verdicts
                if len(verdict) + done < len(self._reference)
            ]
        if "far" in actions:
            presumed = self._reference[done : done + 9]
            found.append(self._proposal(now, now.round + 4, presumed=presumed or [1]))
        self._random.shuffle(found)
        return found

    def _stale(self, now: Asked) -> draft_pb2.Proposal:
        old = self._proposal(now, self._random.randrange(now.round))
        if self._random.random() < 0.5:
            old.base_length = self._random.randrange(1000)
            old.token_ids.append(999)
        return old

    def _proposal(
        self, now: Asked, number: int, most: int | None = None, presumed: Sequence[int] = ()
    ) -> draft_pb2.Proposal:
        """Some of its tokens are those of the reference."""
        count = now.limit if most is None else most
        done = len(now.tokens) + len(presumed) - len(self._opening.prompt_token_ids)
        right = self._reference[done:]
        parents: list[int] = []
        token_ids: list[int] = []
        depths = [0]
        branching = self._topk > 1 and self._random.random() < 0.7
        for place in range(1, count + 1):
            parent = place - 1
            if branching:
                free = [p for p in range(place) if parents.count(p) < self._topk]
                parent = self._random.choice(free[-3:])
            depth = depths[parent]
            known = [t for p, t in zip(parents, token_ids, strict=True) if p == parent]
            token_id = right[depth] if depth < len(right) else 1
            while token_id in known or self._random.random() < 0.25:
                token_id = self._random.randrange(1, 300)
            parents.append(parent)
            token_ids.append(token_id)
            depths.append(depth + 1)
        return draft_pb2.Proposal(
            round=number,
            base_length=len(now.tokens) + len(presumed),
            token_ids=token_ids,
            parents=parents if branching else [],
            temperature=self._opening.sampling.temperature,
            presumed_token_ids=presumed,
            probabilities=[0.5] * count if self._random.random() < 0.5 else [],
        )


def _fits(proposal: draft_pb2.Proposal, tokens: Sequence[int]) -> bool:
    """Whether what was presumed is what was committed."""
    presumed = list(proposal.presumed_token_ids)
    if not presumed:
        return True
    return proposal.base_length == len(tokens) and list(tokens[-len(presumed) :]) == presumed


def _is_faulty(proposal: draft_pb2.Proposal, now: Asked, opening: common_pb2.Open) -> bool:
    if not proposal.presumed_token_ids and len(proposal.token_ids) > now.limit:
        return True
    topk = max(opening.draft_topk, 1)
    return (
        proposal.base_length != len(now.tokens)
        or proposal.temperature != opening.sampling.temperature
        or any(token_id >= 300 for token_id in proposal.token_ids)
        or trees.parents_fault(proposal.parents, proposal.token_ids, topk) is not None
    )


class ScriptedDraft:
    """A draft service that follows a script."""

    def __init__(self, info: common_pb2.ModelInfo) -> None:
        self.script: Script | None = None
        """Of the next session; without one it proposes nothing."""
        self._info = info

    def register(self, server: grpc.aio.Server) -> None:
        """Adds it to a server, with a serializer that lets garbage through."""
        handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            "GetModelInfo": grpc.unary_unary_rpc_method_handler(
                self.GetModelInfo,
                request_deserializer=draft_pb2.DraftServiceGetModelInfoRequest.FromString,
                response_serializer=_serialized,
            ),
            "Draft": grpc.stream_stream_rpc_method_handler(
                self.Draft,
                request_deserializer=draft_pb2.DraftRequest.FromString,
                response_serializer=_serialized,
            ),
        }
        handler = grpc.method_handlers_generic_handler("specdec.v1.DraftService", handlers)
        server.add_generic_rpc_handlers((handler,))

    async def GetModelInfo(self, request: Any, context: Any) -> Any:
        return draft_pb2.DraftServiceGetModelInfoResponse(model_info=self._info)

    async def Draft(self, requests: Any, context: Any) -> AsyncIterator[Any]:
        script, self.script = self.script, None
        script = script or Script(0, ["empty"], ())
        async for request in requests:
            script.take(request)
            async for response in script.answer(context):
                yield response
            if script.fault == "end":
                return


class ScriptedVerifier(verifier_pb2_grpc.VerifierServiceServicer):
    """A verifier that emits a reference, and from one round on something else."""

    def __init__(self, real: verifier_pb2_grpc.VerifierServiceStub) -> None:
        """`real`: what it takes its description and its tokenizer from."""
        self.reference: Sequence[int] = ()
        self.wrong_round = 0
        self.wrong: Any = None
        """Called with the right verdict of that round: the responses, an error, or None to end."""
        self.opened: common_pb2.Opened | None = None
        """What it answers an Open with, if not what it should."""
        self.faults: list[str] = []
        """What was wrong with the gateway's messages."""
        self._real = real

    async def GetModelInfo(self, request: Any, context: Any) -> Any:
        return await self._real.GetModelInfo(request)

    async def GetTokenizer(self, request: Any, context: Any) -> AsyncIterator[Any]:
        async for part in self._real.GetTokenizer(request):
            yield part

    async def Verify(self, request_iterator: Any, context: Any) -> AsyncIterator[Any]:
        opening, done, number = common_pb2.Open(), 0, 0
        async for request in request_iterator:
            if request.HasField("open"):
                opening, number = request.open, request.open.round
                opened = common_pb2.Opened(round=number, base_length=opening.base_length)
                yield verifier_pb2.VerifyResponse(opened=self.opened or opened)
                continue
            asked = request.candidates
            if (asked.round, asked.base_length) != (number, opening.base_length + done):
                self.faults.append(f"{asked}")
            parents = trees.parents_of(asked.parents, len(asked.token_ids))
            n = len(trees.walk(parents, asked.token_ids, self.reference[done:]))
            right = verifier_pb2.Verdict(
                round=number,
                base_length=asked.base_length,
                num_accepted=n,
                token_ids=self.reference[done : done + n + 1],
            )
            verdicts = [right]
            if number == self.wrong_round:
                outcome = self.wrong(right, asked)
                if outcome is None:
                    return
                if isinstance(outcome, tuple):
                    await context.abort(*outcome)
                verdicts = outcome
            for verdict in verdicts:
                if isinstance(verdict, common_pb2.Opened):
                    yield verifier_pb2.VerifyResponse(opened=verdict)
                else:
                    yield verifier_pb2.VerifyResponse(verdict=verdict)
            number, done = number + 1, done + n + 1


def _serialized(message: Any) -> bytes:
    if isinstance(message, bytes):
        return message
    data: bytes = message.SerializeToString()
    return data
