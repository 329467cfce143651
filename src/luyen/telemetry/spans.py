"""Timing of a process: spans as JSON lines, their sums per step, and waits for other roles.

    with span("generate", step=3):
        ...

A nested span inherits the step. Each process writes a file of its own, and a line costs some
microseconds; without an open file only the sums are kept.
"""

import os
import threading
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from io import FileIO
from pathlib import Path
from typing import Any, final

from luyen.base.files import append, json_line, open_lines, writing
from luyen.telemetry.metrics import metric

SCHEMA = 1
"""Version of the event lines."""

metric("time/<span>", unit="s", doc="Seconds spent in spans of this name, summed over the step.")

_step: ContextVar[int | None] = ContextVar("luyen_step", default=None)


@final
class SpanLog:
    """The spans of one process."""

    def __init__(self) -> None:
        self._file: FileIO | None = None
        self._lock = threading.Lock()
        self._sums: dict[tuple[int, str], float] = {}
        self.folder: Path | None = None
        """Folder that spans are written to; None: they are not written."""

    @property
    def step(self) -> int | None:
        """The step of the enclosing span in this thread or task; None outside of steps."""
        return _step.get()

    def open(self, folder: Path, *, process: str) -> Path:
        """Start writing to the file of this process in `folder`, and return its path."""
        path = folder / f"{process}-{os.getpid()}.jsonl"
        self.close()
        with writing(path):
            folder.mkdir(parents=True, exist_ok=True)
            self._file = open_lines(path)
        self.folder = folder
        self._write({"schema": SCHEMA, "process": process, "pid": os.getpid(), "at": time.time()})
        return path

    def close(self) -> None:
        """Stop writing; sums are still counted."""
        with self._lock:
            if self._file is not None:
                self._file.close()
            self._file = self.folder = None

    @contextmanager
    def span(self, name: str, *, step: int | None = None, **ids: Any) -> Generator[None]:
        """Time the block; `ids` name the group, rollout or turn it belongs to."""
        mine = _step.get() if step is None else step
        token = _step.set(mine)
        start, clock = time.time(), time.perf_counter()
        try:
            yield
        finally:
            took = time.perf_counter() - clock
            _step.reset(token)
            self._record(name, mine, start, took, ids)

    def past(
        self, name: str, *, start: float, duration_s: float, step: int | None, **ids: Any
    ) -> None:
        """Write a span with given times; it is not added to the sums, since it may be nested."""
        self._write(span_line(name, start, duration_s, step, ids))

    def drain(self, step: int) -> dict[str, float]:
        """`time/<span>` of a step; clears the sums up to that step."""
        with self._lock:
            sums = {f"time/{name}": s for (at, name), s in self._sums.items() if at == step}
            self._sums = {key: s for key, s in self._sums.items() if key[0] > step}
        return sums

    def _record(
        self, name: str, step: int | None, start: float, took: float, ids: dict[str, Any]
    ) -> None:
        if step is not None:
            with self._lock:
                self._sums[step, name] = self._sums.get((step, name), 0.0) + took
        self._write(span_line(name, start, took, step, ids))

    def _write(self, entry: dict[str, Any]) -> None:
        if self._file is None:
            return
        line = json_line(entry).encode()
        with self._lock:
            if self._file is not None:
                append(self._file, line)


def span_line(
    name: str, start: float, duration_s: float, step: int | None, ids: Mapping[str, Any]
) -> dict[str, Any]:
    """The JSON line of a span of the calling thread."""
    line = {"span": name, "start": round(start, 6), "duration_s": round(duration_s, 6)}
    return {**ids, **line, "step": step, "thread": threading.get_native_id()}


SPANS = SpanLog()
"""The spans of this process."""


def span(name: str, *, step: int | None = None, **ids: Any) -> Any:
    """Time a block in this process's log: `with span("generate", step=3): ...`."""
    return SPANS.span(name, step=step, **ids)


# Waits for other roles: sums by role, and spans of contiguous waits.
#
#     with waiting_for("actor"):
#         ...
#
# Waits are counted per thread: a background thread that waits does not delay the training loop.

_NEAR_S = 0.05
"""Waits with shorter gaps are merged into one span: an engine is polled every few milliseconds."""


@final
class _Stretch:
    """Merged consecutive waits of one thread for one role."""

    __slots__ = ("end", "start", "step", "waited_s")

    def __init__(self, start: float, step: int | None) -> None:
        self.start = self.end = start
        self.step = step
        self.waited_s = 0.0


@final
class _Thread(threading.local):
    """The waits of one thread."""

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
        """Count the time of the block as waiting for a role."""
        start = self._clock()
        try:
            yield
        finally:
            self._add(role, start, self._clock())

    def drain(self) -> dict[str, float]:
        """Seconds that this thread has waited since the last call, by role."""
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
