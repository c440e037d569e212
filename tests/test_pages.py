"""The pool of KV pages, and how many pages a service gets."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from specdec.lm import memory
from specdec.lm.architecture import ModelLoadError
from specdec.lm.pages import (
    PAGE_SIZE,
    ZERO_PAGE,
    IntegrityError,
    OutOfPages,
    PagePool,
    pages_for,
)
from specdec.lm.sequence import CachedSequence

SIZE = 12


def test_pages_for_so_many_tokens() -> None:
    counts = [pages_for(n) for n in (0, 1, PAGE_SIZE, PAGE_SIZE + 1, 10 * PAGE_SIZE)]
    assert counts == [0, 1, 1, 2, 10]


def test_a_fresh_pool_gives_its_lowest_pages_first() -> None:
    pool = PagePool(SIZE)
    assert pool.allocate(3) == [1, 2, 3]
    assert pool.allocate(2) == [4, 5]
    assert pool.num_free == SIZE - 5


def test_the_neighbour_of_the_last_page_is_preferred() -> None:
    pool = PagePool(SIZE)
    first, second = pool.allocate(2)
    assert pool.allocate(2, after=first) == [3, 4]  # its neighbour is taken
    pool.release([second])
    assert pool.allocate(2, after=first) == [second, 5]
    assert pool.allocate(2, after=8) == [9, 10]
    assert pool.allocate(1, after=SIZE) == [6]  # nothing lies behind the last page


def test_the_zero_page_is_never_given_away() -> None:
    pool = PagePool(SIZE)
    assert ZERO_PAGE not in pool.allocate(SIZE)
    pool.check_integrity([list(range(1, SIZE + 1))])


def test_too_many_pages_are_refused_and_none_is_taken() -> None:
    pool = PagePool(SIZE)
    held = pool.allocate(SIZE - 2)
    with pytest.raises(OutOfPages, match="3 pages wanted, 2 are free"):
        pool.allocate(3)
    assert pool.num_free == 2
    pool.check_integrity([held])


def test_a_page_is_free_when_its_last_holder_lets_go() -> None:
    pool = PagePool(SIZE)
    pages = pool.allocate(2)
    pool.retain(pages)
    assert [pool.references(page) for page in pages] == [2, 2]
    pool.release(pages)
    assert pool.num_free == SIZE - 2
    pool.release(pages)
    assert pool.num_free == SIZE
    assert pool.references(pages[0]) == 0


@pytest.mark.parametrize("name", ["retain", "release"])
def test_a_free_page_has_no_references_to_add_or_take(name: str) -> None:
    with pytest.raises(AssertionError):
        getattr(PagePool(SIZE), name)([3])


def test_pages_taken_out_of_turn_are_given_only_once() -> None:
    """Their entries stay in the heap, also over many returns."""
    pool = PagePool(SIZE)
    generator = random.Random(1)
    for _ in range(500):
        pages = pool.allocate(generator.randint(1, SIZE), after=generator.choice([None, 3, 7]))
        assert len(set(pages)) == len(pages)
        pool.check_integrity([pages])
        generator.shuffle(pages)
        pool.release(pages)
        pool.check_integrity([])
    assert sorted(pool.allocate(SIZE)) == list(range(1, SIZE + 1))


class PoolMachine(RuleBasedStateMachine):
    """Holders come, share and go at random; the books agree with them after every step."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(SIZE)
        self.holders: list[list[int]] = []

    @rule(count=st.integers(0, SIZE + 1), after=st.none() | st.integers(1, SIZE))
    def allocate(self, count: int, after: int | None) -> None:
        taken = {page for pages in self.holders for page in pages}
        if count > SIZE - len(taken):
            with pytest.raises(OutOfPages):
                self.pool.allocate(count, after)
            return
        pages = self.pool.allocate(count, after)
        assert len(pages) == count
        assert not taken & set(pages)
        if count and after is not None and after < SIZE and after + 1 not in taken:
            assert pages[0] == after + 1
        self.holders.append(pages)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def share_a_beginning(self, data: st.DataObject) -> None:
        pages = data.draw(st.sampled_from(self.holders))
        shared = pages[: data.draw(st.integers(0, len(pages)))]
        self.pool.retain(shared)
        self.holders.append(shared)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def give_back_an_end(self, data: st.DataObject) -> None:
        pages = data.draw(st.sampled_from(self.holders))
        keep = data.draw(st.integers(0, len(pages)))
        self.pool.release(pages[keep:])
        del pages[keep:]

    @invariant()
    def the_books_are_right(self) -> None:
        self.pool.check_integrity(self.holders)
        held = {page for pages in self.holders for page in pages}
        assert self.pool.num_free == SIZE - len(held)


TestPool = PoolMachine.TestCase
TestPool.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None, derandomize=True
)


def leak(pool: PagePool, holders: list[list[int]]) -> None:
    holders[0].pop()


def hold_twice(pool: PagePool, holders: list[list[int]]) -> None:
    pool.retain(holders[0][:1])
    holders[0].append(holders[0][0])


def forget_to_retain(pool: PagePool, holders: list[list[int]]) -> None:
    holders.append(holders[0][:1])


def hold_a_free_page(pool: PagePool, holders: list[list[int]]) -> None:
    holders[0].append(SIZE)


def hold_the_zero_page(pool: PagePool, holders: list[list[int]]) -> None:
    holders[0].append(ZERO_PAGE)


def hold_a_page_that_is_not_there(pool: PagePool, holders: list[list[int]]) -> None:
    holders[0].append(SIZE + 1)


