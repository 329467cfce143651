"""Metrics, spans, profiler traces and device memory of the processes of a run.

Reports travel with the results of calls, without messages of their own. Nothing here can end a run:
a lost process loses its last spans, and a full disk only stops the writing of spans.
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
    """Collects the reports of worker processes. Thread-safe."""

    def __init__(
        self,
        *,
        spans: SpanLog = SPANS,
        waits: Waits = WAITS,
        counter: Callable[[], float] = time.monotonic,
    ) -> None:
        """Spans of processes are written to the folder of `spans`."""
        self._spans, self._waits, self._counter = spans, waits, counter
        self._lock = threading.Lock()
        self._processes: list[RemoteProcess] = []
        self._current: dict[tuple[str, int], RemoteProcess] = {}
        self._publications: list[tuple[float, int, int]] = []
        self._can_write = True
        self._since = counter()

    def restart(self) -> None:
        """Count metrics from now on: earlier work belongs to no step."""
        with self._lock:
            for process in self._processes:
                process.take_busy_s()
            self._waits.drain()
            self._since = self._counter()

    def heard(
        self, role: str, index: int, report: ProcessReport, *, sent: float, back: float
    ) -> None:
        """Record a report; `sent` and `back` are when the call left and its result arrived here."""
        step = self._spans.step
        with self._lock:
            process = self._current.get((role, index))
            if process is None or (process.pid, process.node) != (report.pid, report.node):
                process = RemoteProcess(role, index, pid=report.pid, node=report.node)
                self._current[role, index] = process
                self._processes.append(process)
            process.heard(report, sent=sent, back=back, step=step)

    def published(
        self,
        *,
        version: int,
        size: int,
        parameters: int,
        seconds: float,
        way: str = "host",
        ago: float = 0.0,
    ) -> None:
        """Record a complete weight sync, which ended `ago` seconds before now.

        `way` is how it went: `host`, `gpu`, or `gpu and host`.
        """
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
            way=way,
        )

    def numbers(self) -> dict[str, float]:
        """Metrics since the last call; writes the spans."""
        waited = self._waits.drain()
        with self._lock:
            now = self._counter()
            window_s, self._since = now - self._since, now
            found: dict[str, float] = {}
            for role in sorted({process.role for process in self._processes}):
                mine = [process for process in self._processes if process.role == role]
                found |= _of_role(role, mine, window_s)
                found[f"wait/controller_on_{role}"] = waited.get(role, 0.0)
            found |= _of_publications(self._publications)
            self._publications = []
        self.write()
        return found

    def write(self) -> None:
        """Write the spans received so far, and drop the processes that were replaced."""
        folder = self._spans.folder
        with self._lock:
            for process in self._processes:
                lines = process.take_lines()
                if folder is not None and lines and self._can_write:
                    self._append(folder / f"{process.role}-{process.index}.jsonl", lines)
            self._processes = list(self._current.values())

    def _append(self, path: Path, lines: Iterable[dict[str, object]]) -> None:
        try:
            with writing(path), path.open("ab", buffering=0) as file:
                append(file, "".join(map(json_line, lines)).encode())
        except UserError as error:
            self._can_write = False
            warnings.warn(f"no more spans of other processes: {error}", stacklevel=2)


def _of_role(role: str, processes: list[RemoteProcess], window_s: float) -> dict[str, float]:
    """Memory and busy time of a role; a restarted process counts once."""
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


# Profiler traces: operators, their times, and allocations on a GPU.

_ROWS = 20
"""Rows of the operator table."""
_HISTORY = 1_000_000
"""Most allocations of a memory history."""


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
        """Start a trace in every process."""
        ...

    def stop_trace(self) -> None:
        """End the traces and write their files."""
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
        """Whether a trace is being recorded."""
        return self._recorded is not None

    def start(self, trace: TraceSpec) -> None:
        """Start a trace; a missing folder is created."""
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
        """End the trace; write `trace_*.json.gz`, `operators_*.txt`, on CUDA `memory_*.pickle`.

        Without `write` the recording is dropped. Without a started trace it does nothing.
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


# Device memory.


def device_bytes() -> int | None:
    """Peak bytes of tensors on the GPU; None if this process uses no GPU.

    Example:
        >>> device_bytes() is None or torch.cuda.is_initialized()
        True
    """
    return torch.cuda.max_memory_allocated() if torch.cuda.is_initialized() else None


def release_device_memory() -> None:
    """Return the allocator's cached memory to the device, for other processes."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


# Results of remote calls, with the report of the process.


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class CallResult:
    """The value of a remote call, and the report of its process.

    Example:
        >>> CallResult(value=3, report=None).value
        3
    """

    value: Any
    """What the method returned."""
    report: ProcessReport | None
    """The report; None: the caller does not read the result."""


def unwrap_result(
    answer: CallResult, watch: RoleMonitor, role: str, index: int, *, sent: float, back: float
) -> Any:
    """The value of the call; its report goes to the monitor, whose errors are ignored."""
    if answer.report is not None:
        with boundary([]):
            watch.heard(role, index, answer.report, sent=sent, back=back)
    return answer.value
