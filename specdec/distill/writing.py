"""The target writes texts, and what it thought at every token is kept."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from specdec.distill.chat import Template
from specdec.distill.picking import Thought, pick
from specdec.distill.texts import Kind, Text
from specdec.lm.batch import Segment
from specdec.lm.model import CausalLM
from specdec.lm.pages import PAGE_SIZE, pages_for
from specdec.lm.randomness import seed_tensor

_LOOP_TOKENS = 16
"""A text that says so many tokens for the third time has nothing new to teach, and ends."""
_LEAST_WEIGHT = 0.1
"""Of a token whose proposal was accepted."""
TEMPERATURES = (0.0, 0.5, 0.8, 1.0)
"""Of the answers, in turn."""


class Task(NamedTuple):
    """A text to write."""

    number: int
    """By which its random numbers are drawn, and its temperature is chosen."""
    prompt: list[int] | None = None
    """What the user says; None if the target writes that, too."""


@dataclass
class _Slot:
    """A text that is being written, and its pages."""

    task: Task
    pages: list[int]
    tokens: list[int]
    kinds: list[Kind]
    num_cached: int
    num_drafted_from: int
    """How many tokens the student has cached."""
    answering: bool
    room: int
    """How many tokens the present turn may still have."""
    thoughts: list[Thought] = field(default_factory=list)
    said: Counter[tuple[int, ...]] = field(default_factory=Counter)

    @property
    def temperature(self) -> float:
        return TEMPERATURES[self.task.number % len(TEMPERATURES)] if self.answering else 1.0

    def loops(self) -> bool:
        """Whether its last words have been said before, and before that."""
        last = tuple(self.tokens[-_LOOP_TOKENS:])
        self.said[last] += 1
        return self.said[last] >= 3


class Writer:
    """Lets a model write many texts side by side.

    The same tasks give the same texts, bit for bit: which texts share a pass depends on nothing
    but the tasks. With a student that proposes tokens the texts are the same as without, but for
    rounding: what the target writes at a place is drawn by the place's own random number.
    """

    def __init__(
        self,
        target: CausalLM,
        template: Template,
        *,
        seed: int,
        num_slots: int,
        max_length: int,
        max_prompt: int,
        num_top: int,
        student: CausalLM | None = None,
        num_draft_tokens: int = 0,
    ) -> None:
        """
        Args:
            target: what writes. Room for the texts is made here.
            template: of its conversations.
            seed: of the texts.
            num_slots: how many texts are written at a time.
            max_length: most tokens of a text, template included.
            max_prompt: most tokens of a user's turn.
            num_top: how many of the likeliest tokens are kept at each position.
            student: proposes tokens. Each token that the target writes then weighs as much as the
                chance that its proposal was rejected.
            num_draft_tokens: how many at a time.
        """
        self._target, self._student, self._template = target, student, template
        self._num_draft_tokens = num_draft_tokens if student is not None else 0
        self._seed = seed_tensor(seed, target.device)
        self._max_length, self._max_prompt, self._num_top = max_length, max_prompt, num_top
        # All texts begin alike. The pages that this fills are written once, and shared.
        self._num_shared = (len(template.opening) - 1) // PAGE_SIZE
        shared = list(range(1, self._num_shared + 1))
        each = pages_for(max_length + self._num_draft_tokens) - self._num_shared
        first = self._num_shared + 1
        self._pages = [
            shared + list(range(begin, begin + each))
            for begin in range(first, first + num_slots * each, each)
        ]
        for model in (target, student):
            if model is not None:
                model.allocate(self._num_shared + num_slots * each)
                if shared:
                    opening = template.opening[: self._num_shared * PAGE_SIZE]
                    model.forward([Segment(opening, 0, shared, 0)])

    def write(
        self, tasks: Sequence[Task], report: Callable[[int], None] = lambda done: None
    ) -> list[Text]:
        """Writes a text for each task; they come in the order of the tasks.

        `report` is told, now and then, how many tokens were written so far.
        """
        waiting = list(reversed(tasks))
        free = list(reversed(self._pages))
        slots: list[_Slot] = []
        texts: dict[int, Text] = {}
        num_written = 0
        while waiting or slots:
            while waiting and free:
                slots.append(self._begin(waiting.pop(), free.pop()))
            going = []
            for slot, goes_on in zip(slots, self._round(slots), strict=True):
                if goes_on:
                    going.append(slot)
                    continue
                texts[slot.task.number] = text = _finished(slot)
                free.append(slot.pages)
                num_written += len(text.logprobs)
            slots = going
            report(num_written + sum(len(slot.thoughts) for slot in slots))
        return [texts[task.number] for task in tasks]

    def _begin(self, task: Task, pages: list[int]) -> _Slot:
        tokens = list(self._template.opening)
        if task.prompt is not None:
            tokens += task.prompt[: self._max_prompt] + self._template.bridge
        answering = task.prompt is not None
        room = self._max_length - len(tokens)
        cached = self._num_shared * PAGE_SIZE
        return _Slot(
            task=task,
            pages=pages,
            tokens=tokens,
            kinds=[Kind.GIVEN] * len(tokens),
            num_cached=cached,
            num_drafted_from=cached,
            answering=answering,
            room=room if answering else min(self._max_prompt, room),
        )

    def _round(self, slots: list[_Slot]) -> list[bool]:
        """Lets the target write a token of each text, and as many more as were proposed rightly.

        Returns:
            For each text whether it goes on.
        """
        drafts = self._draft(slots)
        count = self._num_draft_tokens + 1
        segments = [
            Segment(
                slot.tokens[slot.num_cached :] + drafted.token_ids,
                slot.num_cached,
                slot.pages,
                count,
            )
            for slot, drafted in zip(slots, drafts, strict=True)
        ]
        logits = self._target.forward(segments).float()
        rows = [(slot, i) for slot in slots for i in range(count)]
        keys = [(slot.task.number, len(slot.tokens) + i) for slot, i in rows]
        temperatures = [slot.temperature for slot, _ in rows]
        picks = pick(logits, temperatures, keys, self._seed, self._num_top)
        found = []
        for index, (slot, drafted) in enumerate(zip(slots, drafts, strict=True)):
            slot.num_cached = len(slot.tokens)
            going = True
            for i, (token_id, thought) in enumerate(picks[index * count : (index + 1) * count]):
                weight = drafted.rejection(i, token_id, thought, slot.temperature)
                stands = drafted.token_ids[i : i + 1] == [token_id]
                answering = slot.answering
                going = self._append(slot, token_id, thought._replace(weight=weight))
                if not going or not stands or slot.answering != answering:
                    break
                slot.num_cached += 1
            found.append(going)
        return found

    def _draft(self, slots: list[_Slot]) -> list[_Drafted]:
        """The student's proposals: its likeliest tokens."""
        drafts = [_Drafted([], []) for _ in slots]
        if self._student is None:
            return drafts
        for i in range(self._num_draft_tokens):
            segments = [
                Segment(
                    slot.tokens[slot.num_drafted_from :] if i == 0 else drafted.token_ids[-1:],
                    slot.num_drafted_from if i == 0 else len(slot.tokens) + i - 1,
                    slot.pages,
                    1,
                )
                for slot, drafted in zip(slots, drafts, strict=True)
            ]
            logits = self._student.forward(segments).float()
            likeliest = logits.argmax(dim=-1).tolist()
            for drafted, token_id, row in zip(drafts, likeliest, logits, strict=True):
                drafted.token_ids.append(token_id)
                drafted.logits.append(row)
        for slot in slots:
            slot.num_drafted_from = len(slot.tokens)
        return drafts

    def _append(self, slot: _Slot, token_id: int, thought: Thought) -> bool:
        """Adds a token. Returns whether the text goes on."""
        ended = token_id in self._template.ends
        # Without a template nothing else could follow.
        whole = slot.answering or not self._template.bridge
        slot.room -= 1
        if not ended or whole:
            slot.tokens.append(token_id)
            slot.kinds.append(Kind.ANSWER if slot.answering else Kind.PROMPT)
            slot.thoughts.append(thought)
        if not ended and slot.room > 0 and not slot.loops():
            return True
        if slot.answering or (ended and whole):
            return False
        # The end of the user's turn is the template's to write.
        slot.tokens += self._template.bridge
        slot.kinds += [Kind.GIVEN] * len(self._template.bridge)
        slot.answering = True
        slot.room = self._max_length - len(slot.tokens)
        return slot.room > 0


