"""Counter-based randomness: every number is a pure function of its key.

A key is (seed, stream, absolute position[, round's base length]). Nothing depends on batch rows,
arrival order or a global generator, so that a session gives the same numbers alone, among others,
and after it was resumed on another process.

The generator is the SplitMix64 finalizer (Steele, Lea and Flood, OOPSLA 2014) over a Weyl sequence
that starts at the hash of the key. Integers wrap modulo 2**64, which torch's int64 does.
"""

from __future__ import annotations

from enum import IntEnum

import torch

CACHED_NUMBERS = 1 << 16
"""So many at a time stay in a CPU's cache, and take half as long as all at once."""

_MASK = (1 << 64) - 1
_GOLDEN_GAMMA = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB


class Stream(IntEnum):
    """Which random number of a position is meant. Streams are independent of each other."""

    COUPLED = 1
    """The Gumbel noise that draft and target share."""
    DRAFT = 2
    """The draft's own draw."""
    COIN = 3
    """The coin that accepts or rejects a drafted token."""
    TARGET = 4
    """The target's draw of a correction or bonus token."""


def _signed(value: int) -> int:
    """The int64 with the same 64 bits as `value`."""
    value &= _MASK
    return value - (1 << 64) if value >> 63 else value


def _shift_right(z: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical shift: torch shifts int64 arithmetically."""
    return (z >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def _mix(z: torch.Tensor) -> torch.Tensor:
    """The SplitMix64 finalizer, a bijection of int64 tensors."""
    z = (z ^ _shift_right(z, 30)).mul_(_signed(_MIX_1))
    z = z.bitwise_xor_(_shift_right(z, 27)).mul_(_signed(_MIX_2))
    return z.bitwise_xor_(_shift_right(z, 31))


def seed_tensor(seed: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """A 0-dimensional int64 tensor that holds the 64 bits of an unsigned seed."""
    return torch.tensor(_signed(seed), dtype=torch.int64, device=device)


def key(seed: torch.Tensor, stream: Stream, *words: torch.Tensor | int) -> torch.Tensor:
    """Hashes a seed, a stream and further int64 words, broadcast together, to int64 keys.

    REJECTION and BLOCK key the draft's draws and the coins by the round's base length as well as
    by position. BLOCK needs it: where it stops depends on the coins and tokens *after* that place,
    so that the next round, which covers the same positions, must not see the same numbers again.
    """
    # The seed is mixed before anything joins it: seeds that differ by a simple number must not
    # meet each other's streams.
    hashed = _mix(seed + _signed(_GOLDEN_GAMMA))
    for word in (int(stream), *words):
        hashed = _mix((hashed ^ word) + _signed(_GOLDEN_GAMMA))
    return hashed


def _to_unit(bits: torch.Tensor) -> torch.Tensor:
    """Maps int64 bits to float64 in [0, 1): 53 bits, so that no value rounds up to 1."""
    return _shift_right(bits, 11).to(torch.float64) * 2.0**-53


def uniform(keys: torch.Tensor) -> torch.Tensor:
    """One float64 in [0, 1) for each int64 key, same shape."""
    return _to_unit(_mix(keys + _signed(_GOLDEN_GAMMA)))


def gumbel(keys: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise, one number for each token under each key.

    Args:
        keys: int64 of shape [...].
        token_ids: int64 of shape [..., N], or [N] for the same tokens under every key.

    Returns:
        float64 of shape [..., N]: −log(−log U), always finite.
    """
    size = token_ids.shape[-1]
    block = CACHED_NUMBERS // size or 1
    if keys.device.type != "cpu" or keys.numel() <= block:
        return _gumbel(keys, token_ids)
    parts = keys.flatten().split(block)
    ids = [token_ids] * len(parts)
    if token_ids.dim() > 1:
        ids = list(token_ids.expand(*keys.shape, size).reshape(-1, size).split(block))
    noise = [_gumbel(part, tokens) for part, tokens in zip(parts, ids, strict=True)]
    return torch.cat(noise).view(*keys.shape, size)


def gumbel_exceeds(key: torch.Tensor, size: int, least: torch.Tensor) -> torch.Tensor:
    """The tokens whose noise may exceed a bound: all that do, and hardly one that does not.

    It takes no logarithm of any token's number, and a fraction of the time of `gumbel`.

    Args:
        key: int64 scalar.
        size: V; the tokens are 0 … V − 1.
        least: float64 scalar, the bound; NaN is as good as infinity.

    Returns:
        int64 [n], ascending.
    """
    # g > x where −log U < exp(−x), so where 1 − U < 1 − exp(−exp(−x)), with room for rounding.
    chance = -torch.expm1(-torch.exp(-least))
    bound = (1 << 52) - 2 - int(torch.nan_to_num(chance * (1.0 + 1e-9)) * 2.0**52)
    return (_gumbel_bits(key, torch.arange(size)) > bound).nonzero()[:, 0]


def _gumbel(keys: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    # The middle of one of 2**52 intervals: neither 0 nor, by rounding, 1.
    u = _gumbel_bits(keys.unsqueeze(-1), token_ids).to(torch.float64).add_(0.5).mul_(2.0**-52)
    return u.log_().neg_().log_().neg_()


def _gumbel_bits(keys: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """int64 in [0, 2**52), of keys and tokens that broadcast."""
    return _shift_right(_mix(keys + (token_ids + 1) * _signed(_GOLDEN_GAMMA)), 12)
