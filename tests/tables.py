"""Sessions on a table of logits, in the place of a model: row s holds what follows token s."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from specdec.lm.history import History
from specdec.lm.pages import PagePool, pages_for
from specdec.lm.runtime import Session
from specdec.lm.sequence import CachedSequence
from specdec.lm.work import Work
from specdec.v1 import common_pb2


class TableModel:
    """Does works one by one, as the scheduler would."""

    def __init__(self, logits: torch.Tensor) -> None:
        """`logits`: [V, V]."""
        self._logits = logits

    def run(self, work: Work) -> Any:
        """Runs a work to its end. Returns its result, or raises its error."""
        work.start()
        while not work.done:
            sequence = work.sequence
            missing = pages_for(work.end) - len(sequence.pages)
            sequence.pages += POOL.allocate(missing) if missing > 0 else []
            sequence.cached_length = work.end
            work.take(self._logits[sequence.tokens[-work.num_logits :]])
            work.consume([work])
        if work.error is not None:
            raise work.error
        return work.result


POOL = PagePool(1024)


def session(
    prompt: Sequence[int],
    history: History,
    sampling: common_pb2.Sampling,
    rule: common_pb2.AcceptanceRule.ValueType,
) -> Session:
    """A session with nothing cached yet. `release` gives its pages back."""
    opening = common_pb2.Open(
        session_id="table",
        base_length=len(prompt),
        prompt_token_ids=prompt,
        sampling=sampling,
        acceptance_rule=rule,
    )
    sequence = CachedSequence(POOL, prompt)
    return Session(opening, sequence, history, common_pb2.Opened())


def release(*sessions: Session) -> None:
    """Ends sessions."""
    for each in sessions:
        each.sequence.truncate(0)
