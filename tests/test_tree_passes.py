"""Passes over trees of drafted tokens give each token what its own path alone would give it.

Tiny random models in float32, against transformers on every path. Sessions go through many rounds,
each on top of what the ones before left in the cache: a tree, of which a path is kept and moved to
its place, and a token that follows. So what was moved is checked by all that comes after it.
"""

from __future__ import annotations

import pickle
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import specdec.lm.model
from specdec.lm import residents
from specdec.lm.architecture import runnable
from specdec.lm.attention import KVStore, attend
from specdec.lm.batch import Segment, pack
from specdec.lm.model import CausalLM
from specdec.lm.pages import PAGE_SIZE, PagePool, pages_for
from specdec.lm.scheduler import Scheduler
from specdec.lm.sequence import CachedSequence
from specdec.lm.tensor_parallel import LeadingLM, Team
from specdec.lm.tree import Branches, Tree
from specdec.lm.work import Prefill, Work, failing
from specdec.trees import chain, depths, is_chain, path
from tests.models import byte_tokens, make_tokenizer
from tests.test_architectures import (
    BOUND,
    FUSED,
    GENERIC,
    VOCABULARY,
    WINDOW,
    config_of,
    plain_logits,
    random_model,
)
from tests.test_serving import environment

FUSED_NAMES = ["llama, grouped queries", "qwen2", "qwen3, windows and biases", "mistral"]
GENERIC_NAMES = ["gemma2", "gemma3", "phi3", "gpt2", "smollm3, a layer without rope"]
LLAMA = "llama, grouped queries"


@pytest.fixture(autouse=True)
def nobody_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(residents, "IDLE_SECONDS", 1000.0)


@cache
def original(name: str) -> PreTrainedModel:
    """As transformers runs it."""
    return random_model(config_of({**FUSED, **GENERIC}[name]))


@cache
def runtime(name: str, *, fused: bool = True) -> CausalLM:
    """As this runtime runs it."""
    with pytest.MonkeyPatch.context() as patch:
        if not fused:
            patch.setattr(specdec.lm.model, "can_fuse", lambda model: False)
        found = runnable(random_model(config_of({**FUSED, **GENERIC}[name])), VOCABULARY)
    assert (found._fused is not None) == (fused and name in FUSED)
    return found


def random_tokens(numbers: random.Random, count: int) -> list[int]:
    return [numbers.randrange(VOCABULARY) for _ in range(count)]


def random_parents(numbers: random.Random, count: int) -> list[int]:
    """A tree of any shape: bushy ones, deep ones, chains and siblings."""
    shape = numbers.choice(["any", "bushy", "deep", "chain", "siblings"])
    low = {"any": 0.0, "bushy": 0.0, "deep": 0.9, "chain": 1.0, "siblings": 0.0}[shape]
    high = {"any": 1.0, "bushy": 0.3, "deep": 1.0, "chain": 1.0, "siblings": 0.0}[shape]
    return [round(place * numbers.uniform(low, high)) for place in range(count)]


def random_path(numbers: random.Random, parents: Sequence[int]) -> list[int]:
    return path(parents, numbers.randint(0, len(parents)))


def expected_logits(
    name: str, committed: Sequence[int], token_ids: Sequence[int], parents: Sequence[int]
) -> torch.Tensor:
    """[1 + N, vocabulary]: after the committed tokens, and after the path to each drafted one."""
    model = original(name)
    found: dict[int, torch.Tensor] = {}
    for leaf in range(len(token_ids), -1, -1):
        if leaf not in found:
            places = path(parents, leaf)
            sequence = [*committed, *(token_ids[place - 1] for place in places)]
            logits = plain_logits(model, sequence)[len(committed) - 1 :]
            found.update(zip([0, *places], logits, strict=True))
    return torch.stack([found[place] for place in range(len(token_ids) + 1)])


