"""The prompts of the load test: six kinds of work, which speculate differently well."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files

KINDS = ("code", "reasoning", "chat", "summarise", "extraction", "edit")
"""What the prompts ask for.

`summarise` also asks for parts of a text word by word, `edit` for a whole file with one change.
"""


@dataclass(frozen=True)
class Prompt:
    """A user's turn."""

    id: str
    kind: str
    text: str


def load() -> list[Prompt]:
    """All prompts, in the order of the file."""
    lines = (files("specdec.bench") / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    return [Prompt(**json.loads(line)) for line in lines]


def mixed(kinds: Sequence[str], seed: int) -> list[Prompt]:
    """The prompts of some kinds, shuffled within each kind, the kinds taking turns.

    So that the first few are a fair mixture already.
    """
    generator = random.Random(seed)
    columns = []
    for kind in kinds:
        column = [prompt for prompt in load() if prompt.kind == kind]
        generator.shuffle(column)
        columns.append(column)
    longest = max(map(len, columns), default=0)
    return [column[row] for row in range(longest) for column in columns if row < len(column)]
