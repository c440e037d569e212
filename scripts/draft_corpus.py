"""Writes the prompts that the default draft learned from, besides what the target asks itself.

Left alone, the target writes what it was itself trained on. This adds what most users ask for:
questions, code, word problems, and texts to summarise, extract from and edit. No prompt of
`specdec bench` is among them.

Usage: python scripts/draft_corpus.py > corpus.jsonl
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

COUNT = 6000
SEED = 5

PARTS: dict[str, Any] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))


def question(r: Random) -> str:
    """About one or two topics."""
    template = r.choice(PARTS["questions"])
    return str(template.format(t=r.choice(PARTS["topics"]), u=r.choice(PARTS["topics"])))


def code(r: Random) -> str:
    """A program to write."""
    if r.random() < 0.1:
        table, other = r.sample(PARTS["tables"], 2)
        return r.choice(
            [
                f"Write a SQL query that counts the rows of the table {table} for each month.",
                f"Write a SQL query that joins {table} and {other} and sorts by date.",
                f"Create a SQL table {table} with five sensible columns, and insert three rows.",
            ]
        )
    template = r.choice(PARTS["code"])
    language, function = r.choice(PARTS["languages"]), r.choice(PARTS["functions"])
    return str(template.format(l=language, f=function))


def problem(r: Random) -> str:
    """A word problem with numbers of its own."""
    a, b, c = r.randint(3, 60), r.randint(2, 20), r.randint(2, 9)
    name, other = r.sample(PARTS["names"], 2)
    thing = r.choice(PARTS["things"])
    text = r.choice(
        [
            f"{name} has {a + b} {thing} and gives {b} of them to {other}. How many are left?",
            f"A box holds {a} {thing}. How many {thing} are in {b} boxes, if {c} boxes are only "
            "half full?",
            f"{name} buys {b} {thing} at {c} euros each and pays with {b * c + a} euros. How much "
            "change is there?",
            f"A train travels at {a + 40} km/h for {c} hours and then at {b + 50} km/h for "
            f"{c + 1} hours. How far?",
            f"{name} is {b} years older than {other}. Together they are {2 * a + b} years old. "
            "How old is each?",
            f"A rectangle is {a} cm long and {b} cm wide. What are its area and its perimeter?",
            f"A jacket costs {10 * b} euros and is reduced by {5 * c}%. What is the new price?",
            f"{c} workers need {a} hours for a job. How long would {c + 2} workers need?",
            f"If x + {b} = {a + b} and y = {c}x, what are x and y?",
            f"{name} reads {b} pages a day. A book has {b * c + 3} pages. On which day is it "
            "finished?",
            f"Of {a * c} people, one in {c} takes the bus and the rest walk. How many walk?",
            f"What is {a} × {b} + {c}? Show each step.",
            f"{name} is taller than {other}, and {other} is taller than "
            f"{r.choice(PARTS['names'])}. Who is the shortest?",
            f"A tank of {a * 10} litres loses {c} litres an hour. When is it empty?",
        ]
    )
    endings = ["", "", " Think step by step.", " Explain your answer.", " Show the calculation."]
    return text + r.choice(endings)


def sentences(r: Random) -> list[str]:
    """Facts, most with numbers, that read like a notice or a report."""
    name, other = r.sample(PARTS["names"], 2)
    town, far = r.sample(PARTS["towns"], 2)
    n, day, month = r.randint(3, 90), r.randint(1, 28), r.choice(PARTS["months"])
    pool = [
        f"{name} moved from {far} to {town} in {month} {1960 + n % 60} to work as a "
        f"{r.choice(PARTS['jobs'])}.",
        f"The meeting in {town} takes place on {day} {month} at {8 + n % 10}:30 in room {n}.",
        f"In {month}, {n} of the {n + 40} volunteers planted trees along the river near {town}.",
        f"{name} and {other} ordered {n} {r.choice(PARTS['things'])} for {n * 4}.50 euros.",
        f"The bus to {far} leaves {town} every {5 + n % 30} minutes and takes {n} minutes.",
        f"The old {r.choice(['bridge', 'mill', 'school', 'harbour', 'theatre'])} of {town} was "
        f"closed for {n} months and cost {n % 9 + 1} million euros to repair.",
        f"Last winter the temperature fell to minus {n % 25 + 2} degrees, and the road was closed "
        f"for {n % 6 + 2} days.",
        f"{name}, {20 + n % 60}, won the race over {n % 40 + 2} kilometres and said that the last "
        "hill had been the hardest.",
        f"Visitors pay {n % 15 + 2} euros; children under {n % 8 + 5} pay nothing.",
        f"The company of {other} employs {n * 3} people and wants to open a second office in "
        f"{far}.",
        f"Because of the storm, {n} households had no electricity until the evening of {day} "
        f"{month}.",
        f"A new study with {n * 20} patients found that a walk of {10 + n % 40} minutes a day "
        "improves sleep.",
    ]
    return r.sample(pool, r.randint(2, 5))


def passage(r: Random) -> str:
    """A text with what is to be done with it."""
    text = " ".join(sentences(r))
    task = r.choice(PARTS["passage_tasks"])
    before, after = f"{task}\n\n{text}", f"{text}\n\n{task}"
    return r.choice([before, before, after])


def edit(r: Random) -> str:
    """Code with what is to be done with it."""
    return f"{r.choice(PARTS['edits'])}\n\n```\n{r.choice(PARTS['snippets'])}\n```"


KINDS: list[tuple[Callable[[Random], str], int]] = [
    (question, 4),
    (code, 3),
    (problem, 3),
    (passage, 3),
    (edit, 1),
]
"""With how often each is asked for."""


def prompts() -> Iterator[str]:
    """COUNT different ones, in mixed order."""
    r = Random(SEED)
    makers, weights = zip(*KINDS, strict=True)
    seen: set[str] = set()
    while len(seen) < COUNT:
        prompt = r.choices(makers, weights)[0](r)
        if prompt not in seen:
            seen.add(prompt)
            yield prompt


for prompt in prompts():
    print(json.dumps({"prompt": prompt}))
