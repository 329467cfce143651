"""A close look at chosen steps: a trace, the heaviest operators, and a history of memory."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, final

import torch
from torch import profiler

from luyen.base.files import write_whole, writing
from luyen.base.paths import expanded
from luyen.base.rundir import RunDirectory, step_name
from luyen.config.schema.trainer import Profile

_ROWS = 20
"""Operators of the table."""
_HISTORY = 1_000_000
"""Allocations that a history of memory holds at most."""


@final
class StepProfiler:
    """Profiles the steps that were asked for, and does nothing in the others.

    Each step leaves `trace_step_<step>.json.gz`, which Perfetto opens, and
    `operators_step_<step>.txt`; on CUDA, if asked for, `memory_step_<step>.pickle`.
    """

    def __init__(self, profile: Profile, directory: RunDirectory, *, is_cuda: bool) -> None:
        self._steps = frozenset(profile.steps)
        self._has_memory = profile.memory and is_cuda
        self._is_cuda = is_cuda
        save_path = profile.save_path
        self.folder = directory.root / "profile" if save_path is None else expanded(save_path)
        self._is_on = False

    def step(self, number: int) -> AbstractContextManager[None]:
        """Around everything that belongs to a step."""
        return self._profiled(number) if number in self._steps else nullcontext()

    def part(self, name: str) -> AbstractContextManager[Any]:
        """A named stretch of the trace, where there is one."""
        return profiler.record_function(name) if self._is_on else nullcontext()

    @contextmanager
    def _profiled(self, number: int) -> Iterator[None]:
        with writing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
        activities = [profiler.ProfilerActivity.CPU]
        if self._is_cuda:
            activities.append(profiler.ProfilerActivity.CUDA)
        looks = profiler.profile(activities=activities, acc_events=True)
        with self._memory(number), looks as found:
            self._is_on = True
            try:
                yield
            finally:
                self._is_on = False
        self._write(number, found)

    def _write(self, number: int, found: profiler.profile) -> None:
        name = step_name(number)
        found.export_chrome_trace(str(self.folder / f"trace_{name}.json.gz"))
        # Device time tells nothing where there is no device, and host time little where there is.
        order = "self_device_time_total" if self._is_cuda else "self_cpu_time_total"
        table = found.key_averages().table(sort_by=order, row_limit=_ROWS, max_name_column_width=60)
        write_whole(self.folder / f"operators_{name}.txt", f"{table.strip()}\n")

    @contextmanager
    def _memory(self, number: int) -> Iterator[None]:
        """Every allocation of the step with the code that made it."""
        if not self._has_memory:
            yield
            return
        memory: Any = torch.cuda.memory
        memory._record_memory_history(max_entries=_HISTORY)
        try:
            yield
            torch.cuda.synchronize()
            memory._dump_snapshot(str(self.folder / f"memory_{step_name(number)}.pickle"))
        finally:
            memory._record_memory_history(enabled=None)
