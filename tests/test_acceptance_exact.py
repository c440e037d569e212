"""The acceptance rules by exact enumeration: no sampling, float64, to 1e-12.

On a tiny vocabulary every block that can be drafted, and every way its coins can fall, is gone
through by the real functions. What they emit, extended by the target itself to K + 1 tokens, must
have exactly the target's law.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

import pytest
import torch

from verifier_service import acceptance

TOLERANCE = 1e-12
SHAPES = [(3, 1), (3, 2), (3, 3), (4, 3), (5, 2), (5, 3)]
SHAPE = pytest.mark.parametrize(("vocabulary", "k"), SHAPES)
RULE = pytest.mark.parametrize("rule", ["rejection", "block"])


@dataclass
class Models:
    """Target and draft as tables over all prefixes.

    `p[i]` is [V**i, V]: its row is the prefix of i tokens, read as a number to the base V.
    """

    p: list[torch.Tensor]
    q: list[torch.Tensor]

    @property
    def vocabulary(self) -> int:
        return self.p[0].shape[-1]

    @property
    def k(self) -> int:
        return len(self.q)


def normalise(weights: torch.Tensor) -> torch.Tensor:
    return weights / weights.sum(dim=-1, keepdim=True)


Rows = torch.Tensor


def one_hot(rows: Rows) -> Rows:
    """All the weight on one token, a different one from row to row."""
    return torch.nn.functional.one_hot(rows.argmax(dim=-1), rows.shape[-1]).double()


def ranked_opposite(p: Rows, q: Rows) -> tuple[Rows, Rows]:
    descending = p.sort(dim=-1, descending=True).values
    return p, torch.zeros_like(p).scatter(-1, p.argsort(dim=-1), descending)


def partly_disjoint(p: Rows, q: Rows) -> tuple[Rows, Rows]:
    """Each excludes a token: the target its worst one, the draft the target's best one."""
    order = p.argsort(dim=-1)
    return normalise(p.scatter(-1, order[:, :1], 0.0)), normalise(q.scatter(-1, order[:, -1:], 0.0))


def disjoint(p: Rows, q: Rows) -> tuple[Rows, Rows]:
    upper = torch.arange(p.shape[-1]) >= p.shape[-1] // 2
    return normalise(p * upper), normalise(q * ~upper)


CASES: dict[str, Callable[[Rows, Rows], tuple[Rows, Rows]]] = {
    "random": lambda p, q: (p, q),
    "near": lambda p, q: (p, normalise(0.9 * p + 0.1 * q)),
    "equal": lambda p, q: (p, p.clone()),
    # P_1 is 1 and the residual of the first row nothing.
    "equal, then different": lambda p, q: (p, p.clone() if len(p) == 1 else q),
    # What crosses the wire: all but p, and not quite normalised.
    "float32 draft": lambda p, q: (p, normalise(p.float().double())),
    "adversarial": ranked_opposite,
    "partly disjoint": partly_disjoint,
    "disjoint": disjoint,
    "one-hot target": lambda p, q: (one_hot(p), q),
    "one-hot draft": lambda p, q: (p, one_hot(q)),
    "one-hot both": lambda p, q: (one_hot(p), one_hot(q)),
}
CASE = pytest.mark.parametrize("case", CASES)


def make_models(case: str, vocabulary: int, k: int) -> Models:
    generator = torch.Generator().manual_seed(1000 * vocabulary + k)

    def rows(count: int) -> Rows:
        """Far from uniform, so that p / q takes values well above and below 1."""
        u = torch.rand(count, vocabulary, generator=generator, dtype=torch.float64)
        return normalise(u**3 + 1e-3)

    levels = [CASES[case](rows(vocabulary**i), rows(vocabulary**i)) for i in range(k + 1)]
    return Models([p for p, _ in levels], [q for _, q in levels[:k]])


@dataclass
class Blocks:
    """Every block that the draft can draft."""

    index: torch.Tensor
    """[N]: the block, read as a number to the base V."""
    weight: torch.Tensor
    """[N]: its probability, Π q_i(x_i)."""
    x: torch.Tensor
    p: torch.Tensor
    q: torch.Tensor


