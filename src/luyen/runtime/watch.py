"""What the roles of a cluster do: numbers for the metrics of a step, spans for its timeline.

Everything arrives with answers that the controller waits for anyway. Nothing here can end a run: a
process that is lost loses its last spans, and a disk that takes no more spans ends their writing.
"""

import threading
import time
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import final

from luyen.base.errors import UserError
from luyen.base.files import append, json_line, writing
from luyen.telemetry.process_report import ProcessReport
from luyen.telemetry.spans import SPANS, SpanLog
from luyen.telemetry.waits import WAITS, Waits
from luyen.telemetry.watched_process import WatchedProcess

GIB = 1 << 30


@final
class RoleWatch:
    """Collects what processes report. It may be told from any thread."""

    def __init__(
        self,
        *,
        spans: SpanLog = SPANS,
        waits: Waits = WAITS,
        counter: Callable[[], float] = time.monotonic,
    ) -> None:
        """Files of processes go where `spans` writes the controller's."""
        self._spans, self._waits, self._counter = spans, waits, counter
        self._lock = threading.Lock()
        self._lives: list[WatchedProcess] = []
        self._known: dict[tuple[str, int], WatchedProcess] = {}
        self._publications: list[tuple[float, int, int]] = []
        self._can_write = True
        self._since = counter()

    def restart(self) -> None:
        """Numbers are counted from now on: what came before belongs to no step."""
        with self._lock:
            for process in self._lives:
                process.take_busy_s()
            self._waits.drain()
            self._since = self._counter()

    def heard(
        self, role: str, index: int, report: ProcessReport, *, sent: float, back: float
    ) -> None:
        """A process answered; `sent` and `back` are when question and answer were here."""
        step = self._spans.step
        with self._lock:
            process = self._known.get((role, index))
            if process is None or (process.pid, process.node) != (report.pid, report.node):
                process = WatchedProcess(role, index, pid=report.pid, node=report.node)
                self._known[role, index] = process
                self._lives.append(process)
            process.heard(report, sent=sent, back=back, step=step)

    def published(
        self, *, version: int, size: int, parameters: int, seconds: float, ago: float = 0.0
    ) -> None:
        """Weights of a version were given to every replica; that was over some seconds ago."""
        with self._lock:
            self._publications.append((seconds, size, parameters))
        self._spans.past(
            "publish",
            start=time.time() - ago - seconds,
            duration_s=seconds,
            step=self._spans.step,
            version=version,
            bytes=size,
            parameters=parameters,
        )

    def numbers(self) -> dict[str, float]:
        """Metrics of what was done since they were asked for last; spans are written."""
        waited = self._waits.drain()
        with self._lock:
            now = self._counter()
            window_s, self._since = now - self._since, now
            found: dict[str, float] = {}
            for role in sorted({process.role for process in self._lives}):
                mine = [process for process in self._lives if process.role == role]
                found |= _of_role(role, mine, window_s)
                found[f"wait/controller_on_{role}"] = waited.get(role, 0.0)
            found |= _of_publications(self._publications)
            self._publications = []
        self.write()
        return found

    def write(self) -> None:
        """Write the spans that are here; those of processes that are gone for the last time."""
        folder = self._spans.folder
        with self._lock:
            for process in self._lives:
                lines = process.take_lines()
                if folder is not None and lines and self._can_write:
                    self._append(folder / f"{process.role}-{process.index}.jsonl", lines)
            self._lives = list(self._known.values())

    def _append(self, path: Path, lines: Iterable[dict[str, object]]) -> None:
        try:
            with writing(path), path.open("ab", buffering=0) as file:
                append(file, "".join(map(json_line, lines)).encode())
        except UserError as error:
            self._can_write = False
            warnings.warn(f"no more spans of other processes: {error}", stacklevel=2)


def _of_role(role: str, processes: list[WatchedProcess], window_s: float) -> dict[str, float]:
    """Memory and work of a role; a process that was begun again counts once."""
    count = len({process.index for process in processes})
    busy_s = sum(process.take_busy_s() for process in processes) / count
    devices = [p.device_bytes for p in processes if p.device_bytes is not None]
    found = {
        f"role/{role}/memory_gb": max(p.memory_bytes for p in processes) / GIB,
        f"role/{role}/busy": min(1.0, busy_s / window_s) if window_s > 0 else 0.0,
        f"wait/{role}_idle": max(0.0, window_s - busy_s),
    }
    return {**found, f"role/{role}/device_gb": max(devices) / GIB} if devices else found


def _of_publications(done: list[tuple[float, int, int]]) -> dict[str, float]:
    if not done:
        return {}
    return {
        "time/publish": sum(seconds for seconds, _, _ in done),
        "publish/bytes": float(sum(size for _, size, _ in done)),
        "publish/parameters": float(max(parameters for _, _, parameters in done)),
    }
