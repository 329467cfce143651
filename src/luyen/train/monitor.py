"""Monitors of a running step: the hang watchdog, the profiler, and how busy roles are.

The watchdog thread writes the stacks of all threads when a phase makes no progress within its
budget, and with `on_hang: stop` saves what it can and ends the process: Python cannot stop a hung
thread.
"""

import faulthandler
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Self, TextIO, final

from torch import profiler

from luyen.base.heartbeat import BETWEEN, DRAWING, HEART
from luyen.base.input_files import expanded
from luyen.base.rundir import RunDirectory, step_name
from luyen.base.system import peak_bytes
from luyen.config.schema.trainer import ProfileConfig
from luyen.config.schema.trainer import WatchdogConfig as Settings
from luyen.runtime.monitoring import (
    GIB,
    ProcessTrace,
    RoleMonitor,
    TraceSpec,
    TraceTarget,
    device_bytes,
)
from luyen.telemetry.output import flushed, say
from luyen.telemetry.stacks import describe_process

EXIT_CODE = 75
"""Exit code of a run that was ended because it hung: try again later."""
_RESCUE_S = 120.0
"""Time limit for saving, which may hang as well, before the process ends without it."""


@final
class PhaseWatchdog:
    """While entered, a thread checks that the current phase makes progress."""

    def __init__(
        self, watchdog: Settings, folder: Path, *, rescue: Callable[[], str] | None = None
    ) -> None:
        """Reports go to `folder`. `rescue` saves what it can and returns a message."""
        self._budget_s = watchdog.budget_s
        self._budgets = dict(watchdog.budgets)
        self._is_stopping = watchdog.on_hang == "stop"
        self._folder = folder
        self._rescue = rescue
        self._place = (0, BETWEEN)
        self._gate = threading.Lock()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._locked = folder / f"locked-{os.getpid()}.txt"

    def __enter__(self) -> Self:
        if max(self._budget_s, *self._budgets.values(), 0.0) > 0:
            self._ended.clear()
            self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
        self._thread = None

    @contextmanager
    def watching(self, step: int, phase: str) -> Iterator[None]:
        """Watch this phase of a step."""
        self._move_to(step, phase)
        try:
            yield
        finally:
            self._move_to(step, BETWEEN)

    def _move_to(self, step: int, phase: str) -> None:
        # Blocks for good once the process is ending: a thread that wakes up must not continue.
        with self._gate:
            self._place = (step, phase)

    def _budget(self, phase: str) -> float:
        return self._budgets.get(phase, self._budget_s)

    def _watch(self) -> None:
        budgets = [b for b in (self._budget_s, *self._budgets.values()) if b > 0]
        every = min(5.0, min(budgets) / 8)
        limit = 2 * max(budgets) + every
        with self._last_resort() as last_resort:
            self._look(every, limit, last_resort.fileno())
            faulthandler.cancel_dump_traceback_later()
        self._drop_if_empty()

    def _last_resort(self) -> TextIO:
        """File for stacks of faulthandler's timer; /dev/null where it cannot be created."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            return self._locked.open("w")
        except OSError as error:
            say(f"{self._locked}: it could not be written: {error.strerror or error}")
            return Path(os.devnull).open("w")

    def _drop_if_empty(self) -> None:
        """Remove the stack file if nothing was written."""
        if self._locked.is_file() and self._locked.stat().st_size == 0:
            self._locked.unlink()

    def _look(self, every: float, limit: float, last_resort: int) -> None:
        """Poll until the run ends; report when the budget is over, and at each doubling of it."""
        place, beats, since, timeouts = self._place, _beats(self._place), time.monotonic(), 1
        while not self._ended.wait(every):
            # Native code that never releases the GIL stops this thread too. Then faulthandler's
            # timer writes the stacks; nothing can be saved, and the exit code is 1.
            faulthandler.dump_traceback_later(limit, file=last_resort, exit=self._is_stopping)
            now = time.monotonic()
            if self._place is not place or _beats(place) != beats:
                place, since, timeouts = self._place, now, 1
                beats = _beats(place)
                continue
            budget = self._budget(place[1])
            if 0 < budget * timeouts <= now - since:
                timeouts *= 2
                self._report(*place, now - since)

    def _report(self, step: int, phase: str, seconds: float) -> None:
        path = self._folder / f"hang-{step}-{phase}.txt"
        words = f"step {step}, {phase}: nothing has moved for {_duration(seconds)}"
        try:
            with path.open("a") as file:
                file.write(describe_process(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {words}") + "\n")
            where = f"what every thread is doing is in {path}"
        except OSError as error:
            where = f"what every thread is doing could not be written: {error}"
        say(f"hang: {words}; {where}")
        if self._is_stopping:
            self._stop()

    def _stop(self) -> None:
        """End the process without the thread that hangs."""
        self._gate.acquire()  # never released: nothing may change what is saved now
        faulthandler.cancel_dump_traceback_later()
        if self._rescue is not None:
            say(_within(_RESCUE_S, self._rescue))
        self._drop_if_empty()
        say(f"hang: the run ends with exit code {EXIT_CODE}; start it again to go on")
        flushed()
        os._exit(EXIT_CODE)


def _beats(place: tuple[int, str]) -> int:
    """Heartbeats that count as progress in a phase."""
    return HEART.count + (HEART.ahead if place[1] in DRAWING else 0)


def _within(seconds: float, work: Callable[[], str]) -> str:
    """The result of `work`, or a message that it timed out or failed."""
    threads = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rescue")
    saving = threads.submit(work)
    threads.shutdown(wait=False)
    if not wait([saving], timeout=seconds).done:
        return f"hang: nothing could be saved within {seconds:g} s; the newest checkpoint stays"
    fault = saving.exception()
    if fault is not None:
        return f"hang: saving failed, the newest checkpoint stays: {fault}"
    return f"hang: {saving.result()}"


def _duration(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


@final
class StepProfiler:
    """Profiles the steps in `trainer.profile.steps`.

    Each step leaves `trace_step_<step>.json.gz`, which Perfetto opens, and
    `operators_step_<step>.txt`; on CUDA, if wanted, `memory_step_<step>.pickle`. Every other
    process of the run leaves the same files, with its role and number after the step.
    """

    def __init__(
        self, profile: ProfileConfig, directory: RunDirectory, *, workers: TraceTarget | None = None
    ) -> None:
        """`workers` are the other processes of the run."""
        self._steps = frozenset(profile.steps)
        self._has_memory = profile.memory
        save_path = profile.save_path
        self.folder = directory.root / "profile" if save_path is None else expanded(save_path)
        self._workers = workers
        self._here = ProcessTrace()

    def step(self, number: int) -> AbstractContextManager[None]:
        """Context of a whole step."""
        return self._profiled(number) if number in self._steps else nullcontext()

    def part(self, name: str) -> AbstractContextManager[Any]:
        """Context of a named range of the trace; does nothing outside profiled steps."""
        return profiler.record_function(name) if self._here.is_on else nullcontext()

    @contextmanager
    def _profiled(self, number: int) -> Iterator[None]:
        folder = self.folder.absolute()
        trace = TraceSpec(folder=folder, name=step_name(number), memory=self._has_memory)
        self._here.start(trace)
        is_whole = False
        try:
            if self._workers is not None:
                self._workers.start_trace(trace)
            yield
            if self._workers is not None:
                self._workers.stop_trace()
            is_whole = True
        finally:
            self._here.stop(write=is_whole)


_PHASES = {"actor": ("time/log-probs", "time/update"), "rollout": ("time/generate",)}
"""Phases in which a role is busy, where all roles share one process."""


def role_metrics(watch: RoleMonitor | None, times: Mapping[str, float]) -> dict[str, float]:
    """Memory and busy shares of the roles since the previous step.

    `times` are the seconds of the phases. Without a `watch` all roles share this process, and busy
    shares follow from the phases.
    """
    device = device_bytes()
    found = {"role/controller/memory_gb": peak_bytes() / GIB}
    if device is not None:
        found["role/controller/device_gb"] = device / GIB
    return found | (_by_phases(times) if watch is None else watch.numbers())


def _by_phases(times: Mapping[str, float]) -> dict[str, float]:
    """Shares of the phases.

    Example:
        >>> _by_phases({"time/generate": 3.0, "time/update": 1.0})
        {'role/actor/busy': 0.25, 'role/rollout/busy': 0.75}
    """
    whole = sum(times.values())
    if whole <= 0:
        return {}
    return {
        f"role/{role}/busy": sum(times.get(name, 0.0) for name in names) / whole
        for role, names in _PHASES.items()
    }
