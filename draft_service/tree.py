"""What a draft expects to come next, as a tree that is grown where it is most probable.

After EAGLE-2 (arXiv 2406.16858): the tree grows by levels; of each level only those tokens are
looked behind that would be proposed as things stand, and in the end the most probable tokens of all
are proposed. A token's probability is that of the way to it, so that every proposed token has its
ancestors proposed as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from draft_service.drafter import Draft
from specdec.v1 import common_pb2

MOST_ROWS = 16
"""Tokens that are looked behind in one step for one proposal: a step's cost grows with them."""


@dataclass(slots=True, eq=False)
class Node:
    """A token that may come, in its place."""

    token_id: int
    parent: Node | None
    """What comes before it; None for the root, which stands for the committed tokens."""
    depth: int
    """How many tokens lead to it, itself included."""
    probability: float
    """Estimated, that it stands with all those before it."""
    number: int
    """In the order in which nodes were thought of."""
    place: int | None = None
    """Among the drafted tokens of the model's sequence, counted from 1, if it was fed. 0 for the
    root."""
    children: list[Node] = field(default_factory=list)
    """What may follow it, the most probable first."""
    looked: bool = False
    """Whether the model was asked what may follow it."""

    @property
    def way(self) -> list[Node]:
        """The nodes from below the root to this one."""
        found = []
        node = self
        while node.parent is not None:
            found.append(node)
            node = node.parent
        return found[::-1]


class Tree:
    """The tree of one round."""

    def __init__(self, base_length: int, room: int | None = None) -> None:
        """
        Args:
            base_length: how many tokens are committed.
            room: how many tokens can be fed on top of them. None if any number can.
        """
        self.base_length = base_length
        self.room = room
        self.root = Node(token_id=-1, parent=None, depth=0, probability=1.0, number=0, place=0)
        self.num_fed = 0
        """How many tokens of it the model's sequence has."""
        self._count = 0

    def add(self, node: Node, token_ids: Sequence[int], probabilities: Sequence[float]) -> None:
        """Says what may follow a node.

        Args:
            node: one that nobody has looked behind yet.
            token_ids: distinct, the most probable first. Children that the node has already stay.
            probabilities: of each, given the node.
        """
        known = {child.token_id: child for child in node.children}
        node.children, node.looked = [], True
        for token_id, probability in zip(token_ids, probabilities, strict=True):
            reached = node.probability * min(probability, 1.0)
            child = known.pop(token_id, None)
            if child is None:
                child = self.plant(node, token_id, reached)
            child.probability = reached
            node.children.append(child)
        node.children += known.values()

    def adopt(self, root: Node, nodes: Sequence[Node]) -> list[Node]:
        """Copies a proposal out of an earlier tree, in which `root` was to be committed first.

        Nobody has looked behind the copies. Parents come first, here as there.
        """
        copies = {id(root): self.root}
        for node in nodes:
            parent = copies[id(node.parent)]
            copy = self.plant(parent, node.token_id, node.probability / root.probability)
            parent.children.append(copy)
            copies[id(node)] = copy
        return [copies[id(node)] for node in nodes]

    def fitting(self, nodes: Sequence[Node]) -> list[Node]:
        """Those of the nodes that the model's context has room for, or that it has already."""
        if self.room is None:
            return list(nodes)
        found, room = [], self.room - self.num_fed
        for node in nodes:
            room -= node.place is None
            if node.place is not None or room >= 0:
                found.append(node)
        return found

    def feed(self, nodes: Sequence[Node]) -> None:
        """Gives nodes their places in the model's sequence, where parents come first."""
        for node in nodes:
            self.num_fed += 1
            node.place = self.num_fed

    def plant(self, parent: Node, token_id: int, probability: float) -> Node:
        """A new node, which is not among its parent's children yet."""
        self._count += 1
        return Node(token_id, parent, parent.depth + 1, probability, self._count)


class Growth:
    """A proposal that grows below one node of a tree."""

    def __init__(
        self, root: Node, num_draft_tokens: int, topk: int, costs: common_pb2.DraftCosts
    ) -> None:
        """
        Args:
            root: what is committed when the proposal is made.
            num_draft_tokens: how many tokens it has at most.
            topk: how many of them may follow the same one.
            costs: by which it ends.
        """
        self.root = root
        self._limit = num_draft_tokens
        self._topk = topk
        self._costs = costs

    @property
    def nodes(self) -> list[Node]:
        """What would be proposed as things stand: parents come before their children."""
        root, least = self.root, self._costs.row * self.root.probability
        found = []
        waiting = [root]
        while waiting:
            children = waiting.pop().children[: self._topk]
            likely = [child for child in children if child.probability >= least]
            found += likely
            waiting += likely
        # Of equal ones the one that was thought of first, which is never the child.
        found.sort(key=lambda node: (-node.probability, node.number))
        return sorted(found[: self._limit], key=attrgetter("number"))

    def frontier(self) -> list[Node]:
        """What to look behind next; nothing if the proposal is as good as it gets."""
        if not self.root.looked:
            # No step gives more than a token.
            return [self.root] if self._costs.step < 1.0 else []
        nodes = self.nodes
        if len(nodes) == self._limit and self._topk == 1:
            return []  # What would follow could only be too much.
        ahead = [node for node in nodes if not node.looked]
        ahead.sort(key=lambda node: (-node.probability, node.number))
        ahead = ahead[:MOST_ROWS]
        reached = sum(node.probability for node in ahead) / self.root.probability
        return ahead if reached * self._coverage >= self._costs.step else []

    @property
    def _coverage(self) -> float:
        """How probable it is that what follows a node is among its children: as at the root."""
        children = self.root.children[: self._topk]
        return min(1.0, sum(child.probability for child in children) / self.root.probability)


def draft_of(root: Node, nodes: Sequence[Node]) -> Draft:
    """The proposal of these nodes; each comes after its parent, and the first ones after `root`."""
    places = {id(root): 0} | {id(node): place for place, node in enumerate(nodes, 1)}
    parents = [places[id(node.parent)] for node in nodes]
    return Draft(
        token_ids=[node.token_id for node in nodes],
        parents=[] if parents == list(range(len(nodes))) else parents,
        probabilities=[node.probability / root.probability for node in nodes],
    )


def guesses(nodes: Iterable[Node], count: int) -> list[Node]:
    """The likeliest outcomes of a proposal.

    An outcome is a node of the proposal, the last that stands, and a token after it that was not
    proposed there.

    Args:
        nodes: the root, and the nodes of the proposal.
        count: how many outcomes at most.
    """
    nodes = list(nodes)
    proposed = {id(node) for node in nodes}
    found = [child for node in nodes for child in node.children if id(child) not in proposed]
    found.sort(key=lambda node: (-node.probability, node.number))
    return found[:count]
