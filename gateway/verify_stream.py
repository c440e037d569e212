"""A session's stream to the verifier service, from the gateway's side."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import grpc

from gateway.statistics import Exchange, Stopwatch
from specdec.errors import SpecdecError, Violation, describe, reason_of, violations_of
from specdec.proposals import token_ids_fault
from specdec.sessions import opened_fault
from specdec.trees import parents_of, walk
from specdec.v1 import common_pb2, draft_pb2, verifier_pb2, verifier_pb2_grpc

# Reasons that the verifier gives and that are passed on as they are. Any other means that this
# verifier is of no use.
_PASSED_ON = (
    "INVALID_REQUEST",
    "MODEL_FAILURE",
    "CONTRACT_VIOLATION",
    "RESOURCE_EXHAUSTED",
    "TOKENIZER_MISMATCH",
)


class VerifyStream:
    """A session at the verifier service."""

    def __init__(
        self,
        stub: verifier_pb2_grpc.VerifierServiceStub,
        opening: common_pb2.Open,
        *,
        effective_vocab_size: int,
        deadline: float | None,
        request_id: str,
    ) -> None:
        """
        Args:
            stub: of the verifier service.
            opening: the session.
            effective_vocab_size: that of the target, which its tokens must be within.
            deadline: seconds that the client's call still has, or None.
            request_id: for the verifier service's log.
        """
        self.cached_tokens = 0
        self.prompt_logprobs: list[common_pb2.TokenLogprobs] = []
        self._call = stub.Verify(timeout=deadline, metadata=(("x-request-id", request_id),))
        self._opening = opening
        self._effective_vocab_size = effective_vocab_size
        self._round = opening.round
        self._base_length = opening.base_length
        self._stopwatch = Stopwatch()
        self._is_abandoned = False

    async def open(self) -> None:
        """Sends the Open: the verifier begins with the prompt.

        Raises:
            SpecdecError: the stream broke.
        """
        self._stopwatch.start()
        with self._errors():
            await self._call.write(verifier_pb2.VerifyRequest(open=self._opening))

    async def opened(self) -> Exchange:
        """Waits until the prompt is in the verifier's cache. To be called once, after `open`.

        Raises:
            SpecdecError: the stream broke.
        """
        with self._errors():
            opened = (await self._read()).opened
        _require(opened_fault(opened, self._opening))
        self.cached_tokens = opened.cached_tokens
        self.prompt_logprobs = list(opened.prompt_logprobs)
        return self._stopwatch.stop(opened.timings)

    async def verdict(self, proposal: draft_pb2.Proposal) -> tuple[verifier_pb2.Verdict, Exchange]:
        """Has a proposal verified, and moves on to the next round.

        Raises:
            SpecdecError: the stream broke, or the verdict contradicts the proposal.
        """
        self._stopwatch.start()
        candidates = verifier_pb2.Candidates(
            round=self._round,
            base_length=self._base_length,
            token_ids=proposal.token_ids,
            distributions=proposal.distributions,
            parents=proposal.parents,
        )
        with self._errors():
            await self._call.write(verifier_pb2.VerifyRequest(candidates=candidates))
            verdict = (await self._read()).verdict
        _require(self._fault(verdict, candidates))
        self._round += 1
        self._base_length += len(verdict.token_ids)
        return verdict, self._stopwatch.stop(verdict.timings)

    def close(self) -> None:
        """Ends the session, at once and without waiting."""
        self._call.cancel()

    def abandon(self) -> None:
        """Says that nothing more will come: whoever waits for it is told that the stream broke."""
        self._is_abandoned = True
        self._call.cancel()

    async def _read(self) -> verifier_pb2.VerifyResponse:
        response = await self._call.read()
        if not isinstance(response, verifier_pb2.VerifyResponse):
            raise SpecdecError(
                common_pb2.ERROR_REASON_VERIFIER_UNAVAILABLE, "the verifier ended the stream"
            )
        return response

    def _fault(
        self, verdict: verifier_pb2.Verdict, candidates: verifier_pb2.Candidates
    ) -> str | None:
        n = verdict.num_accepted
        if (verdict.round, verdict.base_length) != (self._round, self._base_length):
            return f"its verdict is for round {verdict.round}, not for round {self._round}"
        parents = parents_of(candidates.parents, len(candidates.token_ids))
        stands = walk(parents, candidates.token_ids, verdict.token_ids[:n])
        if len(verdict.token_ids) != n + 1 or len(stands) != n:
            return f"its verdict's tokens are not the {n} accepted ones and one more"
        wanted = n + 1 if self._opening.HasField("logprobs") else 0
        if len(verdict.logprobs) != wanted:
            return f"its verdict has {len(verdict.logprobs)} log-probabilities, not {wanted}"
        return token_ids_fault(verdict.token_ids, self._effective_vocab_size)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Turns what a broken stream raises into an error for the client."""
        try:
            yield
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not self._is_abandoned or (task is not None and task.cancelling()):
                raise
            reason = common_pb2.ERROR_REASON_VERIFIER_UNAVAILABLE
            raise SpecdecError(reason, "the verifier has fallen silent") from None
        except grpc.aio.AioRpcError as error:
            name = reason_of(error)
            if name in _PASSED_ON:
                reason = common_pb2.ErrorReason.Value(f"ERROR_REASON_{name}")
            elif error.code() == grpc.StatusCode.DEADLINE_EXCEEDED:
                reason = common_pb2.ERROR_REASON_DEADLINE_EXCEEDED
            else:
                reason = common_pb2.ERROR_REASON_VERIFIER_UNAVAILABLE
            # What the verifier calls "open.sampling.…" is "sampling.…" to the client.
            violations = [
                Violation(v.field.removeprefix("open."), v.description)
                for v in violations_of(error)
            ]
            raise SpecdecError(reason, f"verifier: {describe(error)}", violations) from error
        except asyncio.InvalidStateError as error:
            reason = common_pb2.ERROR_REASON_VERIFIER_UNAVAILABLE
            raise SpecdecError(reason, "the verifier ended the stream") from error


def _require(fault: str | None) -> None:
    if fault is not None:
        raise SpecdecError(common_pb2.ERROR_REASON_CONTRACT_VIOLATION, f"verifier: {fault}")
