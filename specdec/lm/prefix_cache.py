"""The prefix cache: committed prefixes in a radix tree over pages, shared by all sessions.

The idea is RadixAttention's (Zheng et al., arXiv 2312.07104). An edge is a whole page of tokens, so
that a page is shared as it is and a shared page is never written to.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

from specdec.lm.pages import PAGE_SIZE, PagePool


class _Node:
    __slots__ = ("children", "key", "page", "parent", "salt")

    def __init__(
        self, parent: _Node | None, key: tuple[int, ...], page: int, salt: str = ""
    ) -> None:
        """`salt`: of a root; a root has neither parent nor page."""
        self.parent = parent
        self.salt = salt
        self.key = key
        self.page = page
        self.children: dict[tuple[int, ...], _Node] = {}


class PrefixCache:
    """Holds one reference to each page in it."""

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._roots: dict[str, _Node] = {}
        # Least recently used first; a node is always used after its children.
        self._nodes: OrderedDict[_Node, None] = OrderedDict()

    @property
    def num_pages(self) -> int:
        """How many pages it holds."""
        return len(self._nodes)

    @property
    def pages(self) -> list[int]:
        """The pages that it holds."""
        return [node.page for node in self._nodes]

    def match(self, tokens: Sequence[int], salt: str) -> list[int]:
        """The pages of the longest prefix known under this salt, whole pages only.

        The caller gets a reference to each of them.
        """
        path = list(self._walk(tokens, salt))
        self._touch(path)
        pages = [node.page for node in path]
        self._pool.retain(pages)
        return pages

    def peek(self, tokens: Sequence[int], salt: str) -> list[int]:
        """The same pages, without references to them and without counting as a use."""
        return [node.page for node in self._walk(tokens, salt)]

    def insert(self, tokens: Sequence[int], pages: Sequence[int], salt: str) -> list[int]:
        """Adds a prefix. Of what is known already, the pages that it has are kept.

        Args:
            tokens: the prefix; what does not fill a page is left out.
            pages: that hold its keys and values.
            salt: sequences under different salts share nothing.

        Returns:
            The pages that hold the prefix in the cache, without references to them.
        """
        if len(tokens) < PAGE_SIZE:
            return []
        node = self._roots.setdefault(salt, _Node(None, (), 0, salt))
        path = []
        for index in range(len(tokens) // PAGE_SIZE):
            key = tuple(tokens[index * PAGE_SIZE : (index + 1) * PAGE_SIZE])
            child = node.children.get(key)
            if child is None:
                child = node.children[key] = _Node(node, key, pages[index])
                self._pool.retain([child.page])
            path.append(child)
            node = child
        self._touch(path)
        return [node.page for node in path]

    def evict(self, count: int) -> int:
        """Frees up to `count` pages that nobody else holds, the least recently used first.

        Returns:
            How many it freed.
        """
        doomed: dict[_Node, None] = {}
        # A parent comes after its children, so that one pass finds chains from their ends.
        for node in self._nodes:
            if len(doomed) == count:
                break
            if self._pool.references(node.page) == 1 and doomed.keys() >= set(
                node.children.values()
            ):
                doomed[node] = None
        for node in doomed:
            self._remove(node)
        return len(doomed)

    def forget(self, tokens: Sequence[int], salt: str) -> None:
        """Removes whatever begins with the first page of these tokens. Who holds it keeps it."""
        root = self._roots.get(salt)
        first = root and root.children.get(tuple(tokens[:PAGE_SIZE]))
        doomed = [first] if first else []
        for node in doomed:
            doomed.extend(node.children.values())
        for node in reversed(doomed):
            self._remove(node)

    def _walk(self, tokens: Sequence[int], salt: str) -> Iterator[_Node]:
        node = self._roots.get(salt)
        for end in range(PAGE_SIZE, len(tokens) + 1, PAGE_SIZE):
            node = node and node.children.get(tuple(tokens[end - PAGE_SIZE : end]))
            if node is None:
                return
            yield node

    def _touch(self, path: list[_Node]) -> None:
        for node in reversed(path):
            self._nodes[node] = None
            self._nodes.move_to_end(node)

    def _remove(self, node: _Node) -> None:
        assert node.parent is not None
        del node.parent.children[node.key]
        del self._nodes[node]
        self._pool.release([node.page])
        root = node.parent
        if root.parent is None and not root.children:
            del self._roots[root.salt]
