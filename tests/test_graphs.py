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
from specdec.lm.graphs import BUCKETS
from specdec.lm.loading import load
from specdec.lm.model import CausalLM

NUM_PAGES = 40


def make(folder: Path) -> CausalLM:
    model = load(str(folder), dtype="float32").model
    model.allocate(NUM_PAGES)
    return model


def step(tokens: list[int], start: int, pages: list[int], num_logits: int = 1) -> Segment:
    return Segment(tokens, start, pages, num_logits)


PASSES = {
    "one row": [step([5], 0, [7])],
    "one row of a longer context": [step([5], 20, [3, 9])],
    "a block": [step([5, 6, 7, 8, 9, 10], 20, [3, 9], 6)],
    "rows without logits": [step([5, 6, 7], 30, [3, 9, 1], 0), step([8, 9], 0, [4], 2)],
    "many sequences": [step([i, i + 1], 0, [i + 1], 1 + i % 2) for i in range(23)],
    "as many as fit": [step([i] * 8, 8, [i + 1], 8) for i in range(32)],
    "too many sequences": [step([i], 0, [i + 1]) for i in range(33)],
    "too many rows": [step([5] * 9, 0, [7], 9), step([4], 3, [8])],
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