class _Drafted(NamedTuple):
    """What the student proposed for one text."""

    token_ids: list[int]
    logits: list[torch.Tensor]
    """[V] each."""

    def rejection(self, i: int, token_id: int, thought: Thought, temperature: float) -> float:
        """The chance that the i-th proposal was rejected, given the token that stands there.

        Sampled it is 1 − min(1, q / p), of distributions at temperature 1. The row of the bonus
        token, which had no proposal, counts in full.
        """
        if i >= len(self.token_ids):
            return 1.0
        if temperature == 0.0:
            return _LEAST_WEIGHT if self.token_ids[i] == token_id else 1.0
        q = float(self.logits[i].log_softmax(dim=-1)[token_id])
        return max(_LEAST_WEIGHT, 1.0 - min(1.0, math.exp(q - float(thought.logprob))))


def _finished(slot: _Slot) -> Text:
    return Text(
        number=slot.task.number,
        token_ids=torch.tensor(slot.tokens, dtype=torch.int32),
        kinds=torch.tensor([int(kind) for kind in slot.kinds], dtype=torch.uint8),
        written=torch.tensor([kind is not Kind.GIVEN for kind in slot.kinds]),
        top_ids=torch.stack([thought.top_ids for thought in slot.thoughts]),
        top_logprobs=torch.stack([thought.top_logprobs for thought in slot.thoughts]),
        logprobs=torch.stack([thought.logprob for thought in slot.thoughts]),
        weights=torch.tensor([thought.weight for thought in slot.thoughts]),
    )
