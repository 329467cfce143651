"""The clock of another process, read by the questions that it answers.

A question leaves at `sent` and its answer is back at `back`, by our clock; it came at `came` and
was answered at `answered`, by theirs. Whatever the ways took, our reading of their clock is wrong
by at most half of the time that the two ways took together.
"""

from collections import deque
from dataclasses import dataclass
from typing import final

_LATEST = 64
"""Round trips that are remembered: clocks drift, so that an old one is worth less than it says."""

_ROUNDING_S = 1e-6
"""Seconds since 1970 are rounded to about a quarter of this."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RoundTrip:
    """A question and its answer, by two clocks.

    Example:
        >>> trip = RoundTrip(sent=10.0, came=110.25, answered=111.25, back=11.5)
        >>> trip.offset_s, trip.error_s
        (100.0, 0.25)
    """

    sent: float
    """When the question left, by our clock."""
    came: float
    """When it came, by theirs."""
    answered: float
    """When the answer left, by theirs."""
    back: float
    """When the answer was here, by ours."""

    @property
    def offset_s(self) -> float:
        """By how much their clock is ahead, if both ways took equally long."""
        return ((self.came - self.sent) + (self.answered - self.back)) / 2

    @property
    def error_s(self) -> float:
        """By how much `offset_s` can be wrong; below 0: a clock was set meanwhile."""
        return ((self.back - self.sent) - (self.answered - self.came)) / 2


@final
class OtherClock:
    """Their clock, by the shortest of the latest round trips.

    Example:
        >>> clock = OtherClock()
        >>> clock.heard(RoundTrip(sent=0.0, came=7.0, answered=7.0, back=4.0))
        >>> clock.heard(RoundTrip(sent=5.0, came=10.5, answered=10.5, back=6.0))
        >>> clock.ours(20.0), clock.error_s
        (15.0, 0.5)
    """

    def __init__(self) -> None:
        self._trips: deque[RoundTrip] = deque(maxlen=_LATEST)
        self._best: RoundTrip | None = None

    def heard(self, trip: RoundTrip) -> None:
        """Take in a round trip; one during which a clock was set says nothing."""
        if trip.error_s > -_ROUNDING_S:
            self._trips.append(trip)
            self._best = min(self._trips, key=lambda one: one.error_s)

    @property
    def error_s(self) -> float | None:
        """By how much `ours` can be wrong; None: nothing was heard."""
        return None if self._best is None else max(self._best.error_s, 0.0)

    def ours(self, theirs: float) -> float:
        """A time of their clock by ours; as it is where nothing was heard."""
        return theirs if self._best is None else theirs - self._best.offset_s
