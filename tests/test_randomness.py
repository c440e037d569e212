"""Counter-based randomness: every number is a function of its key alone, and looks random.

Nothing here is sampled from a global generator: the same keys give the same statistics on every
run, so that a p-value above the limit stays above it.
"""

from __future__ import annotations

import math
from functools import cache

import pytest
import torch
from scipy import stats

from specdec.lm.randomness import Stream, gumbel, key, seed_tensor, uniform

COUNT = 100_000
GOLDEN_GAMMA = 0x9E3779B97F4A7C15
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB
WORD = 1 << 64

# The bits that map to the ends of the interval: the largest and the smallest, read as unsigned,
# and those around the sign bit, where an arithmetic shift would go wrong.
EXTREME_BITS = (
    [WORD - 1 - i for i in range(129)]
    + [WORD - (1 << shift) for shift in range(64)]
    + [0, *(1 << shift for shift in range(64))]
    + [(1 << shift) - 1 for shift in range(64)]
)
HONEST = 1e-3


def int64(value: int) -> int:
    value %= WORD
    return value - WORD if value >> 63 else value


def undo_shift(z: int, bits: int) -> int:
    """The x with z = x ^ (x >> bits)."""
    x = z
    for _ in range(64 // bits):
        x = z ^ (x >> bits)
    return x


def key_that_hashes_to(bits: int) -> int:
    """The key whose number, and whose token 0's Gumbel number, is made of these 64 bits.

    Undoes SplitMix64's finalizer, which is a bijection.
    """
    z = undo_shift(bits, 31)
    z = undo_shift(z * pow(MIX_2, -1, WORD) % WORD, 27)
    z = undo_shift(z * pow(MIX_1, -1, WORD) % WORD, 30)
    return int64(z - GOLDEN_GAMMA)


EXTREME_KEYS = torch.tensor([key_that_hashes_to(bits) for bits in EXTREME_BITS])


@cache
def keys_that_differ_in(what: str, fixed: int = 7) -> torch.Tensor:
    """Keys that differ in one word. `fixed` is the seed, or the position where seeds differ."""
    seed, many = seed_tensor(fixed), torch.arange(COUNT)
    match what:
        case "position":
            return key(seed, Stream.COIN, many, 12)
        case "base length":
            return key(seed, Stream.COIN, 12, many)
        case "seed":
            return key(many, Stream.COIN, fixed, 12)
        case "stream":
            return torch.stack([key(seed, stream, 12, 12) for stream in range(10_000)])
    raise AssertionError(what)


VARYING = pytest.mark.parametrize("what", ["position", "base length", "seed", "stream"])


def correlation(a: torch.Tensor, b: torch.Tensor) -> float:
    """In standard errors: that of n independent pairs is normal with deviation 1 / √n."""
    return float(torch.corrcoef(torch.stack([a, b]))[0, 1]) * math.sqrt(len(a))


def pair_p_value(a: torch.Tensor, b: torch.Tensor, bins: int = 16) -> float:
    """Chi-square of the joint law of two numbers in [0, 1) against that of independent ones."""
    cells = (a * bins).long() * bins + (b * bins).long()
    return float(stats.chisquare(torch.bincount(cells, minlength=bins * bins).numpy()).pvalue)


def test_the_generator_gives_the_published_numbers_of_splitmix64() -> None:
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    states = torch.tensor([int64(1234567 + i * GOLDEN_GAMMA) for i in range(3)])
    assert uniform(states).tolist() == [(bits >> 11) * 2.0**-53 for bits in published]


def test_a_key_alone_gives_the_same_number_as_among_others() -> None:
    positions = torch.arange(40)
    many = uniform(key(seed_tensor(3), Stream.DRAFT, positions.reshape(5, 8), positions[:8]))
    for row in range(5):
        for column in range(8):
            alone = uniform(key(seed_tensor(3), Stream.DRAFT, row * 8 + column, column))
            assert alone.shape == ()
            assert alone == many[row, column]


def test_a_seed_alone_gives_the_same_noise_as_among_others() -> None:
    seeds, vocabulary = torch.tensor([5, -1, 2**62, 0]), torch.arange(50)
    many = gumbel(key(seeds, Stream.COUPLED, 9), vocabulary)
    for row, seed in enumerate(seeds):
        assert torch.equal(gumbel(key(seed, Stream.COUPLED, 9), vocabulary), many[row])


def test_sparse_token_ids_give_the_noise_of_the_dense_row() -> None:
    keys = key(seed_tensor(11), Stream.COUPLED, torch.arange(6))
    dense = gumbel(keys, torch.arange(5_000))
    same_for_all = torch.tensor([4_999, 17, 0, 256])
    assert torch.equal(gumbel(keys, same_for_all), dense[:, same_for_all])
    one_row_each = torch.randint(0, 5_000, (6, 30), generator=torch.Generator().manual_seed(0))
    assert torch.equal(gumbel(keys, one_row_each), dense.gather(-1, one_row_each))


def test_the_extreme_bits_map_into_the_half_open_interval() -> None:
    numbers = uniform(EXTREME_KEYS)
    assert numbers.min() == 0.0
    assert numbers.max() == 1.0 - 2.0**-53
    assert numbers.tolist() == [(bits >> 11) / 2**53 for bits in EXTREME_BITS]


def test_gumbel_noise_is_finite_for_the_extreme_bits() -> None:
    noise = gumbel(EXTREME_KEYS, torch.tensor([0])).squeeze(-1)
    assert bool(noise.isfinite().all())
    # The ends are the middles of the first and of the last of 2**52 intervals.
    assert noise.min().item() == pytest.approx(-math.log(53 * math.log(2.0)))
    assert noise.max().item() == pytest.approx(53 * math.log(2.0))


@VARYING
def test_numbers_are_uniform_over_keys_that_differ_in_one_word(what: str) -> None:
    numbers = uniform(keys_that_differ_in(what)).numpy()
    assert stats.kstest(numbers, "uniform").pvalue > HONEST


@VARYING
def test_the_lowest_bits_are_uniform_over_keys_that_differ_in_one_word(what: str) -> None:
    fraction = (uniform(keys_that_differ_in(what)) * 2.0**53).long() % 256
    counts = torch.bincount(fraction, minlength=256).numpy()
    assert stats.chisquare(counts).pvalue > HONEST


@pytest.mark.parametrize("what", ["position", "seed", "stream"])
def test_gumbel_noise_has_its_law_over_keys_that_differ_in_one_word(what: str) -> None:
    noise = gumbel(keys_that_differ_in(what), torch.tensor([3])).squeeze(-1)
    assert stats.kstest(noise.numpy(), "gumbel_r").pvalue > HONEST


def test_gumbel_noise_has_its_law_over_the_tokens_of_one_position() -> None:
    noise = gumbel(key(seed_tensor(0), Stream.COUPLED, 0), torch.arange(COUNT))
    assert stats.kstest(noise.numpy(), "gumbel_r").pvalue > HONEST


@pytest.mark.parametrize("other", [Stream.COUPLED, Stream.DRAFT, Stream.TARGET])
def test_streams_are_independent_at_the_same_position(other: Stream) -> None:
    positions = torch.arange(COUNT)
    coins = uniform(key(seed_tensor(1), Stream.COIN, positions, positions))
    others = uniform(key(seed_tensor(1), other, positions, positions))
    assert abs(correlation(coins, others)) < 3.5
    assert pair_p_value(coins, others) > HONEST


@pytest.mark.parametrize(
    ("what", "keys"), [("position", 20), ("base length", 20), ("seed", 20), ("stream", 3)]
)
def test_neighbouring_keys_are_independent(what: str, keys: int) -> None:
    """Under many keys: each p-value by its share of the level, and all of them as uniform."""
    p_values = []
    for fixed in range(keys):
        numbers = uniform(keys_that_differ_in(what, fixed))
        assert abs(correlation(numbers[:-1], numbers[1:])) < 3.5
        p_values.append(pair_p_value(numbers[:-1], numbers[1:]))
    assert min(p_values) > HONEST / keys
    assert stats.kstest(p_values, "uniform").pvalue > HONEST


def test_neighbouring_tokens_and_positions_have_independent_noise() -> None:
    noise = gumbel(key(seed_tensor(2), Stream.COUPLED, torch.arange(1_000)), torch.arange(101))
    # The law of Gumbel noise, undone: uniform again.
    numbers = torch.exp(-torch.exp(-noise))
    for a, b in [
        (numbers[:, :-1], numbers[:, 1:]),
        (numbers[:-1], numbers[1:]),
        (numbers[:-1, :-1], numbers[1:, 1:]),
        (numbers[:-1, 1:], numbers[1:, :-1]),
    ]:
        assert abs(correlation(a.flatten(), b.flatten())) < 3.5
        assert pair_p_value(a.flatten(), b.flatten()) > HONEST


def test_the_corners_of_the_seed_differ() -> None:
    seeds = [0, 1, 2**63 - 1, 2**63, 2**64 - 1]
    numbers = {float(uniform(key(seed_tensor(s), Stream.COIN, 5, 5))) for s in seeds}
    assert len(numbers) == len(seeds)


def test_every_bit_of_the_seed_changes_half_of_the_bits_of_the_number() -> None:
    positions = torch.arange(1_000)

    def bits(seed: int) -> torch.Tensor:
        numbers = (uniform(key(seed_tensor(seed), Stream.COIN, positions, 1)) * 2.0**53).long()
        return (numbers.unsqueeze(-1) >> torch.arange(53)) & 1

    original = bits(0x0123456789ABCDEF)
    for bit in range(64):
        changed = (original != bits(0x0123456789ABCDEF ^ (1 << bit))).double().mean()
        # The standard error of 53,000 fair bits is 0.0022.
        assert abs(float(changed) - 0.5) < 0.011, bit


def test_the_words_of_a_key_are_not_interchangeable() -> None:
    seed = seed_tensor(4)
    keys = [
        key(seed, Stream.DRAFT, 5),
        key(seed, Stream.DRAFT, 5, 0),
        key(seed, Stream.DRAFT, 5, 6),
        key(seed, Stream.DRAFT, 6, 5),
        key(seed, Stream.DRAFT, 0, 5),
        key(seed, Stream.DRAFT, 6),
        key(seed, Stream.COIN, 5),
    ]
    assert len({int(k) for k in keys}) == len(keys)
