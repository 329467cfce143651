"""Spans, load and memory of worker processes, told in the controller's clock."""

import math
import os
import re
import resource
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from luyen.telemetry.spans import SCHEMA


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedSpan:
    """A stretch of work that has ended.

    Example:
        >>> FinishedSpan(name="update_actor", start=1.0, duration_s=0.5, facts={}).duration_s
        0.5
    """

    name: str
    """What was done."""
    start: float
    """When it began, by the clock of its process, in seconds since 1970."""
    duration_s: float
    """How long it took."""
    facts: Mapping[str, Any]
    """What else is known of it."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessReport:
    """Who a process is, how it stands, and what it did since it was asked last.

    Example:
        >>> ProcessReport(pid=7, node="ab12", came=1.0, answered=1.1, spans=(), lost=0,
        ...               busy_s=0.1, memory_bytes=1 << 30, device_bytes=None).pid
        7
    """

    pid: int
    """Its process."""
    node: str
    """Where it runs."""
    came: float
    """When the question came, by its clock."""
    answered: float
    """When the answer left, by its clock."""
    spans: tuple[FinishedSpan, ...]
    """What it did since the last report."""
    lost: int
    """Spans so far that nobody asked for in time."""
    busy_s: float
    """Seconds so far in which it did something, up to `answered`."""
    memory_bytes: int
    """Most main memory so far."""
    device_bytes: int | None
    """Most memory of its GPU so far; None: it has none."""


# The most memory that this process has held.

_STATUS = Path("/proc/self/status")
_PEAK = re.compile(r"VmHWM:\s+(\d+) kB")


def peak_bytes() -> int:
    """Most bytes of main memory so far, those that are shared with other processes included.

    Example:
        >>> peak_bytes() > 1_000_000
        True
    """
    # The kernel hands ru_maxrss on from the parent; VmHWM is this process's own.
    found = _PEAK.search(_STATUS.read_text()) if _STATUS.is_file() else None
    if found is not None:
        return int(found[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


# Spans that a process keeps for the controller, and how long it was busy.
#
#     with WORK.span("update_actor"):
#         ...
#
# Nothing is written and nothing is sent: what is kept travels with the next answer, and the
# oldest spans go when nobody asks. A process that is lost takes its last ones along.

_MOST_KEPT = 4096
"""Spans that are kept; a process that is asked once a step has some dozens."""
_LONGEST_S = 5.0
"""A stretch of passes is cut there: what is lost with its process is not longer."""


def _no_device() -> int | None:
    return None


@final
class WorkerSpans:
    """The work of one process, from any of its threads."""

    def __init__(
        self,
        *,
        most: int = _MOST_KEPT,
        clock: Callable[[], float] = time.time,
        counter: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`clock` says when, `counter` how long."""
        self._clock, self._counter = clock, counter
        self._lock = threading.Lock()
        self._spans: deque[FinishedSpan] = deque(maxlen=most)
        self._lost = 0
        self._open = 0
        self._busy_s = self._since = 0.0
        self._stretch: tuple[float, float] | None = None
        self._passes = self._answers = 0
        self.device_bytes: Callable[[], int | None] = _no_device
        """Most memory of the GPU so far; whoever may load torch sets it."""

    @contextmanager
    def span(self, name: str, **facts: Any) -> Generator[dict[str, Any]]:
        """Time what happens inside; it counts as busy. More facts may be added until it ends."""
        start, began = self._clock(), self._begin()
        try:
            yield facts
        finally:
            self._end(name, start, began, facts)

    def begin_pass(self) -> None:
        """An engine with work makes a pass; the first one begins a stretch."""
        if self._stretch is None:
            self._stretch = self._clock(), self._begin()

    def end_pass(self, *, answers: int, is_idle: bool) -> None:
        """It has made it; a stretch ends when nothing is left to do, or when it becomes long."""
        self._passes += 1
        self._answers += answers
        is_long = self._stretch is not None and self._counter() - self._stretch[1] > _LONGEST_S
        if is_idle or is_long:
            self.end_stretch()

    def end_stretch(self) -> None:
        """The engine has nothing to do; a stretch that was begun ends."""
        if self._stretch is None:
            return
        start, began = self._stretch
        facts = {"passes": self._passes, "answers": self._answers}
        self._stretch, self._passes, self._answers = None, 0, 0
        self._end("draw", start, began, facts)

    def report(self, *, node: str, came: float) -> ProcessReport:
        """How the process stands, with the spans since the last report, which it then forgets."""
        memory, device = peak_bytes(), self.device_bytes()
        with self._lock:
            spans, lost = tuple(self._spans), self._lost
            self._spans.clear()
            running = self._counter() - self._since if self._open else 0.0
            busy_s = self._busy_s + running
        return ProcessReport(
            pid=os.getpid(),
            node=node,
            came=came,
            answered=self._clock(),
            spans=spans,
            lost=lost,
            busy_s=busy_s,
            memory_bytes=memory,
            device_bytes=device,
        )

    def _begin(self) -> float:
        with self._lock:
            now = self._counter()
            if not self._open:
                self._since = now
            self._open += 1
        return now

    def _end(self, name: str, start: float, began: float, facts: dict[str, Any]) -> None:
        with self._lock:
            now = self._counter()
            self._open -= 1
            if not self._open:
                self._busy_s += now - self._since
            self._lost += len(self._spans) == self._spans.maxlen
            took = now - began
            self._spans.append(FinishedSpan(name=name, start=start, duration_s=took, facts=facts))


WORK = WorkerSpans()
"""The work of this process."""


# The clock of another process, read by the questions that it answers.
#
# A question leaves at `sent` and its answer is back at `back`, by our clock; it came at `came`
# and was answered at `answered`, by theirs. Whatever the ways took, our reading of their clock
# is wrong by at most half of the time that the two ways took together.

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
class RemoteClock:
    """Their clock, by the shortest of the latest round trips.

    Example:
        >>> clock = RemoteClock()
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


# Another process as the controller knows it, and its spans as lines in the controller's time.

_MOST = 1 << 16
"""Spans that wait to be written."""


@final
class RemoteProcess:
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
        self._clock = RemoteClock()
        self._spans: deque[tuple[FinishedSpan, int | None]] = deque(maxlen=_MOST)
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

    def _line(self, span: FinishedSpan, step: int | None) -> dict[str, Any]:
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
