"""What the rules emit has the target's law: sampled, through the real functions and keys.

First-order Markov models, several rounds, the draft's q truncated to its top entries and rounded to
float32 as on the wire. The joint law of the first two and of the first three tokens is compared
with the target's by chi-square, and that of the first two by total variation. The seeds are fixed,
so that an outcome never changes; planted bugs show that the same comparison sees a wrong law.

The noise floor of total variation: a cell's count in an honest sample of N deviates from N·p by
√(2·N·p·(1 − p) / π) on average, so that E[TV] ≈ Σ √(p·(1 − p) / (2πN)), summed over the cells (and
less where N·p is small). One draw moves TV by at most 1 / N, so that by McDiarmid's inequality it
exceeds its mean by √(ln(10⁶) / (2N)) with a probability below 10⁻⁶.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

import pytest
import torch
from scipy import stats

from draft_service.drafting import Proposing, sample_sparse
from specdec.lm.history import History
from specdec.lm.randomness import Stream, gumbel, key, uniform
from specdec.v1 import common_pb2
from specdec.v1.common_pb2 import Sampling
from tests.processing import resolved
from tests.simulator import START, Result, Simulator
from tests.tables import TableModel, release, session
from verifier_service import acceptance
from verifier_service.verification import Verification, densify

# A minute together; the exact enumerations in the quick set see most of what these see.
pytestmark = pytest.mark.slow

DRAWS = 200_000
SEEDS = torch.arange(DRAWS) + 2**40
HONEST, REJECTED = 1e-3, 1e-6

PLAIN = Sampling(temperature=1.0, top_p=1.0)
FILTERED = Sampling(temperature=0.8, top_k=10, top_p=0.9)
SAMPLINGS = {"plain": PLAIN, "filtered": FILTERED}
TOP_N = {4: 3, 16: 6, 64: 16}
RULE = pytest.mark.parametrize("rule", ["rejection", "block", "coupled"])


def logits_of(name: str, vocabulary: int) -> torch.Tensor:
    """[V, V]: row s holds the logits of what follows token s."""
    generator = torch.Generator().manual_seed(vocabulary)
    target = 1.5 * torch.randn(vocabulary, vocabulary, generator=generator)
    other = torch.randn(vocabulary, vocabulary, generator=generator)
    return {
        "target": target,
        "near": target + 0.7 * other,
        "adversarial": -target,  # ranked opposite
        "unrelated": 1.5 * other,
    }[name]


def make(
    kind: type[Simulator],
    rule: str,
    draft: str,
    k: int,
    *,
    vocabulary: int = 16,
    sampling: Sampling = PLAIN,
) -> Simulator:
    target, drafted = logits_of("target", vocabulary), logits_of(draft, vocabulary)
    return kind(rule, target, drafted, k, sampling=sampling, top_n=TOP_N[vocabulary])


@cache
def sample(
    rule: str, draft: str, k: int, vocabulary: int = 16, sampling: str = "plain"
) -> tuple[Simulator, Result]:
    simulator = make(Simulator, rule, draft, k, vocabulary=vocabulary, sampling=SAMPLINGS[sampling])
    return simulator, simulator.generate(SEEDS, 3)


def counts_and_law(
    tokens: torch.Tensor, p: torch.Tensor, length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The first `length` tokens, as counts and as the target's probabilities, over V**length."""
    vocabulary = len(p)
    cells, law = tokens[:, 0], p[START]
    for i in range(1, length):
        cells = cells * vocabulary + tokens[:, i]
        law = (law.reshape(-1, vocabulary, 1) * p).flatten()
    return torch.bincount(cells, minlength=len(law)).double(), law


