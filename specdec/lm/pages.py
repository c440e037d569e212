"""The pool of KV pages: who holds which page. It knows no tensors."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Sequence

PAGE_SIZE = 16
"""Tokens in a page."""
ZERO_PAGE = 0
"""The page that nobody may hold. Its keys and values stay 0: it pads what attention gathers."""


def pages_for(num_tokens: int) -> int:
    """How many pages so many tokens take."""
    return -(-num_tokens // PAGE_SIZE)


class OutOfPages(Exception):
    """The pool has fewer free pages than were asked for."""


class IntegrityError(AssertionError):
    """The pool's books do not agree with those of the holders."""


class PagePool:
    """Reference-counted pages, numbered from 1 to `num_pages`."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._references = [0] * (num_pages + 1)
        self._is_free = [False] + [True] * num_pages
        # Lowest first, so that a pool that is never full touches little memory. A page that was
        # taken out of turn stays in the heap until it comes up.
        self._heap = list(range(1, num_pages + 1))
        self.num_free = num_pages

    def allocate(self, count: int, after: int | None = None) -> list[int]:
        """Takes free pages, each with one reference.

        Args:
            count: how many.
            after: the page that they continue. Neighbours are preferred, because attention reads
                adjacent pages without a copy.

        Raises:
            OutOfPages: there are not as many; none was taken.
        """
        if count > self.num_free:
            raise OutOfPages(f"{count} pages wanted, {self.num_free} are free")
        pages = []
        for _ in range(count):
            page = 0 if after is None else after + 1
            if page > self.num_pages or not self._is_free[page]:
                page = heapq.heappop(self._heap)
                while not self._is_free[page]:
                    page = heapq.heappop(self._heap)
            self._is_free[page] = False
            self._references[page] = 1
            pages.append(page)
            after = page
        self.num_free -= count
        return pages

    def retain(self, pages: Iterable[int]) -> None:
        """Adds a reference to each of some pages that are held."""
        for page in pages:
            assert self._references[page] > 0
            self._references[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Takes a reference from each; a page without references is free again."""
        for page in pages:
            assert self._references[page] > 0
            self._references[page] -= 1
            if self._references[page] == 0:
                self._is_free[page] = True
                heapq.heappush(self._heap, page)
                self.num_free += 1
        if len(self._heap) > 4 * self.num_pages:
            self._heap = [page for page, free in enumerate(self._is_free) if free]

    def references(self, page: int) -> int:
        """How many hold this page."""
        return self._references[page]

    def check_integrity(self, holders: Iterable[Sequence[int]]) -> None:
        """Compares the books with the page lists of all who hold pages.

        Raises:
            IntegrityError: a page is leaked, lost, held twice by one holder, or counted wrongly.
        """
        held: Counter[int] = Counter()
        for pages in holders:
            if len(set(pages)) != len(pages):
                raise IntegrityError(f"one holder has a page twice: {pages}")
            held.update(pages)
        for page in range(self.num_pages + 1):
            if self._references[page] != held[page]:
                raise IntegrityError(
                    f"page {page} has {self._references[page]} references and {held[page]} holders"
                )
            if self._is_free[page] != (page != ZERO_PAGE and held[page] == 0):
                raise IntegrityError(f"page {page} with {held[page]} holders is in the wrong list")
        if self.num_free != sum(self._is_free) or self.num_free + len(held) != self.num_pages:
            raise IntegrityError(
                f"{self.num_free} free and {len(held)} held pages of {self.num_pages}"
            )
        if not {page for page, free in enumerate(self._is_free) if free} <= set(self._heap):
            raise IntegrityError("a free page cannot be found")
