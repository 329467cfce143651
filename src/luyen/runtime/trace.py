"""A trace of what one process computes: operators, their times, and allocations on a GPU."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, final

import torch
from torch import profiler

from luyen.base.files import write_whole, writing

_ROWS = 20
"""Operators of the table."""
_HISTORY = 1_000_000
"""Allocations that a history of memory holds at most."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Which files a trace is written to, and what is recorded.

    Example:
        >>> Trace(folder=Path("profile"), name="step_000003", memory=False).of("actor_0").name
        'step_000003_actor_0'
    """

    folder: Path
    """Where the files go; processes on other nodes must see it too."""
    name: str
    """Part of every file's name, for instance `step_000003`."""
    memory: bool
    """Whether allocations on a GPU are recorded."""

    def of(self, process: str) -> "Trace":
        """The trace of another process of the run, for instance `actor_0`."""
        return Trace(folder=self.folder, name=f"{self.name}_{process}", memory=self.memory)


class Traced(Protocol):
    """Other processes that can be traced."""

    def start_trace(self, trace: Trace) -> None:
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
        self._trace: Trace | None = None
        self._recorded: profiler.profile | None = None

    @property
    def is_on(self) -> bool:
        """Whether something is recorded."""
        return self._recorded is not None

    def start(self, trace: Trace) -> None:
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


def _write(trace: Trace, recorded: profiler.profile) -> None:
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
