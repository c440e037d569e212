"""Plays a target's log to a draft service, as the gateway would if the target wrote it now.

The target's part of every round is known beforehand: it accepts what agrees with the log and adds
the next token of it. With greedy decoding and with COUPLED what the target writes does not depend
on the draft, so that every round here is the round that the services would have had. Only what the
target would have said after a stop token is unknown: a proposal is judged up to there.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import grpc

from specdec.bench.acceptance import Round
from specdec.bench.target_log import Header, Output, TargetLog
from specdec.drafting import DraftRounds, Timeliness
from specdec.errors import describe
from specdec.sessions import PROTOCOL_VERSION
from specdec.v1 import common_pb2, draft_pb2, draft_pb2_grpc

_INFO_SECONDS = 10.0
_MOST_AHEAD = 64


class DraftFault(Exception):
    """A draft cannot be scored, or no further. The message is one line that says why."""


@dataclass(frozen=True)
class Drafting:
    """What one proposal took, as the draft service says."""

    asked: int
    """Tokens asked for."""
    drafted: int
    """Tokens proposed."""
    compute_us: int


@dataclass
class Replay:
    """An output that was played to a draft."""

    kind: str
    prompt_id: str
    rounds: list[Round] = field(default_factory=list)
    drafting: list[Drafting] = field(default_factory=list)
    """One for each round that had room for a drafted token."""


async def handshake(stub: draft_pb2_grpc.DraftServiceStub, header: Header) -> common_pb2.ModelInfo:
    """Asks a draft service what it is, and checks that it fits the log's target.

    Raises:
        DraftFault: it does not fit or does not answer.
    """
    request = draft_pb2.DraftServiceGetModelInfoRequest()
    try:
        info = (await stub.GetModelInfo(request, timeout=_INFO_SECONDS)).model_info
    except grpc.aio.AioRpcError as error:
        raise DraftFault(_explain(error)) from error
    if info.protocol_version != PROTOCOL_VERSION:
        raise DraftFault(
            f"it speaks version {info.protocol_version} of the protocol, this is {PROTOCOL_VERSION}"
        )
    if not info.any_tokenizer and info.tokenizer_sha256 != header.tokenizer_sha256:
        raise DraftFault(
            f"TOKENIZER_MISMATCH: the draft's token table is {info.tokenizer_sha256}, "
            f"that of the log's target {header.model_id} is {header.tokenizer_sha256}"
        )
    return info


async def replay(
    stub: draft_pb2_grpc.DraftServiceStub,
    log: TargetLog,
    k: int,
    done: Callable[[Replay], None],
    *,
    timeout: float,
) -> None:
    """Plays every output of a log to a draft, one after the other.

    Args:
        stub: of the draft service.
        log: what the target wrote.
        k: drafted tokens a round.
        done: given every output that has ended.
        timeout: seconds after which a draft has failed at an output.

    Raises:
        DraftFault: the draft does not fit, failed, or sent what no gateway would use.
    """
    info = await handshake(stub, log.header)
    if k > info.max_num_draft_tokens:
        raise DraftFault(
            f"it proposes at most {info.max_num_draft_tokens} tokens a round, and K is {k}"
        )
    # No replay finds what another has left in the prefix cache or in a memory of past outputs.
    salt = secrets.token_hex(8)
    for output in log.outputs:
        try:
            one = await _replay(stub, log.header, output, k, salt, timeout)
        except grpc.aio.AioRpcError as error:
            raise DraftFault(_explain(error)) from error
        done(one)


async def _replay(
    stub: draft_pb2_grpc.DraftServiceStub,
    header: Header,
    output: Output,
    k: int,
    salt: str,
    timeout: float,
) -> Replay:
    result = Replay(output.kind, output.prompt_id)
    written, begin = output.token_ids, 0
    async with _session(stub, header, output, min(k, output.limit - 1), salt, timeout) as session:
        while begin < len(written):
            # As the gateway does: the last token of a generation is never drafted.
            asked = min(k, output.limit - begin - 1)
            room = min(asked, len(written) - begin)
            drafted: Sequence[int] = ()
            if asked:
                proposal = await session.proposal(asked)
                took = proposal.timings.compute_us
                result.drafting.append(Drafting(asked, len(proposal.token_ids), took))
                drafted = proposal.token_ids[:room]
            accepted = _agreeing(drafted, written[begin:])
            result.rounds.append(Round(room, len(drafted), accepted))
            committed = written[begin : begin + accepted + 1]
            begin += len(committed)
            asked = min(k, output.limit - begin - 1)
            if begin < len(written) and asked:
                await session.advance(committed, asked)
    return result


def _agreeing(drafted: Sequence[int], written: Sequence[int]) -> int:
    """How many tokens from the first on are the same."""
    count = 0
    while count < min(len(drafted), len(written)) and drafted[count] == written[count]:
        count += 1
    return count


@asynccontextmanager
async def _session(
    stub: draft_pb2_grpc.DraftServiceStub,
    header: Header,
    output: Output,
    num_draft_tokens: int,
    salt: str,
    timeout: float,
) -> AsyncIterator[_Session]:
    """A session at the draft service. Nothing is sent where nothing may be drafted."""
    opening = common_pb2.Open(
        session_id=f"bench-{output.prompt_id}",
        round=1,
        base_length=len(output.prompt_token_ids),
        prompt_token_ids=output.prompt_token_ids,
        sampling=header.sampling(),
        acceptance_rule=common_pb2.ACCEPTANCE_RULE_COUPLED,
        num_draft_tokens=num_draft_tokens,
        tokenizer_sha256=header.tokenizer_sha256,
        prefix_cache=common_pb2.PrefixCacheParams(salt=salt),
    )
    call = stub.Draft(timeout=timeout)
    try:
        if num_draft_tokens:
            await call.write(draft_pb2.DraftRequest(open=opening))
        yield _Session(call, opening, header.effective_vocab_size)
    finally:
        call.cancel()


_DraftCall = grpc.aio.StreamStreamCall[draft_pb2.DraftRequest, draft_pb2.DraftResponse]


class _Session:
    """The proposals of one session, in the order of its rounds."""

    def __init__(
        self, call: _DraftCall, opening: common_pb2.Open, effective_vocab_size: int
    ) -> None:
        self._call = call
        self._rounds = DraftRounds(opening, effective_vocab_size)
        self._ahead: list[draft_pb2.Proposal] = []
        """Proposals of rounds that have not begun."""

    async def advance(self, token_ids: Sequence[int], num_draft_tokens: int) -> None:
        """Commits tokens and asks for the next proposal."""
        self._rounds.commit(token_ids)
        await self._call.write(self._rounds.advance(num_draft_tokens))

    async def proposal(self, limit: int) -> draft_pb2.Proposal:
        """Waits for the proposal of the current round, of at most `limit` tokens.

        Raises:
            DraftFault: the stream ended, or no gateway would use the proposal.
        """
        waiting, self._ahead = self._ahead, []
        while True:
            proposal = waiting.pop(0) if waiting else await self._read()
            match self._rounds.timeliness(proposal):
                case Timeliness.AHEAD:
                    self._ahead.append(proposal)
                    if len(self._ahead) > _MOST_AHEAD:
                        raise DraftFault("too many proposals for rounds that have not begun")
                case Timeliness.CURRENT:
                    self._ahead += waiting
                    if (fault := self._rounds.fault(proposal, limit)) is not None:
                        raise DraftFault(f"unusable proposal: {fault}")
                    return proposal

    async def _read(self) -> draft_pb2.Proposal:
        while isinstance(response := await self._call.read(), draft_pb2.DraftResponse):
            if response.WhichOneof("message") == "proposal":
                return response.proposal
        raise DraftFault("it ended the session")


def _explain(error: grpc.aio.AioRpcError) -> str:
    text = describe(error)
    if error.code() == grpc.StatusCode.UNIMPLEMENTED:
        return "what listens there is not a draft service"
    if error.code() == grpc.StatusCode.UNAVAILABLE and "failed to connect" not in text:
        return f"the draft service went away ({text})"
    return text
