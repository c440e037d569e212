"""Processing without a session around it."""

from __future__ import annotations

import torch

from specdec.lm.history import History
from specdec.lm.processing import join, process
from specdec.v1.common_pb2 import Sampling


def resolved(sampling: Sampling) -> Sampling:
    """The settings with those defaults that are not zero."""
    complete = Sampling(top_p=1.0, repetition_penalty=1.0)
    complete.MergeFrom(sampling)
    return complete


def processed(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Scores of rows [..., V] that all have an empty history."""
    flat = logits.reshape(-1, logits.shape[-1])
    history = History(resolved(sampling), [], logits.shape[-1], torch.device("cpu"), None)
    return process(flat, join([history.rows([])] * len(flat))).reshape(logits.shape)