def chi_square(counts: torch.Tensor, law: torch.Tensor) -> float:
    """The p-value; cells that expect fewer than 5 are pooled into one."""
    expected = law * counts.sum()
    if bool((counts[expected == 0.0] > 0).any()):
        return 0.0
    small = expected < 5.0
    counts = torch.cat([counts[~small], counts[small].sum().unsqueeze(0)])
    expected = torch.cat([expected[~small], expected[small].sum().unsqueeze(0)])
    if expected[-1] < 5.0:  # too little even together: the smallest cell left takes it in
        least = int(expected[:-1].argmin())
        counts[least] += counts[-1]
        expected[least] += expected[-1]
        counts, expected = counts[:-1], expected[:-1]
    statistic = float(((counts - expected) ** 2 / expected).sum())
    return float(stats.chi2.sf(statistic, len(expected) - 1))


def law_p_value(tokens: torch.Tensor, p: torch.Tensor, lengths: tuple[int, ...] = (2, 3)) -> float:
    """The smaller p-value of the joint laws of so many first tokens."""
    return min(chi_square(*counts_and_law(tokens, p, length)) for length in lengths)


def total_variation(counts: torch.Tensor, law: torch.Tensor) -> tuple[float, float]:
    """The total variation distance, and the limit that an honest sample stays below."""
    draws = float(counts.sum())
    distance = 0.5 * float((counts / draws - law).abs().sum())
    floor = float((law * (1.0 - law) / (2.0 * math.pi * draws)).sqrt().sum())
    return distance, floor + math.sqrt(math.log(1e6) / (2.0 * draws))


def assert_honest(tokens: torch.Tensor, p: torch.Tensor, lengths: tuple[int, ...] = (2, 3)) -> None:
    assert law_p_value(tokens, p, lengths) > HONEST
    distance, limit = total_variation(*counts_and_law(tokens, p, 2))
    assert distance < limit


# The simulator is what the services do.


def generate_with_services(
    rule: str, draft: str, k: int, sampling: Sampling, length: int
) -> tuple[list[int], int]:
    """The tokens of one session, and how many drafted tokens its first round accepted."""
    value = common_pb2.AcceptanceRule.Value(f"ACCEPTANCE_RULE_{rule.upper()}")
    sampling = resolved(sampling)
    histories = [History(sampling, [START], 16, torch.device("cpu"), None) for _ in range(2)]
    at_draft, at_target = (session([START], history, sampling, value) for history in histories)
    draft_model = TableModel(logits_of(draft, 16))
    target = TableModel(logits_of("target", 16))
    first, committed = None, None
    while len(at_target.sequence.tokens) <= length:
        base_length = len(at_target.sequence.tokens)
        proposal = draft_model.run(Proposing(at_draft, k, TOP_N[16], committed))
        verified = target.run(Verification(at_target, proposal.token_ids, proposal.distributions))
        committed = (base_length, verified.token_ids)
        first = verified.num_accepted if first is None else first
    assert first is not None
    release(at_draft, at_target)
    return at_target.sequence.tokens[1 : 1 + length], first


@RULE
@pytest.mark.parametrize("k", [0, 1, 4])
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_the_simulator_gives_the_tokens_of_the_services(rule: str, k: int, sampling: str) -> None:
    seeds = [0, 1, 2, 2**40, 2**63 - 1, 2**63, 2**64 - 1, *range(100, 120)]
    as_int64 = torch.tensor([seed - 2**64 if seed >= 2**63 else seed for seed in seeds])
    result = make(Simulator, rule, "near", k, sampling=SAMPLINGS[sampling]).generate(as_int64, 7)
    for row, seed in enumerate(seeds):
        settings = Sampling()
        settings.CopyFrom(SAMPLINGS[sampling])
        settings.seed = seed
        tokens, accepted = generate_with_services(rule, "near", k, settings, 7)
        assert tokens == result.tokens[row].tolist()
        assert accepted == result.first_accepted[row]