def enumerate_blocks(models: Models) -> Blocks:
    vocabulary, k = models.vocabulary, models.k
    index = torch.arange(vocabulary**k)
    prefixes = [index // vocabulary ** (k - i) for i in range(k + 1)]
    x = torch.stack([prefixes[i + 1] % vocabulary for i in range(k)], dim=-1)
    p = torch.stack([models.p[i][prefixes[i]] for i in range(k + 1)], dim=-2)
    q = torch.stack([models.q[i][prefixes[i]] for i in range(k)], dim=-2)
    weight = q.gather(-1, x.unsqueeze(-1)).squeeze(-1).prod(dim=-1)
    # A draft cannot draw what its q excludes.
    drawn = weight > 0.0
    return Blocks(index[drawn], weight[drawn], x[drawn], p[drawn], q[drawn])


def standing(rule: str, blocks: Blocks) -> torch.Tensor:
    """[N, K]: the probability of each coin to fall below its limit."""
    probabilities = {
        "rejection": acceptance.rejection_probabilities,
        "block": acceptance.block_probabilities,
    }[rule]
    return probabilities(blocks.p, blocks.q, blocks.x)


def law_of_n(rule: str, blocks: Blocks) -> torch.Tensor:
    """[N, K + 1]: the probability, given the block, that n tokens stand: from the definition."""
    h = standing(rule, blocks)
    one = torch.ones(len(h), 1, dtype=torch.float64)
    if rule == "rejection":  # the leading ones
        return torch.cat([one, h.cumprod(dim=-1)], -1) * torch.cat([1.0 - h, one], dim=-1)
    # The last one: it stands, and all that follow fall.
    none_after = (1.0 - h).flip(-1).cumprod(dim=-1).flip(-1)
    return torch.cat([one, h], dim=-1) * torch.cat([none_after, one], dim=-1)


def law_of_y(rule: str, blocks: Blocks, n: int) -> torch.Tensor:
    """[N, V]: the law of the token that follows n accepted ones: from the definition."""
    if n == blocks.x.shape[-1]:
        return blocks.p[:, n]
    scale: torch.Tensor | float = 1.0
    if rule == "block":
        scale = acceptance.prefix_probabilities(blocks.p, blocks.q, blocks.x)[:, n, None]
    return normalise(acceptance.residual(blocks.p[:, n], blocks.q[:, n], scale))


def extended_law(models: Models, emitted: list[torch.Tensor]) -> torch.Tensor:
    """The law of K + 1 tokens, [V**(K + 1)].

    `emitted[n]` is [V**n, V]: the probability that exactly these n tokens and then y are emitted.
    Whatever is shorter than K + 1 is extended by the target.
    """
    law = emitted[0].flatten()
    for n in range(1, models.k + 1):
        law = (law.unsqueeze(-1) * models.p[n] + emitted[n]).flatten()
    return law


def target_law(models: Models) -> torch.Tensor:
    law = torch.ones(1, dtype=torch.float64)
    for rows in models.p:
        law = (law.unsqueeze(-1) * rows).flatten()
    return law


def law_by_definition(rule: str, models: Models) -> torch.Tensor:
    blocks = enumerate_blocks(models)
    of_n = law_of_n(rule, blocks)
    emitted = []
    for n in range(models.k + 1):
        probability = (blocks.weight * of_n[:, n]).unsqueeze(-1) * law_of_y(rule, blocks, n)
        prefix = blocks.index // models.vocabulary ** (models.k - n)
        rows = torch.zeros(models.vocabulary**n, models.vocabulary, dtype=torch.float64)
        emitted.append(rows.index_add(0, prefix, probability))
    return extended_law(models, emitted)


def law_of_the_real_rule(
    rule: str, models: Models, monkeypatch: pytest.MonkeyPatch
) -> torch.Tensor:
    """Runs `rejection` or `block` over all blocks and all ways that the coins can fall.

    Each coin lies right below its limit or right at it. The weights that y would be drawn from are
    taken as they are handed to `draw`.
    """
    blocks = enumerate_blocks(models)
    drawn_from: list[torch.Tensor] = []

    def capture(weights: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
        drawn_from.append(weights)
        return torch.zeros(weights.shape[:-1], dtype=torch.int64)

    monkeypatch.setattr(acceptance, "draw", capture)
    h = standing(rule, blocks)
    emitted = [
        torch.zeros(models.vocabulary**n, models.vocabulary, dtype=torch.float64)
        for n in range(models.k + 1)
    ]
    for pattern in product([True, False], repeat=models.k):
        stands = torch.tensor(pattern)
        coins = torch.where(stands, torch.nextafter(h, torch.tensor(-1.0).double()), h)
        probability = blocks.weight * torch.where(stands, h, 1.0 - h).prod(dim=-1)
        possible = probability > 0.0
        p, q, x = blocks.p[possible], blocks.q[possible], blocks.x[possible]
        u = torch.zeros(len(p), dtype=torch.float64)
        outcome = getattr(acceptance, rule)(p, q, x, coins[possible], u)
        of_y = normalise(drawn_from.pop()) * probability[possible].unsqueeze(-1)
        for n in range(models.k + 1):
            here = outcome.num_accepted == n
            prefix = blocks.index[possible][here] // models.vocabulary ** (models.k - n)
            emitted[n].index_add_(0, prefix, of_y[here])
    return extended_law(models, emitted)


def expected_accepted(rule: str, blocks: Blocks) -> float:
    n = torch.arange(blocks.x.shape[-1] + 1, dtype=torch.float64)
    return float((blocks.weight.unsqueeze(-1) * law_of_n(rule, blocks) * n).sum())


def reference_prefix(blocks: Blocks) -> torch.Tensor:
    """P_0 … P_K, one block at a time in plain Python."""
    rows = []
    for p, q, x in zip(blocks.p.tolist(), blocks.q.tolist(), blocks.x.tolist(), strict=True):
        row = [1.0]
        for i, token in enumerate(x):
            row.append(min(row[-1] * p[i][token] / q[i][token], 1.0))
        rows.append(row)
    return torch.tensor(rows, dtype=torch.float64)


@CASE
@SHAPE
@RULE
def test_the_law_is_the_targets(rule: str, vocabulary: int, k: int, case: str) -> None:
    models = make_models(case, vocabulary, k)
    error = (law_by_definition(rule, models) - target_law(models)).abs().max()
    assert float(error) < TOLERANCE


@CASE
@SHAPE
@RULE
def test_the_law_of_the_whole_rule_is_the_targets(
    rule: str, vocabulary: int, k: int, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = make_models(case, vocabulary, k)
    error = (law_of_the_real_rule(rule, models, monkeypatch) - target_law(models)).abs().max()
    assert float(error) < TOLERANCE


@RULE
def test_a_correction_that_ignores_the_draft_is_seen(
    rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(acceptance, "residual", lambda p_row, q_row, scale=1.0: p_row)
    models = make_models("random", 4, 3)
    for law in (law_by_definition(rule, models), law_of_the_real_rule(rule, models, monkeypatch)):
        assert float((law - target_law(models)).abs().max()) > 1e-3


@CASE
@SHAPE
def test_block_accepts_no_fewer_tokens_than_rejection(case: str, vocabulary: int, k: int) -> None:
    blocks = enumerate_blocks(make_models(case, vocabulary, k))
    gain = expected_accepted("block", blocks) - expected_accepted("rejection", blocks)
    assert gain > -TOLERANCE


def test_the_example_of_the_block_verification_paper() -> None:
    """p = (1/3, 2/3), q = (2/3, 1/3) in any context, K = 2: 10/9 tokens against 11/9."""
    p = torch.tensor([1.0, 2.0], dtype=torch.float64) / 3.0
    models = Models(
        [p.expand(2**i, 2) for i in range(3)], [p.flip(0).expand(2**i, 2) for i in (0, 1)]
    )
    blocks = enumerate_blocks(models)
    assert expected_accepted("rejection", blocks) == pytest.approx(10 / 9, abs=TOLERANCE)
    assert expected_accepted("block", blocks) == pytest.approx(11 / 9, abs=TOLERANCE)


@CASE
@SHAPE
def test_block_keeps_each_prefix_with_its_prefix_probability(
    case: str, vocabulary: int, k: int
) -> None:
    """P(n ≥ i | x_1 … x_i) = P_i: the heart of the rule's proof, which fixes what it accepts."""
    blocks = enumerate_blocks(make_models(case, vocabulary, k))
    at_least = law_of_n("block", blocks).flip(-1).cumsum(dim=-1).flip(-1)
    prefix_probability = reference_prefix(blocks)
    for i in range(1, k + 1):
        prefix = blocks.index // vocabulary ** (k - i)
        zeros = torch.zeros(vocabulary**i, dtype=torch.float64)
        accepted = zeros.index_add(0, prefix, blocks.weight * at_least[:, i])
        expected = zeros.index_add(0, prefix, blocks.weight * prefix_probability[:, i])
        assert float((accepted - expected).abs().max()) < TOLERANCE


@CASE
@SHAPE
def test_rejection_keeps_the_first_token_with_the_overlap_of_the_two_laws(
    case: str, vocabulary: int, k: int
) -> None:
    models = make_models(case, vocabulary, k)
    blocks = enumerate_blocks(models)
    accepted = 1.0 - float((blocks.weight * law_of_n("rejection", blocks)[:, 0]).sum())
    overlap = float(torch.minimum(models.p[0], models.q[0]).sum())
    assert accepted == pytest.approx(overlap, abs=TOLERANCE)


@RULE
def test_a_draft_that_is_the_target_always_stands(rule: str) -> None:
    blocks = enumerate_blocks(make_models("equal", 4, 3))
    assert standing(rule, blocks).tolist() == [[1.0] * 3] * len(blocks.x)


@RULE
def test_a_token_that_the_target_excludes_never_stands(rule: str) -> None:
    """Also for a coin of exactly 0; block verification may go past it, but not end at it."""
    blocks = enumerate_blocks(make_models("partly disjoint", 4, 3))
    excluded = blocks.p[:, :-1].gather(-1, blocks.x.unsqueeze(-1)).squeeze(-1) == 0.0
    some = excluded.any(dim=-1)
    assert bool(some.any())
    coins = torch.zeros(int(some.sum()), 3, dtype=torch.float64)
    outcome = getattr(acceptance, rule)(
        blocks.p[some], blocks.q[some], blocks.x[some], coins, coins[:, 0]
    )
    first_excluded = excluded[some].long().argmax(dim=-1)
    assert bool((outcome.num_accepted <= first_excluded).all())


@RULE
def test_the_emitted_token_is_never_one_that_the_target_excludes(rule: str) -> None:
    blocks = enumerate_blocks(make_models("partly disjoint", 4, 3))
    below_one = 1.0 - 2.0**-53
    for coin, u in product([0.0, 0.5, below_one], repeat=2):
        coins = torch.full(blocks.x.shape, coin, dtype=torch.float64)
        outcome = getattr(acceptance, rule)(
            blocks.p, blocks.q, blocks.x, coins, torch.full_like(coins[:, 0], u)
        )
        rows = blocks.p[torch.arange(len(coins)), outcome.num_accepted]
        assert bool((rows.gather(-1, outcome.next_token.unsqueeze(-1)) > 0.0).all())


def test_the_residual_of_equal_rows_is_the_row_itself() -> None:
    p = torch.tensor([[0.25, 0.75, 0.0], [0.5, 0.25, 0.25]], dtype=torch.float64)
    assert torch.equal(acceptance.residual(p, p), p)


def test_all_rules_are_greedy_matching_on_one_hot_distributions() -> None:
    vocabulary, k = 3, 2
    tokens = torch.arange(vocabulary)
    cases = torch.cartesian_prod(*[tokens] * (2 * k + 1))
    best, x = cases[:, : k + 1], cases[:, k + 1 :]
    logits = torch.nn.functional.one_hot(best, vocabulary).double()
    p, q = logits, torch.nn.functional.one_hot(x, vocabulary).double()
    expected = acceptance.greedy(logits, x)
    for row in range(len(cases)):
        n = 0
        while n < k and best[row, n] == x[row, n]:
            n += 1
        assert (expected.num_accepted[row], expected.next_token[row]) == (n, best[row, n])
    generator = torch.Generator().manual_seed(5)
    noise = torch.randn(p.shape, generator=generator, dtype=torch.float64)
    coupled = acceptance.match((p.log() + noise).argmax(dim=-1), x)
    assert torch.equal(torch.stack(coupled), torch.stack(expected))
    for value in (0.0, 0.5, 1.0 - 2.0**-53):
        coins = torch.full(x.shape, value, dtype=torch.float64)
        for rule in (acceptance.rejection, acceptance.block):
            outcome = rule(p, q, x, coins, coins[:, 0])
            assert torch.equal(torch.stack(outcome), torch.stack(expected))


@RULE
def test_without_a_draft_the_bonus_comes_from_the_first_row(rule: str) -> None:
    p = torch.tensor([[0.25, 0.0, 0.5, 0.25]], dtype=torch.float64)
    no_q, no_x = torch.empty(0, 4, dtype=torch.float64), torch.empty(0, dtype=torch.int64)
    no_coins = torch.empty(0, dtype=torch.float64)
    # Midpoints of a grid that the steps of p fall on: the law of y is exact.
    u = (torch.arange(8, dtype=torch.float64) + 0.5) / 8
    emitted = [getattr(acceptance, rule)(p, no_q, no_x, no_coins, one) for one in u]
    assert [int(o.next_token) for o in emitted] == [0, 0, 2, 2, 2, 2, 3, 3]
    assert [int(o.num_accepted) for o in emitted] == [0] * 8


@RULE
def test_a_batch_without_drafts_works(rule: str) -> None:
    p = normalise(torch.rand(6, 1, 4, generator=torch.Generator().manual_seed(1)).double())
    empty = torch.empty(6, 0, dtype=torch.float64)
    u = torch.linspace(0.0, 0.99, 6, dtype=torch.float64)
    outcome = getattr(acceptance, rule)(p, torch.empty(6, 0, 4).double(), empty.long(), empty, u)
    assert outcome.num_accepted.tolist() == [0] * 6
    assert torch.equal(outcome.next_token, acceptance.draw(p.squeeze(-2), u))


def test_without_a_draft_no_probability_is_left_to_compare_a_coin_with() -> None:
    p, q = torch.rand(6, 1, 4).double(), torch.empty(6, 0, 4).double()
    x = torch.empty(6, 0, dtype=torch.int64)
    assert acceptance.rejection_probabilities(p, q, x).shape == (6, 0)
    assert acceptance.block_probabilities(p, q, x).shape == (6, 0)
    assert acceptance.prefix_probabilities(p, q, x).tolist() == [[1.0]] * 6


def test_greedy_and_coupled_work_without_a_draft() -> None:
    scores = torch.tensor([[0.0, 2.0, 1.0]], dtype=torch.float64)
    noise = torch.tensor([[3.0, 0.0, 0.5]], dtype=torch.float64)
    no_x = torch.empty(0, dtype=torch.int64)
    greedy = acceptance.greedy(scores, no_x)
    coupled = acceptance.match((scores + noise).argmax(dim=-1), no_x)
    assert (int(greedy.num_accepted), int(greedy.next_token)) == (0, 1)
    assert (int(coupled.num_accepted), int(coupled.next_token)) == (0, 0)


@RULE
def test_the_rows_of_a_batch_do_not_affect_each_other(rule: str) -> None:
    blocks = enumerate_blocks(make_models("random", 4, 3))
    generator = torch.Generator().manual_seed(2)
    coins = torch.rand(blocks.x.shape, generator=generator, dtype=torch.float64)
    u = torch.rand(len(coins), generator=generator, dtype=torch.float64)
    function = getattr(acceptance, rule)
    together = function(blocks.p, blocks.q, blocks.x, coins, u)
    assert len(together.num_accepted.unique()) == 4
    for row in range(len(coins)):
        alone = function(blocks.p[row], blocks.q[row], blocks.x[row], coins[row], u[row])
        assert alone.num_accepted == together.num_accepted[row]
        assert alone.next_token == together.next_token[row]
