"""The course of one metric over the steps of a run, and medians of its ends."""

from dataclasses import dataclass
from statistics import median
from typing import final

WINDOW = 5
"""Values a median is taken over: two odd steps among them decide nothing."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """A metric at the steps that have it.

    Example:
        >>> Course(steps=(1, 2, 3), values=(0.1, 9.0, 0.2)).end()
        0.2
    """

    steps: tuple[int, ...]
    """Steps, in order."""
    values: tuple[float, ...]
    """The value at each; all are finite."""

    def __len__(self) -> int:
        return len(self.values)

    @property
    def has_end(self) -> bool:
        """Whether there is enough to say where it stands."""
        return len(self) >= WINDOW

    @property
    def has_both_ends(self) -> bool:
        """Whether there is enough to compare where it stands with where it came from."""
        return len(self) >= 2 * WINDOW

    def start(self) -> float:
        """Median of the first values."""
        return median(self.values[:WINDOW])

    def end(self) -> float:
        """Median of the latest values."""
        return median(self.values[-WINDOW:])

    @property
    def last_steps(self) -> tuple[int, ...]:
        """The steps that `end` looks at."""
        return self.steps[-WINDOW:]
