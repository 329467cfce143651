"""Spans, load and memory of worker processes, with times converted to the controller's clock."""

import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, final

from luyen.base.system import peak_bytes
from luyen.telemetry.spans import SCHEMA


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedSpan:
    """A finished span of work.

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
    """Further attributes."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessReport:
    """Identity, state and new spans of a worker process; its answer to a poll.

    Example:
        >>> ProcessReport(pid=7, node="ab12", came=1.0, answered=1.1, spans=(), lost=0,
        ...               busy_s=0.1, memory_bytes=1 << 30, device_bytes=None).pid
        7
    """

    pid: int
    """Its process id."""
    node: str
    """The node it runs on."""
    came: float
    """When the poll arrived, by the clock of the worker."""
    answered: float
    """When the answer was sent, by the clock of the worker."""
    spans: tuple[FinishedSpan, ...]
    """Spans since the last report."""
    lost: int
    """Spans so far that were dropped because the buffer was full between two polls."""
    busy_s: float
    """Seconds in which it was busy so far, up to `answered`."""
    memory_bytes: int
    """Peak main memory so far."""
    device_bytes: int | None
    """Peak GPU memory so far; None without a GPU."""


# Peak memory of this process.

# Worker side: spans buffered for the controller, and busy time.
#
#     with WORK.span("update_actor"):
#         ...
#
# A worker writes no file and sends no message of its own: spans are returned with the next report.
# If the controller does not poll, the oldest spans are dropped. Spans since the last report are
# lost with the process.

_MOST_KEPT = 4096
"""Size of the buffer; with one poll per step, a process has some dozens of spans."""
_LONGEST_S = 5.0
"""Longest span of engine passes: no more than this is lost with the process."""


def _no_device() -> int | None:
    return None


@final
class WorkerSpans:
    """Spans and busy time of one worker process; any thread may add spans."""

    def __init__(
        self,
        *,
        most: int = _MOST_KEPT,
        clock: Callable[[], float] = time.time,
        counter: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`clock` gives start times, `counter` durations."""
        self._clock, self._counter = clock, counter
        self._lock = threading.Lock()
        self._spans: deque[FinishedSpan] = deque(maxlen=most)
        self._lost = 0
        self._open = 0
        self._busy_s = self._since = 0.0
        self._stretch: tuple[float, float] | None = None
        self._passes = self._answers = 0
        self.device_bytes: Callable[[], int | None] = _no_device
        """Returns the peak GPU memory; set by the module that imports torch."""

    @contextmanager
    def span(self, name: str, **facts: Any) -> Generator[dict[str, Any]]:
        """Time the block and count it as busy; facts may be added to the yielded dict."""
        start, began = self._clock(), self._begin()
        try:
            yield facts
        finally:
            self._end(name, start, began, facts)

    def begin_pass(self) -> None:
        """An engine begins a pass; the first pass after an idle time begins a span."""
        if self._stretch is None:
            self._stretch = self._clock(), self._begin()

    def end_pass(self, *, answers: int, is_idle: bool) -> None:
        """The pass has ended; the span ends when the engine is idle, or after `_LONGEST_S`."""
        self._passes += 1
        self._answers += answers
        is_long = self._stretch is not None and self._counter() - self._stretch[1] > _LONGEST_S
        if is_idle or is_long:
            self.end_stretch()

    def end_stretch(self) -> None:
        """End the current span of passes, if there is one."""
        if self._stretch is None:
            return
        start, began = self._stretch
        facts = {"passes": self._passes, "answers": self._answers}
        self._stretch, self._passes, self._answers = None, 0, 0
        self._end("draw", start, began, facts)

    def report(self, *, node: str, came: float) -> ProcessReport:
        """The state of the process with the spans since the last report; clears the buffer."""
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


# Clock offset of a remote process, estimated from round trips as in NTP.
#
# A poll is sent at `sent` and its answer arrives at `back`, by the local clock; the poll arrives at
# `came` and is answered at `answered`, by the remote clock. Whatever the two latencies are, the
# estimated offset is wrong by at most half of their sum.

_LATEST = 64
"""Round trips that are remembered: clocks drift, so old ones are less accurate than their bound."""

_ROUNDING_S = 1e-6
"""Seconds since 1970 are rounded to about a quarter of this."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RoundTrip:
    """Times of a poll and its answer, by two clocks.

    Example:
        >>> trip = RoundTrip(sent=10.0, came=110.25, answered=111.25, back=11.5)
        >>> trip.offset_s, trip.error_s
        (100.0, 0.25)
    """

    sent: float
    """When the poll was sent, by the local clock."""
    came: float
    """When it arrived, by the remote clock."""
    answered: float
    """When the answer was sent, by the remote clock."""
    back: float
    """When the answer arrived, by the local clock."""

    @property
    def offset_s(self) -> float:
        """By how much the remote clock is ahead, if both latencies are equal."""
        return ((self.came - self.sent) + (self.answered - self.back)) / 2

    @property
    def error_s(self) -> float:
        """Bound on the error of `offset_s`; negative if a clock was set during the round trip."""
        return ((self.back - self.sent) - (self.answered - self.came)) / 2


@final
class RemoteClock:
    """The remote clock, by the round trip with the smallest error among the latest.

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
        """Add a round trip; one during which a clock was set is ignored."""
        if trip.error_s > -_ROUNDING_S:
            self._trips.append(trip)
            self._best = min(self._trips, key=lambda one: one.error_s)

    @property
    def error_s(self) -> float | None:
        """Bound on the error of `ours`; None before the first round trip."""
        return None if self._best is None else max(self._best.error_s, 0.0)

    def ours(self, theirs: float) -> float:
        """A remote time converted to the local clock; unchanged before the first round trip."""
        return theirs if self._best is None else theirs - self._best.offset_s


# Controller side: a remote process, and its spans as lines in the controller's time.

_MOST = 1 << 16
"""Spans that may wait to be written."""


@final
class RemoteProcess:
    """One incarnation of a worker process, as seen by the controller."""

    def __init__(self, role: str, index: int, *, pid: int, node: str) -> None:
        self.role = role
        self.index = index
        self.pid = pid
        self.node = node
        self.memory_bytes = 0
        """Peak main memory so far."""
        self.device_bytes: int | None = None
        """Peak GPU memory so far; None without a GPU."""
        self._clock = RemoteClock()
        self._spans: deque[tuple[FinishedSpan, int | None]] = deque(maxlen=_MOST)
        self._lost = 0
        self._busy_s = self._taken_busy_s = 0.0
        self._has_head = False

    def heard(self, report: ProcessReport, *, sent: float, back: float, step: int | None) -> None:
        """Add a report; `sent` and `back` are the local times of the poll and of its answer."""
        trip = RoundTrip(sent=sent, came=report.came, answered=report.answered, back=back)
        self._clock.heard(trip)
        self.memory_bytes = max(self.memory_bytes, report.memory_bytes)
        if report.device_bytes is not None:
            self.device_bytes = max(self.device_bytes or 0, report.device_bytes)
        self._lost = max(self._lost, report.lost)
        # Reports may arrive out of order.
        self._busy_s = max(self._busy_s, report.busy_s)
        self._spans += [(span, step) for span in report.spans]

    def take_busy_s(self) -> float:
        """Busy seconds since the last call."""
        fresh, self._taken_busy_s = self._busy_s - self._taken_busy_s, self._busy_s
        return fresh

    def take_lines(self) -> list[dict[str, Any]]:
        """Lines to write: a head line with the identity before the first span."""
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
