"""From values to places on a drawing: round ticks, thinned points, means over a window."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """A straight map from values to pixels.

    Example:
        >>> Scale(low=0.0, high=2.0, start=10.0, end=110.0)(1.0)
        60.0
    """

    low: float
    """Value at `start`."""
    high: float
    """Value at `end`."""
    start: float
    """First pixel."""
    end: float
    """Last pixel."""

    def __call__(self, value: float) -> float:
        """Where a value lies."""
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)


def value_range(values: Sequence[float]) -> tuple[float, float]:
    """Lowest and highest finite value with some room; never of width 0.

    Example:
        >>> value_range([1.0, 1.0])
        (0.5, 1.5)
    """
    finite = [value for value in values if math.isfinite(value)] or [0.0]
    low, high = min(finite), max(finite)
    room = 0.06 * (high - low)
    if room == 0.0 or not math.isfinite(room):
        room = 0.5 * abs(low) if low else 0.5
    return low - room, high + room


def ticks(low: float, high: float, count: int) -> list[float]:
    """Round values between two ends, about `count` of them.

    Example:
        >>> ticks(0.0, 1.0, 4)
        [0.0, 0.5, 1.0]
    """
    raw = (high - low) / max(count, 1)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * m for m in (1, 2, 5, 10) if power * m >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [float(f"{i * step:.12g}") for i in range(first, last + 1)]


def thinned(points: Sequence[tuple[int, float]], most: int) -> list[tuple[int, float]]:
    """At most so many points: of each stretch its lowest and its highest, so that no peak is lost.

    Example:
        >>> thinned([(1, 0.0), (2, 9.0), (3, 1.0), (4, 1.0)], 4)
        [(1, 0.0), (2, 9.0), (3, 1.0), (4, 1.0)]
    """
    if len(points) <= most:
        return list(points)
    stretches = most // 2
    kept: list[tuple[int, float]] = []
    for i in range(stretches):
        stretch = points[i * len(points) // stretches : (i + 1) * len(points) // stretches]
        ends = {min(stretch, key=lambda p: p[1]), max(stretch, key=lambda p: p[1])}
        kept += sorted(ends)
    return kept


def running_mean(values: Sequence[float], window: int) -> list[float]:
    """Mean of each value and those before it, up to `window`.

    Example:
        >>> running_mean([1.0, 3.0, 5.0], 2)
        [1.0, 2.0, 4.0]
    """
    means: list[float] = []
    for end in range(1, len(values) + 1):
        near = values[max(0, end - window) : end]
        means.append(math.fsum(near) / len(near))
    return means
