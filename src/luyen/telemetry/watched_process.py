"""Another process as the controller knows it, and its spans as lines in the controller's time."""

import math
from collections import deque
from typing import Any, final

from luyen.telemetry.clocks import OtherClock, RoundTrip
from luyen.telemetry.process_report import PastSpan, ProcessReport
from luyen.telemetry.spans import SCHEMA

_MOST = 1 << 16
"""Spans that wait to be written."""


@final
class WatchedProcess:
    """One process in one of its lives."""

    def __init__(self, role: str, index: int, *, pid: int, node: str) -> None:
        self.role = role
        self.index = index
        self.pid = pid
        self.node = node
        self.memory_bytes = 0
        """Most main memory so far."""
        self.device_bytes: int | None = None
        """Most memory of its GPU so far; None: it has none."""
        self._clock = OtherClock()
        self._spans: deque[tuple[PastSpan, int | None]] = deque(maxlen=_MOST)
        self._lost = 0
        self._busy_s = self._told_busy_s = 0.0
        self._has_head = False

    def heard(self, report: ProcessReport, *, sent: float, back: float, step: int | None) -> None:
        """Take in a report, and when its question left and its answer was here, by our clock."""
        trip = RoundTrip(sent=sent, came=report.came, answered=report.answered, back=back)
        self._clock.heard(trip)
        self.memory_bytes = max(self.memory_bytes, report.memory_bytes)
        if report.device_bytes is not None:
            self.device_bytes = max(self.device_bytes or 0, report.device_bytes)
        self._lost = max(self._lost, report.lost)
        # Reports may overtake each other.
        self._busy_s = max(self._busy_s, report.busy_s)
        self._spans += [(span, step) for span in report.spans]

    def take_busy_s(self) -> float:
        """Seconds in which it did something, of those that were not told before."""
        fresh, self._told_busy_s = self._busy_s - self._told_busy_s, self._busy_s
        return fresh

    def take_lines(self) -> list[dict[str, Any]]:
        """What is to be written: who it is before the first of its spans."""
        spans = [self._spans.popleft() for _ in range(len(self._spans))]
        if not spans:
            return []
        lines = [] if self._has_head else [self._head()]
        self._has_head = True
        return lines + [self._line(span, step) for span, step in spans]

    def _head(self) -> dict[str, Any]:
        error = self._clock.error_s
        return {
            "schema": SCHEMA,
            "process": self.role,
            "index": self.index,
            "pid": self.pid,
            "node": self.node,
            "clock_error_s": None if error is None else _up(error),
            "lost": self._lost,
        }

    def _line(self, span: PastSpan, step: int | None) -> dict[str, Any]:
        return {
            **span.facts,
            "span": span.name,
            "start": round(self._clock.ours(span.start), 6),
            "duration_s": round(span.duration_s, 6),
            "step": step,
        }


def _up(seconds: float) -> float:
    """Rounded up to whole microseconds: a bound stays one."""
    return math.ceil(seconds * 1e6) / 1e6
