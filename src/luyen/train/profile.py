"""Steps that are profiled: a trace, the heaviest operators, and a history of memory."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, final

from torch import profiler

from luyen.base.paths import expanded
from luyen.base.rundir import RunDirectory, step_name
from luyen.config.schema.trainer import Profile
from luyen.runtime.trace import ProcessTrace, Trace, Traced


@final
class StepProfiler:
    """Profiles the steps that the configuration names, and does nothing in the others.

    Each step leaves `trace_step_<step>.json.gz`, which Perfetto opens, and
    `operators_step_<step>.txt`; on CUDA, if wanted, `memory_step_<step>.pickle`. Every other
    process of the run leaves the same files, with its role and number after the step.
    """

    def __init__(
        self, profile: Profile, directory: RunDirectory, *, others: Traced | None = None
    ) -> None:
        """`others` are the processes of the run beside this one."""
        self._steps = frozenset(profile.steps)
        self._has_memory = profile.memory
        save_path = profile.save_path
        self.folder = directory.root / "profile" if save_path is None else expanded(save_path)
        self._others = others
        self._here = ProcessTrace()

    def step(self, number: int) -> AbstractContextManager[None]:
        """Around everything that belongs to a step."""
        return self._profiled(number) if number in self._steps else nullcontext()

    def part(self, name: str) -> AbstractContextManager[Any]:
        """A named stretch of the trace, where there is one."""
        return profiler.record_function(name) if self._here.is_on else nullcontext()

    @contextmanager
    def _profiled(self, number: int) -> Iterator[None]:
        folder = self.folder.absolute()
        trace = Trace(folder=folder, name=step_name(number), memory=self._has_memory)
        self._here.start(trace)
        is_whole = False
        try:
            if self._others is not None:
                self._others.start_trace(trace)
            yield
            if self._others is not None:
                self._others.stop_trace()
            is_whole = True
        finally:
            self._here.stop(write=is_whole)
