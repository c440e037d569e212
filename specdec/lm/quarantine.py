"""Runs passes so that what fails fails alone.

A pass is for many sessions, and so is what follows from its logits. If either raises, it is tried
again in halves, down to the works at fault: their sessions fail, and nobody else's. Nothing has to
be undone before that. What a failed pass stored lies behind the cached tokens of its sequences,
where nobody looks before it is stored again.
"""

from __future__ import annotations

from collections.abc import Sequence

import structlog
import torch

from specdec.errors import SpecdecError
from specdec.lm.model import CausalLM
from specdec.lm.work import Work, failing
from specdec.v1 import common_pb2

_log = structlog.get_logger()
_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")
"""In what torch says where it has no type of its own for it."""

Rows = tuple[Work, int]
"""A work, and how many of its rows."""


class DeviceLost(Exception):
    """The device fails at whatever it is asked. Only a new process gets it back."""


class Quarantine:
    """Feeds works, and goes on with them. Owned by the model thread."""

    def __init__(self, model: CausalLM) -> None:
        self._model = model

    def feed(self, chosen: Sequence[Rows]) -> None:
        """Feeds these rows, in one pass if that does not fail.

        If it does, n works take at most 2n − 1 passes. Where memory runs out it was too much at
        once: then the rows of one work are halved as well, and it fails only if there is no memory
        for a single one.

        Raises:
            DeviceLost: the works at fault have failed then; the others have neither failed nor
                been fed.
        """
        chosen = [(work, count) for work, count in chosen if not work.done]
        if not chosen:
            return
        failure = None
        try:
            segments = [work.segment(count) for work, count in chosen]
            logits = self._model.forward(segments)
        except Exception as error:
            failure = error
        if failure is not None:
            self._feed_less(chosen, failure)
            return
        parts = logits.split([segment.num_logits for segment in segments])
        for (work, count), part in zip(chosen, parts, strict=True):
            work.sequence.cached_length += count
            with failing(work):
                work.take(part)

    def go_on(self, kind: type[Work], works: Sequence[Work]) -> None:
        """Goes on with works of one class that were fed to their end; what they keep of trees is
        moved to its place."""
        self._consume(kind, works)
        # At once: a page that a sequence gave back may be another's with the next work admitted.
        moves = [move for work in works for move in work.sequence.take_moves()]
        if moves:
            try:
                self._model.move(moves)
            except Exception as error:
                # What is cached is not what the sequences say, and others would take it over.
                for work in works:
                    work.sequence.truncate(0)
                    work.fail(error)

    def _feed_less(self, chosen: Sequence[Rows], failure: Exception) -> None:
        (work, count), exhausted = chosen[0], self._make_room(failure)
        if len(chosen) == 1 and (count == 1 or not exhausted):
            self._fail(work, failure)
            return
        _report(failure, works=len(chosen), rows=sum(rows for _, rows in chosen))
        if len(chosen) == 1:
            halves: list[Sequence[Rows]] = [[(work, count // 2)], [(work, count - count // 2)]]
        else:
            half = len(chosen) // 2
            halves = [chosen[:half], chosen[half:]]
        for part in halves:
            self.feed(part)

    def _consume(self, kind: type[Work], works: Sequence[Work]) -> None:
        received = [list(work.logits) for work in works]
        failure = None
        try:
            kind.consume(works)
        except Exception as error:
            failure = error
        if failure is None:
            return
        self._make_room(failure)
        # Of the others some have ended, and some have new tokens pending.
        left = [
            (work, logits)
            for work, logits in zip(works, received, strict=True)
            if not work.done and not work.missing
        ]
        if len(works) == 1:
            for work, _ in left:
                self._fail(work, failure)
            return
        _report(failure, works=len(works), left=len(left))
        for work, logits in left:
            work.logits = logits
        half = len(left) // 2
        for part in (left[:half], left[half:]):
            if part:
                self._consume(kind, [work for work, _ in part])

    def _make_room(self, failure: Exception) -> bool:
        """Frees what can be freed if memory ran out. Whether it did."""
        exhausted = isinstance(failure, torch.OutOfMemoryError | MemoryError) or any(
            text in str(failure) for text in _OUT_OF_MEMORY
        )
        if exhausted:
            # The frames in it hold the tensors that were in the way.
            failure.__traceback__ = None
            self._model.free_memory()
        return exhausted

    def _fail(self, work: Work, failure: Exception) -> None:
        """Ends a work that is at fault.

        Raises:
            DeviceLost: not it is, but the device.
        """
        if self._make_room(failure):
            failure = SpecdecError(
                common_pb2.ERROR_REASON_RESOURCE_EXHAUSTED,
                "the device has no memory left to compute even one row of this session; the "
                "service may need less --kv-memory",
            )
        work.fail(failure)
        try:
            self._model.check_device()
        except Exception as error:
            raise DeviceLost("the device fails at whatever it is asked") from error


def _report(failure: Exception, **facts: int) -> None:
    _log.warning("pass failed, trying less", error=str(failure)[:200], **facts)
    failure.__traceback__ = None
