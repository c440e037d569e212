"""What a step costs."""

from __future__ import annotations

import statistics
import time

import torch

from specdec.lm.batch import Segment
from specdec.lm.model import CausalLM
from specdec.lm.pages import pages_for

_CONTEXT = 256
_STEPS = 25
"""Of each model, in turn, after as many that do not count."""


def step_seconds(models: list[CausalLM], max_context: int) -> list[float]:
    """The median time that each model takes for one row and the choice of its token.

    Args:
        models: on one device. What their KV pages held is lost.
        max_context: most tokens that a sequence may have.
    """
    context = min(_CONTEXT, max_context - 1)
    pages = list(range(1, pages_for(context + 1) + 1))
    for model in models:
        model.allocate(len(pages))
        model.forward([Segment([0] * context, 0, pages, 0)])
    seconds: list[list[float]] = [[] for _ in models]
    # In turn: what disturbs the machine disturbs all.
    for _ in range(2 * _STEPS):
        for model, found in zip(models, seconds, strict=True):
            begun = time.perf_counter()
            logits = model.forward([Segment([0], context, pages, 1)])
            int(logits.float().argmax())
            found.append(time.perf_counter() - begun)
            if model.device.type == "cuda":
                torch.cuda.synchronize(model.device)
    return [statistics.median(found[_STEPS:]) for found in seconds]