def test_a_drafted_token_is_drawn_from_exactly_what_is_sent() -> None:
    """Right below and right above every step of the float32 numbers that cross the wire."""
    scores = logits_of("near", 64)[START].double()
    sent = sample_sparse(scores, 16, torch.zeros(()).double())[1]
    total = math.fsum(sent.probabilities)
    for i in range(15):
        step = math.fsum(sent.probabilities[: i + 1]) / total
        for offset, index in [(-1e-12, i), (1e-12, i + 1)]:
            u = torch.tensor(step + offset, dtype=torch.float64)
            assert sample_sparse(scores, 16, u)[0] == sent.token_ids[index]


def test_what_is_sent_holds_no_token_of_probability_zero() -> None:
    # Filtered, and too unlikely for float32.
    scores = torch.tensor([-200.0, 0.0, -torch.inf, -1.0], dtype=torch.float64)
    for u in (0.0, 0.5, 1.0 - 2.0**-53):
        token, sent = sample_sparse(scores, 4, torch.tensor(u, dtype=torch.float64))
        assert list(sent.token_ids) == [1, 3]
        assert token in sent.token_ids


def test_the_verifier_normalises_each_sparse_distribution_by_its_own_sum() -> None:
    sent = [
        common_pb2.SparseDistribution(token_ids=[3, 0], probabilities=[1.0, 3.0]),
        common_pb2.SparseDistribution(token_ids=[1], probabilities=[0.5]),
    ]
    assert densify(sent, 4).tolist() == [[0.75, 0.0, 0.0, 0.25], [0.0, 1.0, 0.0, 0.0]]
    assert densify([], 4).shape == (0, 4)


# Honest sampling.


@RULE
@pytest.mark.parametrize("draft", ["near", "adversarial"])
@pytest.mark.parametrize("k", [1, 3, 5])
def test_the_law_is_the_targets(rule: str, draft: str, k: int) -> None:
    simulator, result = sample(rule, draft, k)
    assert_honest(result.tokens, simulator.p)


@RULE
@pytest.mark.parametrize("draft", ["near", "adversarial"])
def test_the_law_is_the_processed_targets(rule: str, draft: str) -> None:
    simulator, result = sample(rule, draft, 3, 16, "filtered")
    assert int((simulator.p > 0.0).sum(dim=-1).max()) <= 10
    assert_honest(result.tokens, simulator.p)


@pytest.mark.parametrize(
    ("rule", "draft", "k"), [("rejection", "near", 3), ("block", "near", 3), ("coupled", "near", 1)]
)
def test_the_law_is_the_targets_on_a_larger_vocabulary(rule: str, draft: str, k: int) -> None:
    simulator, result = sample(rule, draft, k, 64)
    assert_honest(result.tokens, simulator.p, lengths=(1, 2))


def test_several_rounds_and_long_blocks_are_both_sampled() -> None:
    """The cases above cover a token after a rejection, after acceptance, and after a bonus."""
    for draft, k in [("near", 1), ("near", 5), ("adversarial", 3)]:
        _, result = sample("block", draft, k)
        assert result.rounds == 3
        shares = torch.bincount(result.first_accepted, minlength=k + 1) / DRAWS
        if draft == "near":
            assert float(shares.min()) > 0.02
    assert float(shares[0]) > 0.5


# Acceptance, against its formulas.


def overlap(simulator: Simulator) -> torch.Tensor:
    """[V, V]: min(p, q)."""
    return torch.minimum(simulator.p, simulator.q)


def assert_mean(samples: torch.Tensor, expected: float) -> None:
    """Within three standard errors."""
    samples = samples.double()
    error = float(samples.std()) / math.sqrt(len(samples))
    assert float(samples.mean()) == pytest.approx(expected, abs=3.0 * error)


@pytest.mark.parametrize("draft", ["near", "adversarial"])
@pytest.mark.parametrize("k", [1, 3, 5])
def test_rejection_accepts_as_its_formula_says(draft: str, k: int) -> None:
    simulator, result = sample("rejection", draft, k)
    assert_mean(result.first_accepted >= 1, float(overlap(simulator)[START].sum()))
    # E[n] = Σ_i P(n ≥ i), where P(n ≥ i) sums Π min(p, q) over all blocks of i tokens.
    reached, expected = torch.eye(16, dtype=torch.float64)[START], 0.0
    for _ in range(k):
        reached = reached @ overlap(simulator)
        expected += float(reached.sum())
    assert_mean(result.first_accepted, expected)


