"""The student learns from the target's texts; what it has learned survives a kill."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from specdec.distill.batches import collate, columns_of, cut, epoch
from specdec.distill.sparse_loss import sparse_cross_entropy
from specdec.distill.student import Student, half_precision
from specdec.distill.texts import Text, lengths, load

_WARM_UP, _LAST_RATE = 0.05, 0.02
"""Of the schedule, as parts of all steps and of the peak."""
_CLIP = 1.0
CHECKPOINT_STEPS = 50


class Step(NamedTuple):
    """What the curve keeps of a step."""

    step: int
    loss: float
    """Weighted mean over the written tokens, nats: forward KL plus the entropy of what is known of
    the teacher."""
    num_tokens: int


Report = Callable[[Step, int], None]
"""Told of a step, and the number of all steps."""


class Trainer:
    """One phase of training, epochs over shards of texts.

    However often it is interrupted, it takes the same steps: each depends on the settings and on
    the steps before it alone.
    """

    def __init__(
        self,
        student: Student,
        shards: Sequence[Path],
        *,
        epochs: int,
        seed: int,
        tokens_per_step: int,
        learning_rate: float,
        head_learning_rate: float,
        checkpoint: Path,
        compile_model: bool,
    ) -> None:
        """
        Args:
            student: float32, on the device that it is trained on.
            shards: of texts.
            epochs: how often they are gone over.
            seed: of the order of the texts.
            tokens_per_step: padded tokens of a batch, at most.
            learning_rate: of the layers' matrices, by Muon (Jordan et al. 2024).
            head_learning_rate: of all else, by AdamW (arXiv 1711.05101).
            checkpoint: the file that the phase goes on from, if it is there.
            compile_model: whether to compile the student's layers.
        """
        self._student = student
        self._seed, self._tokens_per_step = seed, tokens_per_step
        self._checkpoint = checkpoint
        self._device = student.head.device
        self._columns = columns_of(student.vocabulary.cpu(), len(student.embedding))
        self._passes = [
            (path, seed + number)
            for number in range(epochs)
            for path in _shuffled(shards, seed + number)
        ]
        sizes = {path: lengths(path) for path in shards}
        self._num_steps = sum(
            len(cut(sizes[path], tokens_per_step, seed)) for path, seed in self._passes
        )
        matrices = [p for p in student.decoder.parameters() if p.dim() == 2]
        known = {id(p) for p in matrices}
        others = [p for p in student.parameters() if id(p) not in known]
        self._optimizers: list[torch.optim.Optimizer] = [
            torch.optim.Muon(matrices, lr=learning_rate, weight_decay=0.01),
            torch.optim.AdamW(others, lr=head_learning_rate, betas=(0.9, 0.95), weight_decay=0.01),
        ]
        self._rates = [learning_rate, head_learning_rate]
        self._run: Callable[[torch.Tensor], torch.Tensor] = student
        if compile_model:
            self._run = torch.compile(student, dynamic=True)
        self.curve: list[Step] = []

    def train(self, report: Report) -> None:
        """Takes the steps that are left."""
        self._resume()
        self._student.train()
        done = len(self.curve)
        position = 0
        for each in self._passes:
            for texts in self._batches(*each):
                position += 1
                if position <= done:
                    continue
                self.curve.append(self._step(position, texts))
                report(self.curve[-1], self._num_steps)
                if position % CHECKPOINT_STEPS == 0:
                    self._save()
        if len(self.curve) > done:
            self._save()
        self._student.eval()

    def _batches(self, path: Path, seed: int) -> Iterator[list[Text]]:
        return epoch(load(path), self._tokens_per_step, seed)

    def _step(self, step: int, texts: list[Text]) -> Step:
        batch = collate(texts, self._columns)
        columns, probabilities, weights = (
            x.to(self._device) for x in (batch.columns, batch.probabilities, batch.weights)
        )
        with half_precision(self._device) as precision:
            hidden = self._run(batch.token_ids.to(self._device))
        hidden = hidden.flatten(0, 1)[batch.rows.to(self._device)]
        if precision._enabled:
            hidden = hidden.to(precision.fast_dtype)
        loss = sparse_cross_entropy(
            hidden, self._student.head, columns, probabilities, weights / weights.sum()
        )
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._student.parameters(), _CLIP)
        factor = _schedule(step / self._num_steps)
        for optimizer, rate in zip(self._optimizers, self._rates, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = rate * factor
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return Step(step, float(loss.detach()), len(batch.rows))

    def _save(self) -> None:
        """Whole or not at all: a kill in the middle leaves the last one."""
        partial = self._checkpoint.with_suffix(".partial")
        state = {
            "student": self._student.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self._optimizers],
            "curve": [tuple(step) for step in self.curve],
        }
        torch.save(state, partial)
        partial.replace(self._checkpoint)

    def _resume(self) -> None:
        if not self._checkpoint.exists():
            return
        state = torch.load(self._checkpoint, map_location=self._device, weights_only=True)
        self._student.load_state_dict(state["student"])
        for optimizer, held in zip(self._optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(held)
        self.curve = [Step(*step) for step in state["curve"]]


def _schedule(progress: float) -> float:
    """The learning rate as a part of its peak: a short way up, then a cosine down."""
    if progress < _WARM_UP:
        return progress / _WARM_UP
    rest = (progress - _WARM_UP) / (1 - _WARM_UP)
    return _LAST_RATE + (1 - _LAST_RATE) * 0.5 * (1 + math.cos(math.pi * rest))


def _shuffled(paths: Sequence[Path], seed: int) -> list[Path]:
    generator = torch.Generator().manual_seed(seed)
    return [paths[i] for i in torch.randperm(len(paths), generator=generator).tolist()]
