"""What the target writes, worked out naively: token by token, by whole passes of transformers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from specdec.distill.chat import Template
from specdec.distill.texts import Kind, Text
from specdec.distill.writing import TEMPERATURES, Task
from specdec.lm.loading import load
from specdec.lm.model import CausalLM
from specdec.lm.randomness import Stream, key, seed_tensor, uniform

TEMPLATE = Template([7, 130], [9, 77, 12], frozenset({0, 40, 41, 42, 43, 44, 45, 46}))
"""So many tokens end a turn that random models come across them."""


def raw(folder: Path) -> PreTrainedModel:
    """A model as transformers runs it."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.eval()


def packed(folder: Path) -> CausalLM:
    """A model as the runtime runs it."""
    return load(str(folder), device="cpu", dtype="float32").model


@torch.no_grad()
def logits_after(model: Any, tokens: Sequence[int]) -> torch.Tensor:
    """float32 [V]."""
    found: torch.Tensor = model(torch.tensor([list(tokens)]), use_cache=False).logits[0, -1]
    return found.float()


@dataclass
class NaiveText:
    """A text, and the logits at each token that was written."""

    tokens: list[int]
    kinds: list[Kind]
    logits: list[torch.Tensor] = field(default_factory=list)
    endings: list[str] = field(default_factory=list)
    """Why the turns ended."""


class Naive:
    """Writes one text at a time."""

    def __init__(
        self,
        model: PreTrainedModel,
        template: Template = TEMPLATE,
        *,
        seed: int,
        max_length: int,
        max_prompt: int,
        num_top: int,
    ) -> None:
        self._model, self._template, self._seed = model, template, seed
        self._max_length, self._max_prompt, self._num_top = max_length, max_prompt, num_top

    def write(self, task: Task) -> NaiveText:
        opening, bridge, ends = self._template
        text = NaiveText(list(opening), [Kind.GIVEN] * len(opening))
        said: Counter[tuple[int, ...]] = Counter()

        def turn(kind: Kind, temperature: float, room: int, *, keeps_end: bool) -> str:
            while True:
                token_id, logits = self._next(task.number, text.tokens, temperature)
                ended = token_id in ends
                if not ended or keeps_end:
                    text.tokens.append(token_id)
                    text.kinds.append(kind)
                    text.logits.append(logits)
                    room -= 1
                if ended:
                    return "end"
                if room == 0:
                    return "room"
                said[tuple(text.tokens[-16:])] += 1
                if said[tuple(text.tokens[-16:])] == 3:
                    return "loop"

        def give(tokens: Sequence[int]) -> None:
            text.tokens += tokens
            text.kinds += [Kind.GIVEN] * len(tokens)

        if task.prompt is None:
            ending = turn(Kind.PROMPT, 1.0, self._max_prompt, keeps_end=not bridge)
            text.endings.append(f"prompt: {ending}")
            if ending == "end" and not bridge:
                return text
        else:
            give(task.prompt[: self._max_prompt])
        give(bridge)
        temperature = TEMPERATURES[task.number % len(TEMPERATURES)]
        room = self._max_length - len(text.tokens)
        text.endings.append(f"answer: {turn(Kind.ANSWER, temperature, room, keeps_end=True)}")
        return text

    def _next(
        self, number: int, tokens: Sequence[int], temperature: float
    ) -> tuple[int, torch.Tensor]:
        """The likeliest token, or the draw: the likeliest come first, then the rest by id."""
        logits = logits_after(self._model, tokens)
        order = torch.topk(logits, self._num_top).indices.tolist()
        order += [token_id for token_id in range(len(logits)) if token_id not in order]
        if temperature == 0.0:
            return order[0], logits
        u = float(uniform(key(seed_tensor(self._seed), Stream.TARGET, number, len(tokens))))
        cumulative = (logits.double() / temperature).softmax(-1)[order].cumsum(0)
        return order[int((cumulative <= u).sum())], logits


def same(found: Text, expected: Text) -> bool:
    """Whether two texts are the same but for the weights."""
    return found.number == expected.number and all(
        torch.equal(getattr(found, name), getattr(expected, name))
        for name in ("token_ids", "kinds", "written", "top_ids")
    )