@pytest.mark.parametrize("draft", ["near", "adversarial"])
def test_block_accepts_as_its_formula_says(draft: str) -> None:
    """E[n] = Σ_i E[P_i], over the blocks x ~ q."""
    k = 3
    simulator, result = sample("block", draft, k)
    blocks = torch.cartesian_prod(*[simulator.vocabulary] * k)
    contexts = torch.cat([torch.full((len(blocks), 1), START), blocks[:, :-1]], dim=-1)
    p, q = simulator.p[contexts, blocks], simulator.q[contexts, blocks]
    drawn = (q > 0.0).all(dim=-1)
    p, q = p[drawn], q[drawn]
    prefix, expected = torch.ones(len(p), dtype=torch.float64), 0.0
    for i in range(k):
        prefix = (prefix * p[:, i] / q[:, i]).clamp(max=1.0)
        expected += float((q.prod(dim=-1) * prefix).sum())
    assert_mean(result.first_accepted, expected)


@pytest.mark.parametrize("draft", ["near", "unrelated"])
def test_block_accepts_more_than_rejection(draft: str) -> None:
    block = sample("block", draft, 3)[1].first_accepted.double()
    rejection = sample("rejection", draft, 3)[1].first_accepted.double()
    error = math.sqrt(float(block.var() + rejection.var()) / DRAWS)
    assert float(block.mean() - rejection.mean()) > 5.0 * error


def coupled_acceptance(p: torch.Tensor, q: torch.Tensor) -> float:
    """P(argmax log p + g = argmax log q + g).

    As a race of exponential clocks E_j with rates 1: token i wins both races if E_j / E_i is at
    least max(p_j / p_i, q_j / q_i) for all j, which has the probability 1 / Σ_j max(…).
    """
    ratios = torch.maximum(p / p.unsqueeze(-1), q / q.unsqueeze(-1))
    return float((1.0 / ratios.sum(dim=-1)).sum())


@pytest.mark.parametrize("draft", ["near", "adversarial"])
@pytest.mark.parametrize("k", [1, 3, 5])
def test_coupled_accepts_as_its_formula_says(draft: str, k: int) -> None:
    simulator, result = sample("coupled", draft, k)
    p, q = simulator.p[START], simulator.draft_scores.softmax(dim=-1)[START]
    expected = coupled_acceptance(p, q)
    assert_mean(result.first_accepted >= 1, expected)
    # The bound of the paper (arXiv 2408.07978): (1 − TV) / (1 + TV).
    common = float(torch.minimum(p, q).sum())
    assert common / (2.0 - common) <= expected <= common


def test_coupled_output_is_the_same_for_every_draft_and_every_k() -> None:
    seeds = SEEDS[:16_384]
    alone = make(Simulator, "coupled", "near", 0, sampling=FILTERED).generate(seeds, 6)
    assert alone.rounds == 6
    for draft in ("target", "near", "adversarial", "unrelated"):
        for k in (0, 1, 3, 5):
            result = make(Simulator, "coupled", draft, k, sampling=FILTERED).generate(seeds, 6)
            assert torch.equal(result.tokens, alone.tokens), (draft, k)


def test_coupled_accepts_every_token_of_a_draft_that_is_the_target() -> None:
    result = make(Simulator, "coupled", "target", 5).generate(SEEDS[:16_384], 6)
    assert result.first_accepted.tolist() == [5] * 16_384
    assert result.rounds == 1


# Planted bugs. Each is a change of one line, which the comparison above must see.


class CoinIsTheDraftsNumber(Simulator):
    """The coin and the draft's draw share a stream."""

    def coins(
        self, seeds: torch.Tensor, positions: torch.Tensor, base_length: torch.Tensor
    ) -> torch.Tensor:
        return uniform(key(seeds, Stream.DRAFT, positions, base_length))


