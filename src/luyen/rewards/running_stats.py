"""Running mean and spread of values over all steps; the order within a step does not matter."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, final

_LEAST_STD = 1e-6
"""A smaller spread is none: dividing by it would make a huge reward of the next real difference."""
_ROUNDING = 1e-9
"""Relative to the mean, likewise: what rounding leaves of large values that are equal."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Moments:
    """How many values there were, their mean, and the sum of squares around it.

    Example:
        >>> seen = Moments().after([1.0, 2.0]).after([3.0])
        >>> seen.count, seen.mean, seen.std
        (3, 2.0, 1.0)
    """

    count: int = 0
    """Values so far."""
    mean: float = 0.0
    """Their mean."""
    squares: float = 0.0
    """Sum of the squared distances from it."""

    @property
    def std(self) -> float:
        """Sample standard deviation (n - 1 below); 0 for fewer than two values."""
        return math.sqrt(self.squares / (self.count - 1)) if self.count > 1 else 0.0

    @property
    def factor(self) -> float:
        """What a distance from the mean is multiplied by; 1 while there is no spread.

        Values that should be equal differ by rounding: a spread of that size is none.
        """
        std = self.std
        return 1.0 / std if std > max(_LEAST_STD, _ROUNDING * abs(self.mean)) else 1.0

    def normalise(self, value: float) -> float:
        """The value less the mean, in standard deviations; itself while nothing was seen."""
        return (value - self.mean) * self.factor

    def after(self, values: Sequence[float]) -> "Moments":
        """With the values of one more step, to the same bits in whatever order they come."""
        if not values:
            return self
        count = self.count + len(values)
        mean = math.fsum(values) / len(values)
        squares = math.fsum((value - mean) ** 2 for value in values)
        away = mean - self.mean
        return Moments(
            count=count,
            mean=self.mean + away * (len(values) / count),
            squares=self.squares + squares + away * away * (self.count * len(values) / count),
        )


@final
class RunningMoments:
    """The moments of every node that is normalised over time, by its path in the tree."""

    def __init__(self, paths: Sequence[str]) -> None:
        self._moments = {path: Moments() for path in paths}

    def __getitem__(self, path: str) -> Moments:
        """What was seen of a node before this step."""
        return self._moments[path]

    def add(self, values: Mapping[str, Sequence[float]]) -> None:
        """Count the values of a step that is done; call it once for each step."""
        for path, some in values.items():
            self._moments[path] = self._moments[path].after(some)

    def state(self) -> dict[str, Any]:
        """Everything that was seen, as JSON can hold it."""
        return {path: asdict(moments) for path, moments in sorted(self._moments.items())}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned; a node that it does not know starts empty."""
        for path in self._moments:
            saved = state.get(path)
            self._moments[path] = Moments() if saved is None else Moments(**saved)
