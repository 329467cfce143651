"""Spans that a process keeps for the controller, and how long it was busy.

    with WORK.span("update_actor"):
        ...

Nothing is written and nothing is sent: what is kept travels with the next answer, and the oldest
spans go when nobody asks. A process that is lost takes its last ones along.
"""

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, final

from luyen.telemetry.own_memory import peak_bytes
from luyen.telemetry.process_report import PastSpan, ProcessReport

_MOST = 4096
"""Spans that are kept; a process that is asked once a step has some dozens."""
_LONGEST_S = 5.0
"""A stretch of passes is cut there: what is lost with its process is not longer."""


def _no_device() -> int | None:
    return None


@final
class OwnWork:
    """The work of one process, from any of its threads."""

    def __init__(
        self,
        *,
        most: int = _MOST,
        clock: Callable[[], float] = time.time,
        counter: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`clock` says when, `counter` how long."""
        self._clock, self._counter = clock, counter
        self._lock = threading.Lock()
        self._spans: deque[PastSpan] = deque(maxlen=most)
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
            self._spans.append(PastSpan(name=name, start=start, duration_s=took, facts=facts))


WORK = OwnWork()
"""The work of this process."""
