"""Metrics, spans, profiler traces and device memory of the processes of a run.

Everything arrives with answers that the controller waits for anyway. Nothing here can end a run: a
process that is lost loses its last spans, and a disk that takes no more spans ends their writing.
"""

import threading
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, final

import torch
from torch import profiler

from luyen.base.boundary import boundary
from luyen.base.errors import UserError
from luyen.base.files import append, json_line, write_whole, writing
from luyen.telemetry.spans import SPANS, WAITS, SpanLog, Waits
from luyen.telemetry.worker_spans import ProcessReport, RemoteProcess

GIB = 1 << 30


@final
class RoleMonitor:
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
        self._lives: list[RemoteProcess] = []
        self._known: dict[tuple[str, int], RemoteProcess] = {}
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
                process = RemoteProcess(role, index, pid=report.pid, node=report.node)
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


def _of_role(role: str, processes: list[RemoteProcess], window_s: float) -> dict[str, float]:
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


# A trace of what one process computes: operators, their times, and allocations on a GPU.

_ROWS = 20
"""Operators of the table."""
_HISTORY = 1_000_000
"""Allocations that a history of memory holds at most."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSpec:
    """Which files a trace is written to, and what is recorded.

    Example:
        >>> TraceSpec(folder=Path("profile"), name="step_000003", memory=False).of("actor_0").name
        'step_000003_actor_0'
    """

    folder: Path
    """Where the files go; processes on other nodes must see it too."""
    name: str
    """Part of every file's name, for instance `step_000003`."""
    memory: bool
    """Whether allocations on a GPU are recorded."""

    def of(self, process: str) -> "TraceSpec":
        """The trace of another process of the run, for instance `actor_0`."""
        return TraceSpec(folder=self.folder, name=f"{self.name}_{process}", memory=self.memory)


class TraceTarget(Protocol):
    """Other processes that can be traced."""

    def start_trace(self, trace: TraceSpec) -> None:
        """Record what every one of them computes from now on."""
        ...

    def stop_trace(self) -> None:
        """Write down what was recorded."""
        ...


@final
class ProcessTrace:
    """The trace of this process, or none.

    Only the thread that starts it is recorded, with the threads of its backward passes.
    """

    def __init__(self) -> None:
        self._trace: TraceSpec | None = None
        self._recorded: profiler.profile | None = None

    @property
    def is_on(self) -> bool:
        """Whether something is recorded."""
        return self._recorded is not None

    def start(self, trace: TraceSpec) -> None:
        """Record from now on; the folder is made where it is missing."""
        assert self._recorded is None, "a trace is being recorded already"
        with writing(trace.folder):
            trace.folder.mkdir(parents=True, exist_ok=True)
        activities = [profiler.ProfilerActivity.CPU]
        if _uses_cuda():
            activities.append(profiler.ProfilerActivity.CUDA)
        recorded = profiler.profile(activities=activities, acc_events=True)
        if trace.memory and _uses_cuda():
            _memory()._record_memory_history(max_entries=_HISTORY)
        recorded.start()
        self._trace, self._recorded = trace, recorded

    def stop(self, *, write: bool = True) -> None:
        """End it, and write `trace_*.json.gz`, `operators_*.txt` and on CUDA `memory_*.pickle`.

        Without `write` what was recorded is dropped. Nothing happens where nothing was started.
        """
        trace, recorded = self._trace, self._recorded
        self._trace = self._recorded = None
        if trace is None or recorded is None:
            return
        recorded.stop()
        if trace.memory and _uses_cuda():
            torch.cuda.synchronize()
            if write:
                _memory()._dump_snapshot(str(trace.folder / f"memory_{trace.name}.pickle"))
            _memory()._record_memory_history(enabled=None)
        if write:
            _write(trace, recorded)


def _write(trace: TraceSpec, recorded: profiler.profile) -> None:
    with writing(trace.folder):
        recorded.export_chrome_trace(str(trace.folder / f"trace_{trace.name}.json.gz"))
    # Device time says nothing where there is no device, and host time little where there is one.
    order = "self_device_time_total" if _uses_cuda() else "self_cpu_time_total"
    rows = recorded.key_averages()
    table = rows.table(sort_by=order, row_limit=_ROWS, max_name_column_width=60)
    write_whole(trace.folder / f"operators_{trace.name}.txt", f"{table.strip()}\n")


def _uses_cuda() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_initialized()


def _memory() -> Any:
    return torch.cuda.memory


# The most memory of its GPU that this process has held.


def device_bytes() -> int | None:
    """Most bytes that tensors held so far; None where this process uses no GPU.

    Example:
        >>> device_bytes() is None or torch.cuda.is_initialized()
        True
    """
    return torch.cuda.max_memory_allocated() if torch.cuda.is_initialized() else None


def release_device_memory() -> None:
    """Hand memory that the allocator caches back to the device, where other processes take it."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


# Answers of the processes of a cluster, with what each tells of itself.


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class CallResult:
    """What a call returned, and a report beside it.

    Example:
        >>> CallResult(value=3, report=None).value
        3
    """

    value: Any
    """What was asked for."""
    report: ProcessReport | None
    """How the process stands; None: nobody would hear it."""


def unwrap_result(
    answer: CallResult, watch: RoleMonitor, role: str, index: int, *, sent: float, back: float
) -> Any:
    """What was asked for; the report goes to the watch, which can spoil nothing."""
    if answer.report is not None:
        with boundary([]):
            watch.heard(role, index, answer.report, sent=sent, back=back)
    return answer.value