def miscount(pool: PagePool, holders: list[list[int]]) -> None:
    pool._references[holders[0][0]] += 1


def list_a_held_page_as_free(pool: PagePool, holders: list[list[int]]) -> None:
    pool._is_free[holders[0][0]] = True


def list_a_free_page_as_held(pool: PagePool, holders: list[list[int]]) -> None:
    pool._is_free[SIZE] = False


def free_the_zero_page(pool: PagePool, holders: list[list[int]]) -> None:
    pool._is_free[ZERO_PAGE] = True


def miscount_the_free(pool: PagePool, holders: list[list[int]]) -> None:
    pool.num_free -= 1


def lose_a_free_page(pool: PagePool, holders: list[list[int]]) -> None:
    pool._heap.remove(SIZE)


@pytest.mark.parametrize(
    "corrupt",
    [
        leak,
        hold_twice,
        forget_to_retain,
        hold_a_free_page,
        hold_the_zero_page,
        hold_a_page_that_is_not_there,
        miscount,
        list_a_held_page_as_free,
        list_a_free_page_as_held,
        free_the_zero_page,
        miscount_the_free,
        lose_a_free_page,
    ],
    ids=lambda function: function.__name__,
)
def test_corrupt_books_are_found(corrupt: Any) -> None:
    pool = PagePool(SIZE)
    holders = [pool.allocate(3), pool.allocate(2)]
    pool.check_integrity(holders)
    corrupt(pool, holders)
    with pytest.raises(IntegrityError):
        pool.check_integrity(holders)


# What a session holds of them.


@pytest.mark.parametrize(
    ("drafted", "committed", "cached"),
    [
        ([1, 2, 3], [1, 2, 3, 4], 43),  # all stand; the bonus is pending
        ([1, 2, 3], [1, 9], 41),
        ([1, 2, 3], [9], 40),
        ([1, 2, 3], [1, 2, 3], 42),  # the last one stays pending, although it is known
        ([1, 2, 3], [9, 2, 3], 40),
        ([], [5, 6, 7], 40),
    ],
)
def test_a_commit_keeps_what_agrees(drafted: list[int], committed: list[int], cached: int) -> None:
    pool = PagePool(SIZE)
    sequence = CachedSequence(pool, range(40))
    sequence.append(drafted)
    sequence.pages = pool.allocate(3)
    sequence.cached_length = len(sequence.tokens)
    sequence.commit(40, committed)
    assert sequence.tokens == [*range(40), *committed]
    assert sequence.cached_length == sequence.stable_length == cached
    assert len(sequence.pages) == pages_for(cached)
    pool.check_integrity([sequence.pages])


def test_a_rollback_gives_back_whole_pages_only() -> None:
    pool = PagePool(SIZE)
    sequence = CachedSequence(pool, range(50))
    sequence.pages = pool.allocate(4)
    sequence.cached_length = 49
    for length, count in ((49, 4), (48, 3), (33, 3), (32, 2), (1, 1), (0, 0)):
        sequence.truncate(length)
        sequence.truncate(50)  # more than it has
        assert sequence.cached_length == length
        assert len(sequence.pages) == count
        pool.check_integrity([sequence.pages])


def test_pages_are_replaced_by_others_that_hold_the_same() -> None:
    pool = PagePool(SIZE)
    sequence = CachedSequence(pool, range(50))
    sequence.pages = pool.allocate(4)
    other = pool.allocate(2)
    sequence.replace(other)
    assert sequence.pages == [*other, 3, 4]
    pool.check_integrity([sequence.pages, other])
    sequence.replace(sequence.pages[:1])
    pool.check_integrity([sequence.pages, other])


# How much memory the pool gets.


def model(bytes_per_page: int = 1000, context: int = 100 * PAGE_SIZE) -> Any:
    """As much of a loaded model as `pages_within` looks at."""
    inner = SimpleNamespace(bytes_per_page=bytes_per_page, device=torch.device("cpu"))
    return SimpleNamespace(model=inner, max_context_length=context)


def test_a_budget_is_used_up_but_not_exceeded() -> None:
    assert memory.pages_within(9999, model()) == 9
    assert memory.pages_within(1000, model()) == 1
    # What is asked for in bytes is not limited to what 64 sessions can use.
    assert memory.pages_within(10**10, model()) == 10**7


@pytest.mark.parametrize("budget", [0, 999])
def test_a_budget_below_one_page_is_refused(budget: int) -> None:
    with pytest.raises(ModelLoadError, match=r"one page of 1000 bytes.*--kv-memory"):
        memory.pages_within(budget, model())


def test_auto_takes_a_quarter_of_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_available_memory", lambda: 4_000_000)
    assert memory.pages_within("auto", model()) == 1000


def test_auto_takes_at_most_two_gibibytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_available_memory", lambda: 2**50)
    assert memory.pages_within("auto", model(2**20, context=2**20)) == 2048


def test_auto_takes_no_more_than_sixty_four_sessions_can_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory, "_available_memory", lambda: 2**50)
    assert memory.pages_within("auto", model(1, context=PAGE_SIZE + 1)) == 64 * 2


def test_auto_without_any_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_available_memory", lambda: 3999)
    with pytest.raises(ModelLoadError):
        memory.pages_within("auto", model())


def test_auto_takes_four_fifths_of_a_gpus_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = model()
    loaded.model.device = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1_000_000, 2_000_000))
    assert memory.pages_within("auto", loaded) == 800


def test_the_kernel_tells_what_is_free() -> None:
    assert 2**20 < memory._available_memory() < 2**50
