"""Where the time goes: spans, one line of JSON each, and their sums per step.

    with span("generate", step=3):
        ...

A span inside another belongs to the same step. Each process writes a file of its own, and a line
costs some microseconds; without an open file only the sums are kept.
"""

import os
import threading
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from io import FileIO
from pathlib import Path
from typing import Any, final

from luyen.base.files import append, json_line, writing
from luyen.base.owned import open_lines
from luyen.telemetry.catalog import metric

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
        """Where spans are written; None: nowhere."""

    @property
    def step(self) -> int | None:
        """The step that this thread or task is in; None: in none."""
        return _step.get()

    def open(self, folder: Path, *, process: str) -> Path:
        """Write from now on to this process's file in `folder`, and return its path."""
        path = folder / f"{process}-{os.getpid()}.jsonl"
        self.close()
        with writing(path):
            folder.mkdir(parents=True, exist_ok=True)
            self._file = open_lines(path)
        self.folder = folder
        self._write({"schema": SCHEMA, "process": process, "pid": os.getpid(), "at": time.time()})
        return path

    def close(self) -> None:
        """Stop writing; sums go on."""
        with self._lock:
            if self._file is not None:
                self._file.close()
            self._file = self.folder = None

    @contextmanager
    def span(self, name: str, *, step: int | None = None, **ids: Any) -> Generator[None]:
        """Time what happens inside; `ids` say which group, rollout or turn it was about."""
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
        """Write a span that was timed elsewhere, often inside others: it is in no sum."""
        self._write(span_line(name, start, duration_s, step, ids))

    def drain(self, step: int) -> dict[str, float]:
        """`time/<span>` of a step; steps up to it are forgotten."""
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
    """A span of the calling thread as it is written."""
    line = {"span": name, "start": round(start, 6), "duration_s": round(duration_s, 6)}
    return {**ids, **line, "step": step, "thread": threading.get_native_id()}


SPANS = SpanLog()
"""The spans of this process."""


def span(name: str, *, step: int | None = None, **ids: Any) -> Any:
    """Time a block in this process's log: `with span("generate", step=3): ...`."""
    return SPANS.span(name, step=step, **ids)
