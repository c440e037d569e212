"""The prefix cache against an obvious model of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from specdec.lm.pages import PAGE_SIZE, PagePool
from specdec.lm.prefix_cache import PrefixCache
from specdec.lm.sequence import CachedSequence

SIZE = 24


def blocks(*letters: int, more: int = 0) -> list[int]:
    """Tokens that fill one page for each letter, and `more` tokens after them."""
    return [letter for letter in letters for _ in range(PAGE_SIZE)] + [9] * more


def cached(cache: PrefixCache, pool: PagePool, tokens: list[int], salt: str = "") -> list[int]:
    """Puts tokens into the cache as a session that ends does. Returns their pages."""
    pages = pool.allocate(-(-len(tokens) // PAGE_SIZE))
    cache.insert(tokens, pages, salt)
    pool.release(pages)
    return pages


def made() -> tuple[PagePool, PrefixCache]:
    pool = PagePool(SIZE)
    return pool, PrefixCache(pool)


def test_the_longest_known_prefix_is_found_in_whole_pages() -> None:
    pool, cache = made()
    pages = cached(cache, pool, blocks(1, 2, 3, more=5))
    assert cache.num_pages == 3  # the part of a page is not kept
    for tokens, length in (
        (blocks(1, 2, 3, 4), 3),
        (blocks(1, 2, 3), 3),
        (blocks(1, 2, 3)[:-1], 2),
        (blocks(1, 2, 4), 2),
        (blocks(1, more=PAGE_SIZE - 1), 1),
        (blocks(2, 3), 0),
        ([], 0),
    ):
        assert cache.peek(tokens, "") == pages[:length]
        found = cache.match(tokens, "")
        assert found == pages[:length]
        pool.check_integrity([cache.pages, found])
        pool.release(found)
    pool.check_integrity([cache.pages])


def test_what_is_known_keeps_its_pages() -> None:
    pool, cache = made()
    first = cached(cache, pool, blocks(1, 2))
    second = cached(cache, pool, blocks(1, 2, 3))
    assert cache.peek(blocks(1, 2, 3), "") == [*first, second[2]]
    assert pool.num_free == SIZE - 3
    pool.check_integrity([cache.pages])


def test_salts_share_nothing() -> None:
    pool, cache = made()
    pages = {salt: cached(cache, pool, blocks(1, 2), salt) for salt in ("", "a", "b")}
    assert len({page for each in pages.values() for page in each}) == 6
    for salt, each in pages.items():
        assert cache.peek(blocks(1, 2), salt) == each
    assert cache.peek(blocks(1, 2), "c") == []


def test_a_peek_is_no_use() -> None:
    pool, cache = made()
    cached(cache, pool, blocks(1))
    cached(cache, pool, blocks(2))
    cache.peek(blocks(1), "")
    cache.evict(1)
    assert cache.peek(blocks(1), "") == []
    assert len(cache.peek(blocks(2), "")) == 1


def test_the_least_recently_used_goes_first_and_ends_before_beginnings() -> None:
    pool, cache = made()
    for tokens in (blocks(1, 2), blocks(1, 3), blocks(4)):
        cached(cache, pool, tokens)
    pool.release(cache.match(blocks(1, 2), ""))
    order = []
    while cache.evict(1):
        left = (blocks(1), blocks(1, 2), blocks(1, 3), blocks(4))
        order.append([len(cache.peek(tokens, "")) for tokens in left])
    # First 1→3, whose last use is the oldest; then 4; then 1→2 from its end.
    assert order == [[1, 2, 1, 1], [1, 2, 1, 0], [1, 1, 1, 0], [0, 0, 0, 0]]
    assert pool.num_free == SIZE
    pool.check_integrity([])


def test_pages_that_a_session_holds_are_never_evicted() -> None:
    pool, cache = made()
    pages = cached(cache, pool, blocks(1, 2, 3))
    held = cache.match(blocks(1, 2), "")
    assert cache.evict(SIZE) == 1
    assert set(cache.pages) == set(held) == set(pages[:2])
    pool.check_integrity([cache.pages, held])
    pool.release(held)
    assert cache.evict(SIZE) == 2
    assert pool.num_free == SIZE


def test_no_more_is_evicted_than_asked_for() -> None:
    pool, cache = made()
    for letter in range(6):
        cached(cache, pool, blocks(letter))
    assert cache.evict(0) == 0
    assert cache.evict(4) == 4
    assert cache.num_pages == 2
    assert cache.evict(4) == 2


def test_an_empty_salt_leaves_nothing_behind() -> None:
    """Clients choose the salts: what they leave must not grow without bound."""
    pool, cache = made()
    for number in range(200):
        cache.insert(blocks(1)[:-1], [], f"short {number}")
        cached(cache, pool, blocks(1), f"long {number}")
        cache.evict(SIZE)
    assert cache._roots == {}
    assert len(cache._nodes) == 0


@dataclass
class Reference:
    """A dict from (salt, whole pages of tokens) to the page that holds the last of them."""

    pages: dict[tuple[str, tuple[int, ...]], int] = field(default_factory=dict)
    used: dict[tuple[str, tuple[int, ...]], int] = field(default_factory=dict)
    clock: int = 0

    def prefixes(self, tokens: list[int], salt: str) -> list[tuple[str, tuple[int, ...]]]:
        ends = range(PAGE_SIZE, len(tokens) + 1, PAGE_SIZE)
        return [(salt, tuple(tokens[:end])) for end in ends]

    def known(self, tokens: list[int], salt: str) -> list[int]:
        found = []
        for prefix in self.prefixes(tokens, salt):
            if prefix not in self.pages:
                break
            found.append(self.pages[prefix])
        return found

    def use(self, prefixes: list[tuple[str, tuple[int, ...]]]) -> None:
        self.clock += 1
        for prefix in prefixes:
            self.used[prefix] = self.clock

    def insert(self, tokens: list[int], pages: list[int], salt: str) -> None:
        prefixes = self.prefixes(tokens, salt)
        for prefix, page in zip(prefixes, pages, strict=False):
            self.pages.setdefault(prefix, page)
        self.use(prefixes)

    def evictable(self, held: set[int]) -> list[tuple[str, tuple[int, ...]]]:
        """Leaves that nobody holds."""
        parents = {(salt, tokens[:-PAGE_SIZE]) for salt, tokens in self.pages}
        return [p for p, page in self.pages.items() if p not in parents and page not in held]


salts = st.sampled_from(["", "a"])
# Three letters and four pages: prefixes meet often.
texts = st.builds(
    lambda letters, more: blocks(*letters, more=more),
    st.lists(st.integers(1, 3), max_size=4),
    st.integers(0, PAGE_SIZE - 1),
)


class CacheMachine(RuleBasedStateMachine):
    """Sessions match, feed, publish and end; the cache does what the reference does."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(SIZE)
        self.cache = PrefixCache(self.pool)
        self.reference = Reference()
        self.sessions: list[CachedSequence] = []

    @rule(tokens=texts, salt=salts)
    def open(self, tokens: list[int], salt: str) -> None:
        known = self.reference.known(tokens, salt)
        assert self.cache.peek(tokens, salt) == known
        sequence = CachedSequence(self.pool, tokens, salt=salt)
        sequence.adopt(self.cache.match(tokens, salt))
        assert sequence.pages == known
        assert sequence.cached_length == len(known) * PAGE_SIZE
        self.reference.use(self.reference.prefixes(tokens, salt)[: len(known)])
        needed = -(-len(tokens) // PAGE_SIZE) - len(known)
        if needed > self.pool.num_free:
            sequence.truncate(0)
            return
        sequence.pages += self.pool.allocate(needed)
        sequence.cached_length = len(tokens)
        self.sessions.append(sequence)

    @precondition(lambda self: self.sessions)
    @rule(data=st.data(), close=st.booleans())
    def publish(self, data: st.DataObject, close: bool) -> None:
        sequence = data.draw(st.sampled_from(self.sessions))
        self.cache.insert(sequence.tokens, sequence.pages, sequence.salt)
        self.reference.insert(sequence.tokens, sequence.pages, sequence.salt)
        if close:
            sequence.truncate(0)
            self.sessions.remove(sequence)

    @rule(count=st.integers(0, 6))
    def evict(self, count: int) -> None:
        """The reference says which leaves may go; of these the oldest must go, one by one."""
        held = {page for sequence in self.sessions for page in sequence.pages}
        freed = 0
        while freed < count:
            leaves = self.reference.evictable(held)
            before = set(self.cache.pages)
            assert self.cache.evict(1) == bool(leaves)
            if not leaves:
                break
            (gone,) = before - set(self.cache.pages)
            oldest = min(self.reference.used[leaf] for leaf in leaves)
            (leaf,) = [leaf for leaf in leaves if self.reference.pages[leaf] == gone]
            assert self.reference.used[leaf] == oldest
            del self.reference.pages[leaf], self.reference.used[leaf]
            freed += 1

    @rule(count=st.integers(2, 6))
    def evict_at_once(self, count: int) -> None:
        """As many at once as one by one, and only what nobody holds."""
        held = {page for sequence in self.sessions for page in sequence.pages}
        before = set(self.cache.pages)
        freed = self.cache.evict(count)
        gone = before - set(self.cache.pages)
        assert len(gone) == freed <= count
        assert not gone & held
        if freed < count:
            survivors = self.cache.pages
            assert all(self.pool.references(page) > 1 for page in self._leaves(survivors))
        for prefix in [p for p, page in self.reference.pages.items() if page in gone]:
            del self.reference.pages[prefix], self.reference.used[prefix]
        parents = {(salt, tokens[:-PAGE_SIZE]) for salt, tokens in self.reference.pages}
        known = {*self.reference.pages, ("", ()), ("a", ())}
        assert parents <= known, "a page was evicted before what continues it"

    def _leaves(self, pages: list[int]) -> list[int]:
        parents = {(salt, tokens[:-PAGE_SIZE]) for salt, tokens in self.reference.pages}
        return [
            page
            for prefix, page in self.reference.pages.items()
            if page in pages and prefix not in parents
        ]

    @invariant()
    def the_books_are_right(self) -> None:
        self.pool.check_integrity([*(s.pages for s in self.sessions), self.cache.pages])
        assert sorted(self.cache.pages) == sorted(self.reference.pages.values())
        assert self.cache.num_pages == len(self.reference.pages)

    def teardown(self) -> None:
        for sequence in self.sessions:
            sequence.truncate(0)
        self.cache.evict(SIZE)
        assert self.pool.num_free == SIZE
        assert self.cache._roots == {}


TestCache = CacheMachine.TestCase
TestCache.settings = settings(
    max_examples=80, stateful_step_count=30, deadline=None, derandomize=True
)
