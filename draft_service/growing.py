"""Grows trees with a language model: proposals, and those for verdicts that are not there yet."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence

import torch

from draft_service.candidates import Candidates, candidates, sharpness
from draft_service.tree import Growth, Node, Tree, guesses
from specdec.lm.processing import is_greedy, join, process
from specdec.lm.randomness import Stream, key, seed_tensor
from specdec.lm.runtime import Session
from specdec.lm.work import NotNumbers, Work, failing

_ROWS_AHEAD = 32
"""Tokens that are looked behind in one step for verdicts that may never be given."""


class Growing(Work):
    """Looks behind nodes of a session's tree, a pass for each level, until there is no more to see.

    For sessions that need no distributions: what is proposed there may depend on how probable it
    is.
    """

    def __init__(self, session: Session, tree: Tree, width: int, committed: list[int]) -> None:
        """
        Args:
            session: at the draft.
            tree: of the round; its nodes are marked as they are fed.
            width: how many tokens are thought of after each.
            committed: what was committed since the last work, if anything.
        """
        super().__init__(session.sequence)
        self.tree = tree
        self._committed = committed
        self._history = session.history
        self._sampling = session.opening.sampling
        self._width = width
        self._looked: list[Node] = []
        """The nodes whose logits the next passes yield."""

    @abstractmethod
    def frontier(self) -> list[Node]:
        """What to look behind next; nothing if the work is done. Parents come first."""

    @abstractmethod
    def outcome(self) -> object:
        """The result, as things stand."""

    def start(self) -> None:
        if not self.tree.root.looked:
            # Also if nothing was committed: what was fed of an earlier tree has to go.
            base_length = self.tree.base_length - len(self._committed)
            self.sequence.commit(base_length, self._committed)
            self._history.commit(self._committed)
        self.go_on()

    def go_on(self) -> None:
        """Feeds the next nodes, or ends."""
        self._looked = self.tree.fitting(self.frontier())
        if not self._looked:
            self.finish(self.outcome())
            return
        fresh = [node for node in self._looked if node.place is None]
        self.tree.feed(fresh)
        parents = [_place(node.parent) for node in fresh]
        self.sequence.append([node.token_id for node in fresh], parents)
        self.num_logits = len(self._looked)

    @classmethod
    def consume(cls, works: Sequence[Growing]) -> None:
        """Looks at the logits of many sessions together."""
        greedy: list[Growing] = []
        noisy: list[Growing] = []
        for work in works:
            (greedy if is_greedy(work._sampling) else noisy).append(work)
        for members in (greedy, noisy):
            if members:
                cls._look(members)

    @classmethod
    def _look(cls, works: Sequence[Growing]) -> None:
        """All greedy, or none."""
        logits = [work.collect() for work in works]
        if all(work._history.is_tempered for work in works):
            scores = torch.cat(logits).float()
            if not is_greedy(works[0]._sampling):
                heats = [[work._sampling.temperature] for work in works for _ in work._looked]
                # Differences to the best: however small the temperature, none overflows there.
                scores = scores - scores.amax(dim=-1, keepdim=True)
                scores = scores / scores.new_tensor(heats, dtype=torch.float64)
        else:
            rows = join([work._history.rows_after(work._ways) for work in works])
            scores = process(torch.cat(logits), rows)
        keys = None
        if not is_greedy(works[0]._sampling):
            keys = torch.cat([work._keys(scores.device) for work in works])
        sharp = [[sharpness(w._sampling.temperature)] for w in works for _ in w._looked]
        found = candidates(scores, max(w._width for w in works), scores.new_tensor(sharp), keys)
        for work in works:
            mine, found = found[: len(work._looked)], found[len(work._looked) :]
            with failing(work):
                work._learn(mine)
                work.go_on()

    def _learn(self, found: Sequence[Candidates | None]) -> None:
        for node, each in zip(self._looked, found, strict=True):
            if each is None:
                raise NotNumbers("the draft's logits are not finite numbers")
            token_ids, probabilities = each
            self.tree.add(node, token_ids[: self._width], probabilities[: self._width])

    @property
    def _ways(self) -> list[list[int]]:
        """The tokens that lead to each of the nodes that are looked behind."""
        return [[each.token_id for each in node.way] for node in self._looked]

    def _keys(self, device: torch.device) -> torch.Tensor:
        """int64, one for each of the nodes: of the noise where the next token goes."""
        positions = [self.tree.base_length + node.depth for node in self._looked]
        seed = seed_tensor(self._sampling.seed, device)
        return key(seed, Stream.COUPLED, torch.tensor(positions, device=device))


class GrowingProposal(Growing):
    """Grows the proposal of the present round. Its result is its nodes, in the order of a draft."""

    def __init__(
        self, session: Session, tree: Tree, width: int, committed: list[int], growth: Growth
    ) -> None:
        """As of `Growing`. `growth` is that of the proposal."""
        super().__init__(session, tree, width, committed)
        self._growth = growth

    def frontier(self) -> list[Node]:
        return self._growth.frontier()

    def outcome(self) -> list[Node]:
        return self._growth.nodes


class GrowingAhead(Growing):
    """Grows the proposals that follow the likeliest verdicts on one that is being verified.

    Its result is a list of `Growth`, whose roots are what the verdicts commit last.
    """

    def __init__(
        self,
        session: Session,
        tree: Tree,
        width: int,
        committed: list[int],
        proposed: Sequence[Node],
        count: int,
        grow: Callable[[Node], Growth],
    ) -> None:
        """As of `Growing`, and:

        Args:
            proposed: the nodes that are being verified.
            count: for how many verdicts.
            grow: begins a proposal after a node.
        """
        super().__init__(session, tree, width, committed)
        self._proposed = proposed
        self._count = count
        self._grow = grow
        self._growths: list[Growth] | None = None
        self.hurried = False
        """Whether it was ended before its time."""

    def hurry(self) -> None:
        """Ends it as soon as can be, with what there is. May be called from any thread."""
        self.hurried = True

    def frontier(self) -> list[Node]:
        if self.hurried:
            return []
        nodes = [self.tree.root, *self._proposed]
        unseen = [node for node in nodes if not node.looked]
        if unseen:
            return unseen
        if self._growths is None:
            self._growths = [self._grow(guess) for guess in guesses(nodes, self._count)]
        # The likeliest first: if it is to hurry, these are there.
        found: list[Node] = []
        for growth in self._growths:
            if len(found) < _ROWS_AHEAD:
                found += growth.frontier()
        return found

    def outcome(self) -> list[Growth]:
        return [growth for growth in self._growths or () if growth.nodes]


def _place(node: Node | None) -> int:
    assert node is not None
    assert node.place is not None
    return node.place
