"""What a forward pass costs: measured times, and what they say about passes of other sizes."""

from __future__ import annotations

import math
from bisect import bisect_left

# Sizes up to this one are told apart; above it there are eight buckets an octave, so that a bucket
# spans less than a tenth of its size.
_EXACT = 16
_PER_OCTAVE = 8
_LARGEST = 1e6
# How many measurements a mean stands for at most. More would follow a change too slowly.
_MEMORY = 16.0
# A single time that is further off than this factor is a stall, or the first of a change that will
# be confirmed: it counts as if it were just as far off.
_FARTHEST = 2.0
# What was not measured again fades, so that a wrong first impression of a size that is avoided
# since is not kept for good: 16 measurements are forgotten after 1,000 others.
_FADING = 0.995
_FORGOTTEN = 0.1
# Up to here, or up to twice what was seen, a curve is trusted to go on as it did. Farther out it
# is taken to be proportional, so that sizes are explored by doubling.
_NEAR = 8.0


def usable(value: float, largest: float = 1e12) -> float:
    """A measured number, within what can be counted with: one that is no number is 0."""
    return 0.0 if math.isnan(value) else min(max(float(value), 0.0), largest)


class Average:
    """A mean in which old values fade, and in which no single value counts for much."""

    def __init__(self, memory: float = _MEMORY) -> None:
        self.value = 0.0
        self.weight = 0.0
        """How many values it stands for."""
        self._memory = memory

    @property
    def known(self) -> bool:
        """Whether there was a value."""
        return self.weight > 0.0

    def add(self, value: float, weight: float = 1.0) -> None:
        """Counts a value."""
        value = usable(value)
        if self.value > 0.0:
            value = min(max(value, self.value / _FARTHEST), self.value * _FARTHEST)
        self.weight = min(self.weight + weight, self._memory)
        self.value += (value - self.value) * weight / self.weight


class _Bucket:
    """The measurements of about one size."""

    def __init__(self) -> None:
        self.size = 0.0
        """Their mean size."""
        self.time = 0.0
        self.weight = 0.0
        self.at = 0.0
        """How much had been measured when it last was."""


class Curve:
    """Time as a function of a pass's size: it never falls, and between measurements it is straight.

    Below the smallest size that was measured it is flat, for a small pass is bound by moving the
    weights. Beyond the largest it goes on with its last slope, and further out in proportion.
    """

    def __init__(self) -> None:
        self._buckets: dict[int, _Bucket] = {}
        self._measured = 0.0
        self._slope = 0.0
        """Beyond the last of them."""
        self._points: list[tuple[float, float]] | None = []
        """The curve's corners; None if they have to be found anew."""

    @property
    def known(self) -> bool:
        """Whether anything was measured."""
        return bool(self._buckets)

    @property
    def points(self) -> list[tuple[float, float]]:
        """The curve's corners: sizes and times, both rising."""
        if self._points is None:
            self._points = self._fit()
            self._slope = self._last_slope()
        return self._points

    def add(self, size: float, time: float, weight: float = 1.0) -> None:
        """Counts a measurement, or the part `weight` of one that is reported several times."""
        size = min(max(usable(size), 1.0), _LARGEST)
        time = usable(time)
        if self._buckets:
            expected = max(self(size), 1e-9)
            bounded = min(max(time, expected / _FARTHEST), expected * _FARTHEST)
            # A new size may be anything, but a size that was seen is about as it was.
            time = bounded if _index(size) in self._buckets else time
        self._measured += weight
        bucket = self._buckets.setdefault(_index(size), _Bucket())
        bucket.weight = min(self._weight(bucket) + weight, _MEMORY)
        share = min(weight / bucket.weight, 1.0)
        bucket.size += (size - bucket.size) * share
        bucket.time += (time - bucket.time) * share
        bucket.at = self._measured
        self._points = None

    def __call__(self, size: float) -> float:
        """The time of a pass of this size, or 0 if nothing was measured."""
        points = self.points
        if not points:
            return 0.0
        last_size, last_time = points[-1]
        if size <= last_size:
            return self._within(size)
        end = max(_NEAR, 2.0 * last_size)
        slope = self._slope
        near = last_time + slope * (min(size, end) - last_size)
        return near if size <= end else near * size / end

    def slope(self, size: float) -> float:
        """The time of one more row: the mean over sizes around this one, so that it has no jumps.

        A price that jumped would make whoever heeds it swing from one side of the jump to the
        other.
        """
        width = max(1.0, size / 4.0)
        low = max(size - width, 1.0)
        return (self(size + width) - self(low)) / (size + width - low)

    def _within(self, size: float) -> float:
        points = self.points
        place = bisect_left(points, (size,))
        if place == 0:
            return points[0][1]
        if place == len(points):
            return points[-1][1]
        (x0, y0), (x1, y1) = points[place - 1], points[place]
        return y0 + (y1 - y0) * (size - x0) / (x1 - x0) if x1 > x0 else y1

    def _last_slope(self) -> float:
        """Over the last third, for two neighbours differ by noise."""
        size, time = self.points[-1]
        begin = max(size * 2.0 / 3.0, self.points[0][0])
        if begin >= size:
            # One size only. A row costs something, but less than in proportion: a cautious guess
            # that is soon replaced, since it does not forbid to try.
            return time / (2.0 * size + _NEAR)
        return (time - self._within(begin)) / (size - begin)

    def _weight(self, bucket: _Bucket) -> float:
        return bucket.weight * math.pow(_FADING, min(self._measured - bucket.at, 1e4))

    def _fit(self) -> list[tuple[float, float]]:
        """The rising curve that is nearest to the buckets: those that fall are pooled."""
        self._buckets = {
            index: bucket
            for index, bucket in self._buckets.items()
            if bucket.at == self._measured or self._weight(bucket) > _FORGOTTEN
        }
        pools: list[tuple[float, float, list[float]]] = []
        for _, bucket in sorted(self._buckets.items()):
            weight, time, sizes = self._weight(bucket), bucket.time, [bucket.size]
            while pools and pools[-1][1] >= time:
                other_weight, other_time, other_sizes = pools.pop()
                time = (time * weight + other_time * other_weight) / (weight + other_weight)
                weight += other_weight
                sizes = other_sizes + sizes
            pools.append((weight, time, sizes))
        return [(size, time) for _, time, sizes in pools for size in sorted({sizes[0], sizes[-1]})]


def _index(size: float) -> int:
    if size <= _EXACT:
        return round(size)
    return _EXACT + round(_PER_OCTAVE * math.log2(size / _EXACT))
