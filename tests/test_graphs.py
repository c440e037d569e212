"""Recorded passes give what passes that are not recorded give.

On this machine a recording is the function itself, called again on the same tensors. What differs
on a GPU is only who calls it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from benchmarks.synthetic import record_calls
from specdec.lm.batch import Segment
from specdec.lm.graphs import BUCKETS, TREE_WIDTH
from specdec.lm.loading import load
from specdec.lm.model import CausalLM
from specdec.lm.tree import Tree

NUM_PAGES = 40


def make(folder: Path) -> CausalLM:
    model = load(str(folder), dtype="float32").model
    model.allocate(NUM_PAGES)
    return model


def step(
    tokens: list[int], start: int, pages: list[int], num_logits: int = 1, tree: Tree | None = None
) -> Segment:
    return Segment(tokens, start, pages, num_logits, tree)


BUSHY = (0, 0, 0, 1, 1, 2, 5, 5, 7, 7, 4, 3, 3, 12, 14)
WIDE = (0, 0, *range(2, TREE_WIDTH + 1))

PASSES = {
    "one row": [step([5], 0, [7])],
    "one row of a longer context": [step([5], 20, [3, 9])],
    "a block": [step([5, 6, 7, 8, 9, 10], 20, [3, 9], 6)],
    "rows without logits": [step([5, 6, 7], 30, [3, 9, 1], 0), step([8, 9], 0, [4], 2)],
    "many sequences": [step([i, i + 1], 0, [i + 1], 1 + i % 2) for i in range(23)],
    "as many as fit": [step([i] * 8, 8, [i + 1], 8) for i in range(32)],
    "too many sequences": [step([i], 0, [i + 1]) for i in range(33)],
    "more rows": [step([5] * 9, 0, [7], 9), step([4], 3, [8])],
    "too many rows": [step([5] * 17, 0, [7, 8], 9), step([4], 3, [9])],
    "too many sequences of many rows": [step([i] * 9, 0, [i + 1]) for i in range(17)],
    "a tree": [step([5, 6, 7, 8, 9], 20, [3, 9], 5, Tree(21, (0, 1, 1, 0)))],
    "a tree as large as fits": [step(list(range(16)), 20, [3, 9, 4], 16, Tree(21, BUSHY))],
    "a row of a tree": [step([5], 23, [3, 9], 1, Tree(21, (0, 1, 1, 0)))],
    "the rest of a tree": [step([5, 6, 7, 8], 31, [3, 9, 4], 4, Tree(20, BUSHY))],
    "trees and others": [
        step([5, 6, 7, 8], 12, [1], 4, Tree(13, (0, 0, 2))),
        step([5, 6, 7, 8], 20, [3, 9], 4),
        step([5], 30, [4, 2], 1),
        step([5, 6], 15, [7, 6], 2, Tree(14, (0, 1, 0))),
    ],
    "the end of a context": [
        step(list(range(16)), 240, list(range(1, 17)), 16, Tree(241, BUSHY)),
        step([5, 6, 7, 8], 12, [20], 4),
    ],
    "as wide as fits": [step([5, 6], 20 + TREE_WIDTH - 2, [3, 9, 4, 5], 2, Tree(20, WIDE))],
    "too wide": [step([5, 6], 20 + TREE_WIDTH - 1, [3, 9, 4, 5], 2, Tree(20, WIDE))],
}


@pytest.fixture(scope="module")
def models(target_folder: Path) -> tuple[CausalLM, CausalLM]:
    plain, recorded = make(target_folder), make(target_folder)
    told: list[tuple[int, int]] = []
    recorded.record_graphs(NUM_PAGES, record_calls, lambda done, total: told.append((done, total)))
    assert [done for done, _ in told] == list(range(1, told[0][1] + 1))
    assert told[0][1] == sum(
        bucket.pages == 16 or bucket.sequences * bucket.pages <= NUM_PAGES for bucket in BUCKETS
    )
    return plain, recorded


@pytest.mark.parametrize("name", PASSES)
def test_a_recorded_pass_gives_what_a_plain_one_gives(
    models: tuple[CausalLM, CausalLM], name: str
) -> None:
    plain, recorded = models
    for model in models:
        for page in range(1, NUM_PAGES + 1, 2):
            model.forward([step([page, 3, 250], 0, [page], 0)])
    expected = plain.forward(PASSES[name])
    found = recorded.forward(PASSES[name])
    assert found.shape == expected.shape
    assert torch.allclose(found, expected, atol=1e-4)
    # What the pass stored is the same as well, and nothing else changed.
    for page in range(1, NUM_PAGES + 1):
        after = step([9], 15, [page])
        assert torch.allclose(recorded.forward([after]), plain.forward([after]), atol=1e-4)


@torch.inference_mode()
def test_a_bucket_forgets_its_trees(models: tuple[CausalLM, CausalLM]) -> None:
    plain, recorded = models
    assert recorded._graphs is not None
    for name in ("a tree", "a block", "a row of a tree", "a block", "trees and others", "a tree"):
        # The same rows at the same places, now with a tree and now without.
        segments = [segment._replace(pages=[3, 9]) for segment in PASSES[name][:1]]
        expected = plain.forward(segments)
        found = recorded._graphs.run(segments)
        assert found is not None
        assert torch.allclose(found, expected, atol=1e-4), name


@torch.inference_mode()
def test_what_does_not_fit_is_not_replayed(models: tuple[CausalLM, CausalLM]) -> None:
    _, recorded = models
    assert recorded._graphs is not None
    for name, segments in PASSES.items():
        assert (recorded._graphs.run(segments) is None) == name.startswith("too "), name


def test_padding_stores_nowhere(models: tuple[CausalLM, CausalLM]) -> None:
    _, recorded = models
    before = [layer[:-1].clone() for layer in recorded._store.layers]
    recorded.forward([step([5], 0, [7])])
    for layer, old in zip(recorded._store.layers, before, strict=True):
        changed = (layer[:-1] != old).flatten(1).any(dim=1).nonzero().flatten().tolist()
        assert changed in ([], [7])


def test_a_result_outlives_the_next_pass(models: tuple[CausalLM, CausalLM]) -> None:
    _, recorded = models
    first = recorded.forward([step([5], 0, [7])])
    kept = first.clone()
    recorded.forward([step([99], 0, [8])])
    assert torch.equal(first, kept)


def test_a_bucket_that_cannot_be_recorded_runs_as_it_is(target_folder: Path) -> None:
    count = 0

    def often_fails(
        function: Callable[[], torch.Tensor],
    ) -> tuple[torch.Tensor, Callable[[], None]]:
        nonlocal count
        count += 1
        if count % 3:
            raise torch.OutOfMemoryError("out of memory")
        return record_calls(function)

    plain, recorded = make(target_folder), make(target_folder)
    recorded.record_graphs(NUM_PAGES, often_fails)
    for rows in range(1, 9):
        for sequences in (1, 3, 20):
            segments = [step(list(range(rows)), 0, [i + 1], rows) for i in range(sequences)]
            expected = plain.forward(segments)
            assert torch.allclose(recorded.forward(segments), expected, atol=1e-4)
