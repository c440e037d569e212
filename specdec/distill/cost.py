"""What a step costs."""

from __future__ import annotations

import statistics
import time

from specdec.lm.batch import Segment
from specdec.lm.model import CausalLM
from specdec.lm.pages import pages_for

_CONTEXT = 256
_ROUNDS = 25
"""In turn with the target's, after as many that do not count."""
_DRAFT_STEPS = 5
"""Of a round: the draft's weights are in the cache for all but the first, as when it serves."""


def step_seconds(draft: CausalLM, target: CausalLM, max_context: int) -> tuple[float, float]:
    """The median time that draft and target take for one row and the choice of its token.

    Args:
        draft: on the target's device. What its KV pages held is lost, as are the target's.
        target: it takes one step where the draft takes several.
        max_context: most tokens that a sequence may have.
    """
    context = min(_CONTEXT, max_context - 1)
    pages = list(range(1, pages_for(context + 1) + 1))
    for model in (draft, target):
        model.allocate(len(pages))
        model.forward([Segment([0] * context, 0, pages, 0)])

    def seconds(model: CausalLM, steps: int) -> float:
        begun = time.perf_counter()
        for _ in range(steps):
            logits = model.forward([Segment([0], context, pages, 1)])
            # The choice waits for the device.
            int(logits.float().argmax())
        return (time.perf_counter() - begun) / steps

    pairs = [(seconds(draft, _DRAFT_STEPS), seconds(target, 1)) for _ in range(2 * _ROUNDS)]
    drafts, targets = zip(*pairs[_ROUNDS:], strict=True)
    return statistics.median(drafts), statistics.median(targets)