def assert_equal_logits(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.shape == expected.shape
    scale, worst = float(expected.abs().max()), float((found - expected).abs().max())
    assert worst <= BOUND * scale, f"{worst:.1e} of logits up to {scale:.1f}"


class Round(Work):
    """Feeds a tree, keeps a path of it, and commits that with a token that follows.

    Its result: the logits after the committed tokens and after each drafted one.
    """

    def __init__(
        self,
        sequence: CachedSequence,
        token_ids: list[int],
        parents: list[int] | None = None,
        kept: list[int] | None = None,
        *,
        keeps: bool = True,
        follower: int = 5,
    ) -> None:
        """`keeps`: whether it says what it keeps before it commits, or only commits."""
        super().__init__(sequence)
        self.num_logits = len(token_ids) + 1
        self.token_ids, self.parents = token_ids, parents
        self.kept, self.keeps = kept or [], keeps
        self.emitted = [*(token_ids[place - 1] for place in self.kept), follower]
        self.losses = 0
        self.num_cached = 0

    def start(self) -> None:
        self.base_length = len(self.sequence.tokens)
        self.sequence.append(self.token_ids, self.parents)

    def restart(self) -> None:
        super().restart()
        self.losses += 1

    @classmethod
    def consume(cls, works: Sequence[Round]) -> None:
        for work in works:
            with failing(work):
                logits = work.collect()
                if work.keeps:
                    work.sequence.keep(work.kept)
                work.sequence.commit(work.base_length, work.emitted)
                work.num_cached = work.sequence.cached_length
                work.finish(logits)


class Bench:
    """A scheduler of one model. Every step checks the books."""

    def __init__(
        self, name: str, *, pages: int = 100, rows: int = 256, model: CausalLM | None = None
    ) -> None:
        self.name = name
        self.scheduler = Scheduler(model or runtime(name), pages, rows)
        self.residents = self.scheduler.residents

    def open(self, tokens: Sequence[int], **options: Any) -> CachedSequence:
        sequence = CachedSequence(self.residents.pool, tokens, **options)
        self.scheduler.open(sequence)
        return sequence

    def step(self) -> None:
        assert self.scheduler.step(), "nothing can be done"
        self.residents.check_integrity()

    def run(self, *works: Work) -> None:
        for work in works:
            self.scheduler.add(work, lambda: None)
        while not all(work.done for work in works):
            self.step()
        for work in works:
            assert work.error is None, work.error

    def check(self, work: Round, committed: Sequence[int]) -> None:
        """Its logits are right; so is what it left of the sequence."""
        parents = work.parents or chain(len(work.token_ids))
        expected = expected_logits(self.name, committed, work.token_ids, parents)
        assert_equal_logits(work.result, expected)
        sequence = work.sequence
        assert sequence.tokens == [*committed, *work.emitted]
        assert sequence.committed_length == len(sequence.tokens)
        assert sequence.tree is None
        if work.keeps:
            # Nothing is fed again of what was kept.
            assert work.num_cached == len(sequence.tokens) - 1


def random_round(numbers: random.Random, sequence: CachedSequence, **options: Any) -> Round:
    token_ids = random_tokens(numbers, numbers.choice([0, 1, 4, 9, 20, 35]))
    parents = random_parents(numbers, len(token_ids))
    return Round(
        sequence,
        token_ids,
        None if is_chain(parents) and numbers.random() < 0.5 else parents,
        random_path(numbers, parents),
        follower=numbers.randrange(VOCABULARY),
        **options,
    )


def random_rounds(
    bench: Bench,
    seed: int,
    lengths: Sequence[int] = (70, 30, 17, 3),
    *,
    num_rounds: int = 3,
    keeps: Callable[[random.Random], bool] = lambda numbers: True,
) -> list[Round]:
    """Sessions side by side, all rounds checked. Returns the works of all rounds."""
    numbers = random.Random(seed)
    sequences = [bench.open(random_tokens(numbers, length)) for length in lengths]
    works: list[Round] = []
    for _ in range(num_rounds):
        before = [list(sequence.tokens) for sequence in sequences]
        rounds = [random_round(numbers, each, keeps=keeps(numbers)) for each in sequences]
        bench.run(*rounds)
        for work, committed in zip(rounds, before, strict=True):
            bench.check(work, committed)
        works += rounds
    return works


# The sequence.


def test_several_appends_grow_one_tree() -> None:
    sequence = CachedSequence(PagePool(10), [1, 2, 3])
    sequence.append([4, 5])
    assert sequence.tree is None
    sequence.append([6], [1])
    assert sequence.tree == Tree(3, (0, 1, 1))
    sequence.append([7, 8])
    assert sequence.tree == Tree(3, (0, 1, 1, 3, 4))
    sequence.append([9], [0])
    assert sequence.tree == Tree(3, (0, 1, 1, 3, 4, 0))
    assert sequence.tokens == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert sequence.committed_length == 3
    sequence.keep([1, 3, 4])
    assert sequence.tokens == [1, 2, 3, 4, 6, 7]
    assert sequence.tree is None
    assert sequence.committed_length == 3
    assert sequence.take_moves() == []
    # What was kept is a chain, on which another tree may grow.
    sequence.append([8], [2])
    assert sequence.tree == Tree(3, (0, 1, 2, 2))
    sequence.commit(3, [4, 6])
    assert sequence.tree is None
    assert sequence.tokens == [1, 2, 3, 4, 6]


def test_a_tree_that_is_a_chain_is_none() -> None:
    sequence = CachedSequence(PagePool(10), [1])
    sequence.append([2, 3], [0, 1])
    sequence.append([4], [2])
    assert sequence.tree is None
    sequence.keep([1, 2])
    assert sequence.tokens == [1, 2, 3]


@pytest.mark.parametrize("parents", [[0, 0], [1], [-1], [3]])
def test_parents_that_fit_nothing_are_refused(parents: list[int]) -> None:
    sequence = CachedSequence(PagePool(10), [1])
    with pytest.raises(ValueError, match="parent"):
        sequence.append([2], parents)
    assert sequence.tokens == [1]
    assert sequence.tree is None


@pytest.mark.parametrize("places", [[2], [1, 3], [3, 4], [0], [5], [4, 3]])
def test_what_is_no_path_cannot_be_kept(places: list[int]) -> None:
    sequence = CachedSequence(PagePool(10), [1])
    sequence.append([2, 3, 4, 5], [0, 1, 0, 1])
    with pytest.raises(ValueError, match="no path"):
        sequence.keep(places)


def cached_sequence(pool: PagePool, length: int, cached_length: int) -> CachedSequence:
    """With drafted tokens from place 14 on, of which some are cached."""
    sequence = CachedSequence(pool, list(range(14)))
    sequence.append(list(range(14, length)), [0, 0, 1, 2, 3, 4, 4][: length - 14])
    sequence.pages = pool.allocate(pages_for(cached_length))
    sequence.cached_length = cached_length
    return sequence


@pytest.mark.parametrize("cached_length", [3, 14, 15, 16, 17, 18, 20, 21])
def test_what_is_kept_is_cached_as_far_as_it_was(cached_length: int) -> None:
    pool = PagePool(10)
    pool.allocate(4)
    sequence = cached_sequence(pool, 21, cached_length)
    first, last = sequence.pages[0] * PAGE_SIZE, sequence.pages[-1] * PAGE_SIZE
    sequence.keep([2, 4, 7])
    assert sequence.tokens == [*range(14), 15, 17, 20]
    moves = [(first + 15, first + 14), (last + 1, first + 15), (last + 4, last)]
    count = sum(place <= cached_length for place in (16, 18, 21))
    assert sequence.cached_length == min(cached_length, 14) + count
    assert sequence.take_moves() == moves[:count]
    assert sequence.take_moves() == []
    assert len(sequence.pages) == pages_for(sequence.cached_length)


@pytest.mark.parametrize(
    ("parents", "emitted", "cached_length"),
    [
        ([0, 1, 1, 2], [11, 12, 13, 14], 12),  # the chain ends: what agrees by chance does not
        ([0, 1, 1, 2], [11, 13, 9], 11),
        ([0, 0, 1], [11, 12, 13, 14], 11),
        ([0, 0, 1], [12, 7], 10),
        ([0, 1, 2, 2], [11, 12, 13], 12),  # the last token stays pending
    ],
)
def test_a_commit_keeps_what_agrees_of_the_chain_that_the_tree_begins_with(
    parents: list[int], emitted: list[int], cached_length: int
) -> None:
    pool = PagePool(10)
    sequence = CachedSequence(pool, list(range(1, 11)))
    sequence.append(list(range(11, 11 + len(parents))), parents)
    sequence.pages, sequence.cached_length = pool.allocate(1), 10 + len(parents)
    sequence.commit(10, emitted)
    assert sequence.tree is None
    assert sequence.cached_length == cached_length
    assert sequence.tokens == [*range(1, 11), *emitted]


# The passes.


@pytest.mark.parametrize("name", FUSED_NAMES)
def test_fused_models_give_each_token_what_its_path_gives(name: str) -> None:
    random_rounds(Bench(name), 1)


@pytest.mark.parametrize("name", [*FUSED_NAMES[2:3], *GENERIC_NAMES])
def test_other_models_give_each_token_what_its_path_gives(name: str) -> None:
    random_rounds(Bench(name, model=runtime(name, fused=False)), 2)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", [*FUSED, *GENERIC])
def test_all_models_give_each_token_what_its_path_gives(name: str, seed: int) -> None:
    numbers = random.Random(seed)
    lengths = [numbers.randint(1, 60) for _ in range(5)]
    bench = Bench(name, pages=numbers.choice([30, 100]), rows=numbers.choice([12, 256]))
    random_rounds(bench, seed, lengths, keeps=lambda numbers: numbers.random() < 0.8)


@pytest.mark.parametrize("name", ["qwen3, windows and biases", "gemma2"])
def test_windows_count_positions(name: str) -> None:
    """Trees deeper than the window, with siblings between: places and positions differ."""
    bench = Bench(name)
    numbers = random.Random(3)
    parents = [0, 0, 0, 0]
    while max(depths(parents)) < WINDOW + 8:
        deepest = len(parents)
        parents += [deepest, *[deepest] * (numbers.random() < 0.3)]
    for length in (2, 15, 40):
        sequence = bench.open(random_tokens(numbers, length))
        committed = list(sequence.tokens)
        work = Round(sequence, random_tokens(numbers, len(parents)), parents, path(parents, 25))
        bench.run(work)
        bench.check(work, committed)
        committed = list(sequence.tokens)
        work = random_round(numbers, sequence)
        bench.run(work)
        bench.check(work, committed)


def test_a_tree_is_fed_in_as_many_passes_as_it_takes() -> None:
    for rows in (3, 7, 16):
        bench = Bench("qwen2, windows", rows=rows)
        works = random_rounds(bench, rows, num_rounds=4)
        assert any(work.begun and len(work.token_ids) > rows for work in works)


def test_trees_grow_between_passes_as_a_draft_grows_them() -> None:
    """Level by level; in the end it only commits."""

    class Growing(Round):
        """Its result: the logits after the committed tokens and after each drafted one."""

        levels: tuple[tuple[int, ...], ...] = ((0, 0, 0), (1, 1, 3), (4, 5, 5, 2), (7,))

        def start(self) -> None:
            self.base_length = len(self.sequence.tokens)
            self.grown: list[int] = []
            self.parents, self.num_logits, self.level = self.grown, 1, 0
            self.found: list[torch.Tensor] = []

        @classmethod
        def consume(cls, works: Sequence[Growing]) -> None:  # type: ignore[override]
            for work in works:
                work.found.append(work.collect())
                if work.level == len(cls.levels):
                    work.sequence.commit(work.base_length, work.emitted)
                    work.finish(torch.cat(work.found))
                    continue
                parents = cls.levels[work.level]
                begin = len(work.grown)
                work.grown += parents
                work.sequence.append(work.token_ids[begin : len(work.grown)], parents)
                work.num_logits = len(parents)
                work.level += 1

    count = sum(map(len, Growing.levels))
    bench = Bench("gemma2")
    numbers = random.Random(4)
    sequences = [bench.open(random_tokens(numbers, length)) for length in (9, 40, 14)]
    for kept in ([], [1], [1, 4]):
        befores = [list(sequence.tokens) for sequence in sequences]
        works = [
            Growing(sequence, random_tokens(numbers, count), [], kept, keeps=False)
            for sequence in sequences
        ]
        bench.run(*works)
        for work, committed in zip(works, befores, strict=True):
            bench.check(work, committed)
            # The first child of the root, at the first place, is all that is a chain.
            assert work.sequence.cached_length == len(committed) + min(1, len(kept))


def test_a_commit_without_keep_leaves_nothing_that_is_wrong() -> None:
    for seed in (5, 6):
        random_rounds(Bench(LLAMA), seed, keeps=lambda numbers: False, num_rounds=4)


def test_sessions_with_and_without_trees_share_a_call() -> None:
    numbers = random.Random(7)
    tree = Tree(12, (0, 0, 1, 2))
    pages = [[1], [2], [3]]
    segments = [
        Segment(random_tokens(numbers, 5), 11, pages[0], 5, tree),
        Segment(random_tokens(numbers, 5), 9, pages[1], 5),
        Segment(random_tokens(numbers, 5), 10, pages[2], 5, Tree(9, (0, 0, 0, 1, 1, 4))),
    ]
    batch = pack(segments, torch.device("cpu"))
    assert len(batch.groups) == 1
    assert batch.groups[0].branches is not None
    assert batch.positions.view(3, 5).tolist() == [
        [11, 12, 12, 13, 13],
        [9, 10, 11, 12, 13],
        [9, 9, 10, 10, 11],
    ]
    assert batch.slots.view(3, 5).tolist() == [
        list(range(27, 32)),
        list(range(41, 46)),
        list(range(58, 63)),
    ]
    mask = batch.groups[0].mask(None, 1, torch.float32)
    assert mask is not None
    seen = [[row.nonzero().flatten().tolist() for row in each[0] == 0] for each in mask]
    before = list(range(12))
    assert seen[0] == [before, [*before, 12], [*before, 13], [*before, 12, 14], [*before, 13, 15]]
    assert seen[1] == [list(range(end)) for end in range(10, 15)]
    before = list(range(9))
    assert seen[2] == [
        [*before, 10],
        [*before, 11],
        [*before, 9, 12],
        [*before, 9, 13],
        [*before, 9, 12, 14],
    ]


def test_rows_before_a_tree_see_what_is_before_them() -> None:
    """Also if nothing of the tree is fed yet, beside a sequence of which something is."""
    tree = Tree(12, (0, 0, 1))
    segments = [
        Segment([1, 2], 9, [1], 2, tree._replace(begin=20)),
        Segment([1, 2], 13, [2], 2, tree),
        Segment([1, 2], 11, [3], 2, tree),
    ]
    (group,) = pack(segments, torch.device("cpu")).groups
    mask = group.mask(None, 1, torch.float32)
    assert mask is not None
    seen = [[row.nonzero().flatten().tolist() for row in each[0] == 0] for each in mask]
    before = list(range(12))
    assert seen[0] == [list(range(10)), list(range(11))]
    assert seen[1] == [[*before, 13], [*before, 12, 14]]
    assert seen[2] == [before, [*before, 12]]


def test_products_in_bfloat16_see_the_same() -> None:
    """Many rows on the CPU take another path, which only this type takes."""
    generator = torch.Generator().manual_seed(1)
    parents = random_parents(random.Random(5), 40)
    assert not is_chain(parents)
    query = torch.randn(40, 4, 8, generator=generator)
    layer = torch.randn(6, PAGE_SIZE, 4, 8, generator=generator)
    segment = Segment([0] * 40, 20, [2, 5, 1, 3], 40, Tree(20, tuple(parents)))
    batch = pack([segment], torch.device("cpu"))
    for window in (None, 7):
        expected = attend(query, layer, batch, 0.3, window)
        found = attend(query.bfloat16(), layer.bfloat16(), batch, 0.3, window)
        assert torch.allclose(found.float(), expected, atol=0.05)
        plain = pack([segment._replace(tree=None)], torch.device("cpu"))
        assert not torch.allclose(found.float(), attend(query, layer, plain, 0.3, window), atol=0.5)


def test_without_trees_there_is_nothing_more_to_do() -> None:
    """Also where there are trees, as long as what is fed of them is a chain."""
    sequence = CachedSequence(PagePool(10), [1, 2, 3])
    sequence.append([4, 5, 6, 7], [0, 1, 1, 0])
    work = Round(sequence, [])
    assert [work.segment(count).tree is None for count in range(1, 8)] == [True] * 5 + [False] * 2
    batch = pack([Segment([1, 2], 5, [1], 1)], torch.device("cpu"))
    assert batch.groups[0].branches is None


def test_a_pass_says_how_large_it_was() -> None:
    bench = Bench(LLAMA)
    works = [Round(bench.open([1, 2, 3]), [4, 5, 6], [0, 0, 1]), Round(bench.open([7, 8]), [])]
    assert {(work.pass_rows, work.pass_sessions) for work in works} == {(0, 0)}
    bench.run(*works)
    assert {(work.pass_rows, work.pass_sessions) for work in works} == {(8, 2)}


# Whoever loses its pages.


def test_preemption_amid_a_tree() -> None:
    """Whenever it comes, all is fed again, and nothing of a tree gets into the prefix cache."""
    amid = 0
    for after in range(6):
        bench = Bench(LLAMA, rows=8)
        numbers = random.Random(after)
        sequence = bench.open(random_tokens(numbers, 33))
        bench.run(Prefill(sequence))
        parents = [0, 0, 1, 1, 2, 2, 3, 4, 5, 5, 0, 9, 9, 12, 12, 13, 13, 17, 8, 8, 8, 19, 22, 22]
        work = Round(sequence, random_tokens(numbers, len(parents)), parents, path(parents, 24))
        committed = list(sequence.tokens)
        bench.scheduler.add(work, lambda: None)
        for _ in range(after):
            if not work.done:
                bench.step()
        assert work.done == (sequence.tree is None) == (after > 3)
        bench.residents.preempt(sequence)
        bench.residents.check_integrity()
        while not work.done:
            bench.step()
        amid += work.losses
        assert work.error is None
        bench.check(work, committed)
    assert amid == 4


@pytest.mark.parametrize("seed", range(3))
def test_few_pages_for_many_trees(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(residents, "IDLE_SECONDS", 0.0)
    bench = Bench(LLAMA, pages=17, rows=24)
    works = random_rounds(bench, seed, (60, 41, 30, 60, 50), num_rounds=4)
    assert bench.residents.num_preemptions > 3
    assert any(work.losses for work in works)


def test_what_gets_into_the_prefix_cache_is_right() -> None:
    """Sessions end, others take over what they left: it is what their tokens give."""
    for seed in range(3):
        bench = Bench("qwen2, windows", pages=60, rows=40)
        numbers = random.Random(seed)
        random_rounds(bench, seed, (20, 31, 45), keeps=lambda numbers: numbers.random() < 0.7)
        for old in list(bench.residents.sequences):
            bench.scheduler.close(old)
            bench.residents.check_integrity()
            committed = [*old.tokens, 3]
            fresh = bench.open(committed)
            work = random_round(numbers, fresh)
            bench.run(work)
            assert fresh.reused_length >= (len(old.tokens) - 1) // PAGE_SIZE * PAGE_SIZE > 0
            bench.check(work, committed)
        pool, prefixes = bench.residents.pool, bench.residents.prefixes
        for each in list(bench.residents.sequences):
            bench.scheduler.close(each)
        assert pool.num_free + prefixes.num_pages == pool.num_pages


def test_moves_that_fail_leave_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(LLAMA)
    numbers = random.Random(8)
    tokens = random_tokens(numbers, 20)
    work = Round(bench.open(tokens), [1, 2, 3, 4], [0, 0, 2, 2], [2, 4])
    with monkeypatch.context() as patch:

        def fail(*_: object) -> None:
            raise torch.OutOfMemoryError("out of memory")

        patch.setattr(KVStore, "move", fail)
        with pytest.raises(AssertionError, match="out of memory"):
            bench.run(work)
    sequence = work.sequence
    assert sequence.cached_length == 0
    committed = list(sequence.tokens)
    work = random_round(numbers, sequence)
    bench.run(work)
    bench.check(work, committed)


# What has no trees, or has them elsewhere.


def test_deterministic_models_refuse_trees() -> None:
    model = runnable(random_model(config_of(FUSED[LLAMA])), VOCABULARY, deterministic=True)
    bench = Bench(LLAMA, model=model)
    branching = Round(bench.open([1, 2, 3]), [4, 5], [0, 0])
    plain = Round(bench.open([1, 2, 4]), [4, 5], [0, 1], [1])
    for work in (branching, plain):
        bench.scheduler.add(work, lambda: None)
    while not (branching.done and plain.done):
        bench.step()
    assert isinstance(branching.error, NotImplementedError)
    assert "deterministic" in str(branching.error)
    assert plain.error is None


def test_the_other_processes_of_a_team_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    """They get the trees and the moves: afterwards they have the same keys and values."""
    config = config_of(FUSED[LLAMA])
    leading, following = (CausalLM(random_model(config), VOCABULARY) for _ in range(2))
    commands: list[bytes] = []
    team = object.__new__(Team)
    team._ended = Future()
    team._ended.set_result(None)

    def send(objects: list[Any], **_: Any) -> None:
        commands.append(pickle.dumps(objects[0]))

    def receive(objects: list[Any], **_: Any) -> None:
        objects[0] = pickle.loads(commands.pop(0))

    monkeypatch.setattr(team, "_commands", None, raising=False)
    monkeypatch.setattr(torch.distributed, "broadcast_object_list", send)
    ours = LeadingLM(leading, team)
    random_rounds(Bench(LLAMA, model=ours), 9)
    names = [pickle.loads(command)[0] for command in commands]
    assert {"allocate", "clear", "forward", "move"} == set(names)
    monkeypatch.setattr(torch.distributed, "broadcast_object_list", receive)
    team.follow(following)
    assert not commands
    for pages in zip(ours._store.layers, following._store.layers, strict=True):
        assert torch.equal(*pages)


_RANK = """
import sys
from specdec.lm.loading import load
from specdec.lm.tensor_parallel import join, rank
from tests.test_tree_passes import LLAMA, Bench, random_rounds

team = join("cpu")
model = load(sys.argv[1], dtype="float32", team=team).model
if rank():
    team.follow(model)
else:
    random_rounds(Bench(LLAMA, model=model), 10)
    print("all rounds are right")
"""


@pytest.mark.slow
def test_a_model_that_is_divided_gives_each_token_what_its_path_gives(tmp_path: Path) -> None:
    original(LLAMA).save_pretrained(tmp_path)
    make_tokenizer(byte_tokens(VOCABULARY)).save_pretrained(tmp_path)
    script = tmp_path / "rank.py"
    script.write_text(_RANK)
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [sys.executable, "-m", *launcher, str(script), str(tmp_path)],
        env=environment(PYTHONPATH=str(Path(__file__).parents[1])),
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert "all rounds are right" in done.stdout, done.stderr[-3000:]


# Would these tests notice?


def causal(self: Branches, hidden: torch.Tensor, window: int | None) -> torch.Tensor:
    return hidden[..., : hidden.shape[-1] - self.distances.shape[-1]]


def every_key_of_the_tree(self: Branches, hidden: torch.Tensor, window: int | None) -> torch.Tensor:
    return RIGHT_HIDE(self._replace(distances=self.distances.clamp(min=0)), hidden, window)


def without_window(self: Branches, hidden: torch.Tensor, window: int | None) -> torch.Tensor:
    return RIGHT_HIDE(self, hidden, None)


RIGHT_HIDE = Branches.hide
BUGS: dict[str, tuple[str, type, str, Any]] = {
    "a plain causal mask": (LLAMA, Branches, "hide", causal),
    "siblings that are seen": (LLAMA, Branches, "hide", every_key_of_the_tree),
    "positions that are places": (
        LLAMA,
        Tree,
        "positions",
        lambda self, start, end: list(range(start, end)),
    ),
    "no moves": (LLAMA, KVStore, "move", lambda *_: None),
    "no window within trees": ("qwen3, windows and biases", Branches, "hide", without_window),
}


def check_rounds(name: str) -> None:
    random_rounds(Bench(name), 1)


@pytest.mark.parametrize("bug", BUGS)
def test_a_bug_would_be_noticed(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, owner, attribute, wrong = BUGS[bug]
    monkeypatch.setattr(owner, attribute, wrong)
    check = test_windows_count_positions if "window" in bug else check_rounds
    with pytest.raises(AssertionError, match="of logits up to"):
        check(name)