class CorrectionReusesTheCoin(Simulator):
    def target_uniform(
        self, seeds: torch.Tensor, base_length: torch.Tensor, coins: torch.Tensor
    ) -> torch.Tensor:
        return coins[:, 0]


class CorrectionReusesTheDraftsNumber(Simulator):
    def target_uniform(
        self, seeds: torch.Tensor, base_length: torch.Tensor, coins: torch.Tensor
    ) -> torch.Tensor:
        return self.draft_uniform(seeds, base_length, base_length)


class OneCoinForTheBlock(Simulator):
    """The coins of consecutive positions share a key."""

    def coins(
        self, seeds: torch.Tensor, positions: torch.Tensor, base_length: torch.Tensor
    ) -> torch.Tensor:
        return super().coins(seeds, base_length.expand_as(positions), base_length)


class CorrectionsShareAKey(Simulator):
    """The target's draws of rounds that start from consecutive positions share a key."""

    def target_uniform(
        self, seeds: torch.Tensor, base_length: torch.Tensor, coins: torch.Tensor
    ) -> torch.Tensor:
        return super().target_uniform(seeds, base_length // 2, coins)


class TruncatedAfterSampling(Simulator):
    """The token is drawn from the full q, the truncated q is sent."""

    def sample(self, contexts: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
        return acceptance.draw(self.draft_scores.softmax(dim=-1)[contexts], u)


class BonusFromTheRowBefore(Simulator):
    def target_rows(self, contexts: torch.Tensor) -> torch.Tensor:
        p = super().target_rows(contexts)
        return torch.cat([p[:, :-1], p[:, -2:-1]], dim=-2)


class BlockStopsAtTheFirstFailure(Simulator):
    def accept(
        self,
        p: torch.Tensor,
        q: torch.Tensor,
        x: torch.Tensor,
        coins: torch.Tensor,
        u: torch.Tensor,
    ) -> acceptance.Outcome:
        stands = coins < acceptance.block_probabilities(p, q, x)
        behind = stands.long().cumprod(dim=-1) == 0
        return super().accept(p, q, x, torch.where(behind, 1.0, coins), u)


class CoinsWithoutBaseLength(Simulator):
    def coins(
        self, seeds: torch.Tensor, positions: torch.Tensor, base_length: torch.Tensor
    ) -> torch.Tensor:
        return uniform(key(seeds, Stream.COIN, positions))


class DraftNumbersWithoutBaseLength(Simulator):
    def draft_uniform(
        self, seeds: torch.Tensor, position: torch.Tensor, base_length: torch.Tensor
    ) -> torch.Tensor:
        return uniform(key(seeds, Stream.DRAFT, position))


class WithoutBaseLength(CoinsWithoutBaseLength, DraftNumbersWithoutBaseLength):
    pass


class PositionsShareNoise(Simulator):
    """The verifier's last two rows are keyed by the same position."""

    def target_noise(self, seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return super().target_noise(seeds, torch.cat([positions[:, :-1], positions[:, -2:-1]], -1))


class DraftOnePositionAhead(Simulator):
    def draft_noise(self, seeds: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        return gumbel(key(seeds, Stream.COUPLED, position + 1), self.vocabulary)


@pytest.mark.parametrize(
    ("bug", "rule", "draft", "k"),
    [
        (CoinIsTheDraftsNumber, "rejection", "near", 1),
        (CoinIsTheDraftsNumber, "block", "near", 3),
        (CorrectionReusesTheCoin, "rejection", "near", 1),
        (CorrectionReusesTheCoin, "block", "near", 3),
        (CorrectionReusesTheDraftsNumber, "rejection", "near", 1),
        (CorrectionReusesTheDraftsNumber, "block", "near", 1),
        (OneCoinForTheBlock, "rejection", "near", 3),
        (OneCoinForTheBlock, "block", "near", 3),
        (CorrectionsShareAKey, "rejection", "adversarial", 1),
        (CorrectionsShareAKey, "block", "adversarial", 1),
        (TruncatedAfterSampling, "rejection", "near", 3),
        (TruncatedAfterSampling, "block", "near", 3),
        (BonusFromTheRowBefore, "rejection", "near", 1),
        (BonusFromTheRowBefore, "block", "near", 1),
        (BlockStopsAtTheFirstFailure, "block", "unrelated", 3),
        (PositionsShareNoise, "coupled", "near", 1),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else str(value),
)
def test_a_planted_bug_is_seen(bug: type[Simulator], rule: str, draft: str, k: int) -> None:
    simulator = make(bug, rule, draft, k)
    assert law_p_value(simulator.generate(SEEDS, 3).tokens, simulator.p) < REJECTED


@pytest.mark.parametrize(
    "bug", [CoinsWithoutBaseLength, DraftNumbersWithoutBaseLength, WithoutBaseLength]
)
def test_block_with_numbers_that_a_later_round_sees_again_is_seen(bug: type[Simulator]) -> None:
    """Where a block ends depends on the numbers behind its end, which the next round would use."""
    simulator = make(bug, "block", "unrelated", 3, vocabulary=4)
    assert law_p_value(simulator.generate(SEEDS, 3).tokens, simulator.p) < REJECTED
    honest = make(Simulator, "block", "unrelated", 3, vocabulary=4)
    assert_honest(honest.generate(SEEDS, 3).tokens, honest.p)


Residual = Callable[..., torch.Tensor]


def of_the_target_alone(honest: Residual) -> Residual:
    return lambda p_row, q_row, scale=1.0: p_row


def of_the_unprocessed_target(honest: Residual) -> Residual:
    """p at temperature 1, where a token was rejected; a bonus is drawn as it should be."""

    def residual(
        p_row: torch.Tensor, q_row: torch.Tensor, scale: torch.Tensor | float = 1.0
    ) -> torch.Tensor:
        unprocessed = p_row**0.8
        unprocessed = unprocessed / unprocessed.sum(dim=-1, keepdim=True)
        rejected = q_row.sum(dim=-1, keepdim=True) > 0.0
        return honest(torch.where(rejected, unprocessed, p_row), q_row, scale)

    return residual


def without_the_scale(honest: Residual) -> Residual:
    return lambda p_row, q_row, scale=1.0: honest(p_row, q_row)


@pytest.mark.parametrize(
    ("bug", "rule", "draft", "k"),
    [
        (of_the_target_alone, "rejection", "near", 3),
        (of_the_target_alone, "block", "near", 3),
        (of_the_unprocessed_target, "rejection", "near", 3),
        (of_the_unprocessed_target, "block", "near", 3),
        (without_the_scale, "block", "unrelated", 3),
    ],
)
def test_a_wrong_residual_is_seen(
    bug: Callable[[Residual], Residual],
    rule: str,
    draft: str,
    k: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(acceptance, "residual", bug(acceptance.residual))
    sampling = Sampling(temperature=0.8, top_p=1.0)
    simulator = make(Simulator, rule, draft, k, sampling=sampling)
    assert law_p_value(simulator.generate(SEEDS, 3).tokens, simulator.p) < REJECTED


def test_a_coupled_draft_off_by_one_position_is_seen_in_its_acceptance_alone() -> None:
    honest, result = sample("coupled", "near", 3)
    off = make(DraftOnePositionAhead, "coupled", "near", 3).generate(SEEDS, 3)
    assert torch.equal(off.tokens, result.tokens)
    # Independent draws agree with probability Σ p·q.
    p, q = honest.p[START], honest.draft_scores.softmax(dim=-1)[START]
    independent = float((p * q).sum())
    assert independent < 0.6 * coupled_acceptance(p, q)
    assert_mean(off.first_accepted >= 1, independent)
