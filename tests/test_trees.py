"""Trees of drafted tokens, without a model: what is proposed, and what of it stands."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draft_service.candidates import _LIKELY_WITH_NOISE, candidates, sharpness
from draft_service.drafter import Draft
from draft_service.tree import MOST_ROWS, Growth, Node, Tree, draft_of, guesses
from specdec import trees
from specdec.lm.coupling import coupled_choice
from specdec.lm.randomness import Stream, gumbel, key, seed_tensor
from specdec.v1 import common_pb2
from verifier_service import acceptance

FREE = common_pb2.DraftCosts()
MANY = settings(max_examples=200, derandomize=True, deadline=None, database=None)


@st.composite
def parent_lists(draw: st.DrawFn, most: int = 12) -> list[int]:
    return [draw(st.integers(0, place)) for place in range(draw(st.integers(0, most)))]


@st.composite
def drafted_trees(draw: st.DrawFn, vocabulary: int = 4) -> tuple[list[int], list[int]]:
    """Parents and tokens; siblings are distinct."""
    parents: list[int] = []
    token_ids: list[int] = []
    for place in range(draw(st.integers(0, 12))):
        parent = draw(st.integers(0, place))
        taken = {t for p, t in zip(parents, token_ids, strict=True) if p == parent}
        free = sorted(set(range(vocabulary)) - taken)
        if free:
            parents.append(parent)
            token_ids.append(draw(st.sampled_from(free)))
    return parents, token_ids


# specdec.trees


@pytest.mark.parametrize(
    ("parents", "token_ids", "topk", "fault"),
    [
        ([], [], 1, None),
        ([], [7, 7, 7], 1, None),
        ([0, 1, 2], [7, 7, 7], 1, None),
        ([0, 0, 1, 1], [1, 2, 1, 2], 2, None),
        ([0, 1], [1, 2, 3], 9, "3 drafted tokens came with 2 parents"),
        ([0], [], 9, "0 drafted tokens came with 1 parents"),
        ([1], [5], 9, "the parent of token 1 is 1, which does not come before it"),
        ([0, 3, 0], [1, 2, 3], 9, "the parent of token 2 is 3, which does not come before it"),
        ([0, 2**32 - 1], [1, 2], 9, "the parent of token 2 is 4294967295, which does not"),
        ([0, 0], [4, 4], 9, "two drafted tokens that follow the same one are equal"),
        ([0, 1, 1], [4, 4, 4], 9, "two drafted tokens that follow the same one are equal"),
        ([0, 0], [1, 2], 1, "2 drafted tokens follow the same one, the limit is 1"),
        ([0, 1, 1, 1], [1, 1, 2, 3], 2, "3 drafted tokens follow the same one, the limit is 2"),
    ],
)
def test_what_is_wrong_with_parents(
    parents: list[int], token_ids: list[int], topk: int, fault: str | None
) -> None:
    found = trees.parents_fault(parents, token_ids, topk)
    assert found is None if fault is None else (found or "").startswith(fault)


@MANY
@given(parents=parent_lists())
def test_depths_and_paths_are_those_of_climbing_up(parents: list[int]) -> None:
    found = trees.depths(parents)
    assert trees.path(parents, 0) == []
    for place, parent in enumerate(parents, 1):
        way = trees.path(parents, place)
        assert way == [*trees.path(parents, parent), place]
        assert len(way) == found[place - 1]
    assert trees.is_chain(parents) == (parents == trees.chain(len(parents)))
    assert trees.parents_of(parents, len(parents)) == parents
    assert trees.parents_of([], 3) == [0, 1, 2]


@MANY
@given(tree=drafted_trees(), followed=st.lists(st.integers(0, 3), max_size=6))
def test_a_walk_is_the_longest_beginning_that_is_in_the_tree(
    tree: tuple[list[int], list[int]], followed: list[int]
) -> None:
    parents, token_ids = tree
    ways = [trees.path(parents, place) for place in range(len(parents) + 1)]
    spelled = {tuple(token_ids[place - 1] for place in way): way for way in ways}
    assert len(spelled) == len(ways)
    longest = max(n for n in range(len(followed) + 1) if tuple(followed[:n]) in spelled)
    assert trees.walk(parents, token_ids, followed) == spelled[tuple(followed[:longest])]


# What stands of them.


def slow_walk(
    y: Sequence[int], token_ids: Sequence[int], parents: Sequence[int]
) -> tuple[list[int], int]:
    """The deepest place whose way agrees with the target at each step, and what follows it."""
    agreeing = [
        way
        for way in (trees.path(parents, place) for place in range(len(parents) + 1))
        if all(
            token_ids[place - 1] == y[before] for before, place in zip([0, *way], way, strict=False)
        )
    ]
    best = max(agreeing, key=len)
    return best, y[best[-1] if best else 0]


@MANY
@given(tree=drafted_trees(), data=st.data())
def test_what_stands_is_the_deepest_way_that_the_target_agrees_with(
    tree: tuple[list[int], list[int]], data: st.DataObject
) -> None:
    parents, token_ids = tree
    count = len(parents) + 1
    y = data.draw(st.lists(st.integers(0, 3), min_size=count, max_size=count))
    assert acceptance.walk(y, token_ids, parents) == slow_walk(y, token_ids, parents)


@MANY
@given(token_ids=st.lists(st.integers(0, 1), max_size=6), data=st.data())
def test_of_a_chain_the_same_stands_as_without_parents(
    token_ids: list[int], data: st.DataObject
) -> None:
    count = len(token_ids) + 1
    y = data.draw(st.lists(st.integers(0, 1), min_size=count, max_size=count))
    n, token_id = acceptance.match(torch.tensor(y), torch.tensor(token_ids, dtype=torch.int64))
    places, following = acceptance.walk(y, token_ids, trees.chain(len(token_ids)))
    assert (places, following) == (list(range(1, int(n) + 1)), int(token_id))


def test_a_walk_that_ignored_parents_would_be_noticed() -> None:
    """A planted bug: as if each token followed the one before it."""
    parents, token_ids, y = [0, 0, 1], [1, 2, 3], [2, 3, 0, 0]
    assert acceptance.walk(y, token_ids, parents) == ([2], 0)
    assert acceptance.walk(y, token_ids, trees.chain(3)) != slow_walk(y, token_ids, parents)


# What is proposed. A model is a function from the way to a node to what may follow it.

VOCABULARY = 5


class Model:
    """A random one."""

    def __init__(self, seed: int, sharp: float) -> None:
        self._seed = seed
        self._sharp = sharp
        self.steps: list[int] = []
        """How many nodes were looked behind in each step."""

    def after(self, way: Sequence[int]) -> list[tuple[float, int]]:
        """Probabilities and tokens, the most probable first."""
        seed = hash((self._seed, tuple(way))) % 2**32
        logits = torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(seed))
        chances = (self._sharp * logits.double()).softmax(-1).tolist()
        return sorted(((chance, t) for t, chance in enumerate(chances)), reverse=True)

    def grow(self, tree: Tree, growth: Growth, width: int = VOCABULARY) -> list[Node]:
        """Grows a proposal to its end."""
        while frontier := growth.frontier():
            self.steps.append(len(frontier))
            for node in frontier:
                found = self.after([each.token_id for each in node.way])[:width]
                tree.add(node, [t for _, t in found], [chance for chance, _ in found])
        return growth.nodes


def propose(
    model: Model, count: int, topk: int, costs: common_pb2.DraftCosts = FREE
) -> tuple[Tree, list[Node]]:
    tree = Tree(7)
    return tree, model.grow(tree, Growth(tree.root, count, topk, costs))


def all_ways(model: Model, depth: int, topk: int) -> dict[tuple[int, ...], float]:
    """How probable each way of at most so many tokens is, if only topk may follow each."""
    found: dict[tuple[int, ...], float] = {(): 1.0}
    last: list[tuple[int, ...]] = [()]
    for _ in range(depth):
        fresh: dict[tuple[int, ...], float] = {
            (*way, token_id): found[way] * chance
            for way in last
            for chance, token_id in model.after(way)[:topk]
        }
        found |= fresh
        last = list(fresh)
    del found[()]
    return found


def ways_of(nodes: Sequence[Node]) -> list[tuple[int, ...]]:
    return [tuple(each.token_id for each in node.way) for node in nodes]


def assert_well_formed(draft: Draft, count: int, topk: int) -> None:
    assert len(draft.token_ids) <= count
    assert trees.parents_fault(draft.parents, draft.token_ids, topk) is None
    assert len(draft.probabilities) == len(draft.token_ids)
    parents = trees.parents_of(draft.parents, len(draft.token_ids))
    for place, parent in enumerate(parents, 1):
        above = draft.probabilities[parent - 1] if parent else 1.0
        assert 0.0 <= draft.probabilities[place - 1] <= above


@pytest.mark.parametrize("topk", [1, 2, 3])
@pytest.mark.parametrize("count", [1, 2, 4, 5])
def test_the_most_probable_tokens_of_all_are_proposed(count: int, topk: int) -> None:
    for seed, sharp in product(range(6), (0.5, 1.5, 4.0)):
        model = Model(seed, sharp)
        tree, nodes = propose(model, count, topk)
        # No way of more tokens can be among the first `count`: all its beginnings would be, too.
        every = all_ways(model, count, topk)
        best = sorted(every, key=lambda way: -every[way])[:count]
        assert sorted(ways_of(nodes)) == sorted(best)
        draft = draft_of(tree.root, nodes)
        assert_well_formed(draft, count, topk)
        chances = [every[way] for way in ways_of(nodes)]
        assert draft.probabilities == pytest.approx(chances)
        assert max(model.steps) <= MOST_ROWS
        if topk == 1:
            # A chain of N tokens takes N steps: it is not asked what would follow it.
            assert (draft.parents, model.steps) == ([], [1] * count)


def test_many_tokens_are_well_formed_where_few_rows_fit_a_step() -> None:
    for seed in range(4):
        model = Model(seed, 0.3)
        tree, nodes = propose(model, 40, 5)
        assert len(nodes) == 40
        assert max(model.steps) == MOST_ROWS
        assert_well_formed(draft_of(tree.root, nodes), 40, 5)


def test_a_token_that_costs_more_than_it_yields_is_left_out() -> None:
    for seed, row in product(range(8), (0.02, 0.1, 0.3, 0.99)):
        model = Model(seed, 1.5)
        _, nodes = propose(model, 6, 3, common_pb2.DraftCosts(row=row))
        every = all_ways(model, 6, 3)
        worth = [way for way in every if every[way] >= row]
        best = sorted(worth, key=lambda way: -every[way])[:6]
        assert sorted(ways_of(nodes)) == sorted(best)


def test_a_step_that_costs_more_than_it_yields_is_left_out() -> None:
    steps = []
    for cost in (0.0, 0.2, 0.5, 1.1):
        model = Model(3, 1.5)
        propose(model, 6, 2, common_pb2.DraftCosts(step=cost))
        steps.append(len(model.steps))
    assert steps == sorted(steps, reverse=True)
    # No step gives more than a token.
    assert steps[0] > steps[2] > steps[3] == 0


def test_a_step_is_worth_the_tokens_that_it_is_expected_to_add() -> None:
    def steps(cost: float) -> int:
        tree = Tree(0)
        growth = Growth(tree.root, 2, 1, common_pb2.DraftCosts(step=cost))
        tree.add(tree.root, [4, 5], [0.5, 0.3])
        # After a token that stands with 0.5 something of 0.5 is expected again, as at the root.
        return len(growth.frontier())

    assert (steps(0.25), steps(0.2501)) == (1, 0)


def test_equal_probabilities_do_not_part_a_token_from_its_ancestors() -> None:
    tree = Tree(0)
    growth = Growth(tree.root, 3, 2, FREE)
    while frontier := growth.frontier():
        for node in frontier:
            tree.add(node, [1, 2], [1.0, 1.0])
    assert_well_formed(draft_of(tree.root, growth.nodes), 3, 2)
    assert len(growth.nodes) == 3


def test_nothing_follows_where_nothing_is_allowed() -> None:
    tree = Tree(0)
    growth = Growth(tree.root, 3, 2, FREE)
    tree.add(*(growth.frontier()[0], [], []))
    assert growth.frontier() == []
    assert draft_of(tree.root, growth.nodes) == Draft([], parents=[], probabilities=[])


@pytest.mark.parametrize("topk", [1, 3])
def test_guesses_are_the_likeliest_outcomes_and_nothing_that_was_proposed(topk: int) -> None:
    for seed, count in product(range(6), (1, 4, 8)):
        model = Model(seed, 1.5)
        tree, proposed = propose(model, 4, topk)
        nodes = [tree.root, *proposed]
        for node in nodes:
            if not node.looked:
                after = model.after([each.token_id for each in node.way])
                tree.add(node, [t for _, t in after], [chance for chance, _ in after])
        found = guesses(nodes, count)
        every = all_ways(model, 5, VOCABULARY) | {(): 1.0}
        outcomes = {
            (*way, token_id): every[way] * chance
            for way in [(), *ways_of(proposed)]
            for chance, token_id in model.after(way)
            if (*way, token_id) not in ways_of(proposed)
        }
        best = sorted(outcomes, key=lambda way: -outcomes[way])[:count]
        assert ways_of(found) == best
        assert [node.probability for node in found] == pytest.approx([outcomes[w] for w in best])
        assert all(node.parent in nodes for node in found)


def test_a_proposal_is_adopted_as_it_is() -> None:
    for seed, topk in product(range(6), (1, 3)):
        model = Model(seed, 1.5)
        old = Tree(7)
        old.add(old.root, [3, 1], [0.6, 0.2])
        root = old.root.children[1]
        nodes = model.grow(old, Growth(root, 5, topk, FREE))
        fresh = Tree(8)
        for count in (0, 2, 5):
            copies = fresh.adopt(root, nodes[:count])
            adopted, kept = draft_of(fresh.root, copies), draft_of(root, nodes[:count])
            assert (adopted.token_ids, adopted.parents) == (kept.token_ids, kept.parents)
            assert adopted.probabilities == pytest.approx(kept.probabilities)
            assert [copy.depth for copy in copies] == [node.depth - 1 for node in nodes[:count]]
            assert not any(copy.looked or copy.place for copy in copies)
            assert not {id(copy) for copy in copies} & {id(node) for node in nodes}
            assert fresh.num_fed == 0
            fresh = Tree(8)


def test_what_was_adopted_stays_when_it_is_looked_behind() -> None:
    """The model may put other tokens before it by then."""
    old = Tree(0)
    old.add(old.root, [1, 2], [0.5, 0.25])
    fresh = Tree(0)
    copies = fresh.adopt(old.root, old.root.children)
    fresh.add(fresh.root, [3, 2], [0.6, 0.3])
    assert [child.token_id for child in fresh.root.children] == [3, 2, 1]
    assert fresh.root.children[1:] == [copies[1], copies[0]]
    assert copies[1].probability == 0.3
    assert [guess.token_id for guess in guesses([fresh.root, *copies], 5)] == [3]


# Which tokens come into question.


def one(count: int, width: int) -> torch.Tensor:
    return torch.ones(count, width, dtype=torch.float64)[:, :1]


def test_greedy_candidates_come_in_the_order_of_the_logits() -> None:
    scores = torch.randn(6, 50, generator=torch.Generator().manual_seed(1)).double()
    for sharp in (0.5, 1.0, 1.25):
        found = candidates(scores, 50, sharp * one(6, 50), None)
        for row, (token_ids, chances) in zip(scores, found, strict=True):
            assert token_ids == row.argsort(descending=True).tolist()
            assert chances == pytest.approx((sharp * row).softmax(-1)[token_ids].tolist())
        few = candidates(scores, 3, sharp * one(6, 50), None)
        assert [each.token_ids for each in few] == [each.token_ids[:3] for each in found]


def test_sampled_candidates_come_in_the_order_of_the_scores_with_the_shared_noise() -> None:
    scores = torch.randn(6, 50, generator=torch.Generator().manual_seed(2)).double()
    keys = key(seed_tensor(9, "cpu"), Stream.COUPLED, torch.tensor([5, 6, 6, 7, 8, 900]))
    noise = gumbel(keys, torch.arange(50))
    found = candidates(scores, 50, 0.75 * one(6, 50), keys)
    for row, (token_ids, chances) in zip(scores + noise, found, strict=True):
        assert token_ids == row.argsort(descending=True).tolist()
        assert chances == pytest.approx((0.75 * row).softmax(-1)[token_ids].tolist())
    assert [each.token_ids[0] for each in found] == coupled_choice(scores, keys).tolist()


def test_of_a_large_vocabulary_the_noise_of_likely_tokens_is_looked_at() -> None:
    scores = torch.randn(3, 4000, generator=torch.Generator().manual_seed(3)).double() * 6.0
    keys = key(seed_tensor(9, "cpu"), Stream.COUPLED, torch.tensor([5, 6, 7]))
    noisy = scores + gumbel(keys, torch.arange(4000))
    for row, plain, (token_ids, chances) in zip(
        noisy, scores, candidates(scores, 8, one(3, 4000), keys), strict=True
    ):
        likely = plain.topk(_LIKELY_WITH_NOISE).indices
        expected = likely[row[likely].argsort(descending=True)][:8].tolist()
        assert token_ids == expected
        assert token_ids[0] == int(row.argmax())
        assert 0.0 < sum(chances) <= 1.0


@pytest.mark.parametrize("with_keys", [False, True])
@MANY
@given(data=st.data())
def test_probabilities_are_those_of_what_is_allowed(with_keys: bool, data: st.DataObject) -> None:
    width, count = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 14))
    number = st.one_of(st.floats(-50.0, 50.0), st.just(float("-inf")))
    rows = data.draw(
        st.lists(st.lists(number, min_size=width, max_size=width), min_size=1, max_size=4)
    )
    scores = torch.tensor(rows, dtype=torch.float64)
    keys = key(seed_tensor(3, "cpu"), Stream.COUPLED, torch.arange(len(rows)))
    found = candidates(scores, count, one(*scores.shape), keys if with_keys else None)
    for row, (token_ids, chances) in zip(scores, found, strict=True):
        allowed = int((row > -torch.inf).sum())
        assert len(token_ids) == len(set(token_ids)) == len(chances) <= min(count, allowed)
        assert bool((row[token_ids] > -torch.inf).all())
        assert all(chance > 0.0 for chance in chances)
        assert chances == sorted(chances, reverse=True)
        assert sum(chances) <= 1.0 + 1e-9
        if allowed:
            assert token_ids


@pytest.mark.parametrize("with_keys", [False, True])
def test_rows_that_allow_nothing_or_are_no_numbers_give_no_tokens(with_keys: bool) -> None:
    scores = torch.tensor(
        [[-torch.inf] * 4, [torch.nan] * 4, [0.0, torch.nan, 1.0, 2.0], [0.0] * 4]
    )
    keys = key(seed_tensor(3, "cpu"), Stream.COUPLED, torch.arange(4)) if with_keys else None
    found = candidates(scores.double(), 2, one(4, 4), keys)
    assert found[0].token_ids == []
    # That is told from what is broken.
    assert found[1] is found[2] is None
    assert len(found[3].token_ids) == 2


def test_the_targets_choice_is_taken_to_be_surer_the_less_noise_hides_it() -> None:
    assert [sharpness(t) for t in (0.0, 0.4, 0.8, 1.0, 2.0)] == [1.25, 0.5, 1.0, 1.0, 1.0]
