"""How long the loop waits for others: sums by role, and stretches in the spans of this process.

    with waiting_for("actor"):
        ...

A thread waits for itself: what a thread beside the loop waits for does not hold the loop up.
"""

import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import final

from luyen.telemetry.spans import SPANS, SpanLog

_NEAR_S = 0.05
"""Waits that follow each other so closely are one stretch: an engine is polled in milliseconds."""


@final
class _Stretch:
    """Waits of one thread for one role, one after the other."""

    __slots__ = ("end", "start", "step", "waited_s")

    def __init__(self, start: float, step: int | None) -> None:
        self.start = self.end = start
        self.step = step
        self.waited_s = 0.0


@final
class _Thread(threading.local):
    """What one thread has waited for."""

    def __init__(self) -> None:
        self.sums: dict[str, float] = {}
        self.open: dict[str, _Stretch] = {}


@final
class Waits:
    """The waits of one process."""

    def __init__(self, spans: SpanLog = SPANS, *, clock: Callable[[], float] = time.time) -> None:
        self._spans, self._clock = spans, clock
        self._mine = _Thread()

    @contextmanager
    def waiting_for(self, role: str) -> Generator[None]:
        """Count what happens inside as waiting for a role."""
        start = self._clock()
        try:
            yield
        finally:
            self._add(role, start, self._clock())

    def drain(self) -> dict[str, float]:
        """Seconds by role that this thread has waited since it asked last."""
        mine = self._mine
        for role, stretch in mine.open.items():
            self._write(role, stretch)
        sums, mine.sums, mine.open = mine.sums, {}, {}
        return sums

    def _add(self, role: str, start: float, end: float) -> None:
        mine, step = self._mine, self._spans.step
        mine.sums[role] = mine.sums.get(role, 0.0) + end - start
        stretch = mine.open.get(role)
        if stretch is None or start - stretch.end > _NEAR_S or stretch.step != step:
            if stretch is not None:
                self._write(role, stretch)
            stretch = mine.open[role] = _Stretch(start, step)
        stretch.end = end
        stretch.waited_s += end - start

    def _write(self, role: str, stretch: _Stretch) -> None:
        self._spans.past(
            f"wait for {role}",
            start=stretch.start,
            duration_s=stretch.end - stretch.start,
            step=stretch.step,
            waited_s=round(stretch.waited_s, 6),
        )


WAITS = Waits()
"""The waits of this process."""
waiting_for = WAITS.waiting_for
