"""The offline loop: draw rows, take an optimizer step, measure, write down."""

from collections.abc import Iterator, Mapping
from typing import Any, final

from luyen.base.digests import BEGINNING, link
from luyen.engine.lesson import Lesson
from luyen.telemetry.display import Display
from luyen.telemetry.spans import SPANS, span
from luyen.train.digests import metrics_stage
from luyen.train.interrupt import Interruption
from luyen.train.offline.course import OfflineCourse
from luyen.train.offline.files import OfflineFiles
from luyen.train.profile import StepProfiler
from luyen.train.state import open_step, read_open_step
from luyen.train.watchdog import Watchdog


@final
class OfflineRun:
    """Parts and progress of a run of one offline stage."""

    def __init__(
        self,
        course: OfflineCourse,
        files: OfflineFiles,
        display: Display,
    ) -> None:
        config, stage = course.config, course.stage
        self.course = course
        self.config = config
        self.stage = stage
        self.files = files
        self.display = display
        self.total_steps = course.total_steps
        self.step = 0
        self.chain = BEGINNING
        """Digest of everything that was done so far."""
        self.first: dict[str, float] = {}
        """The first value of each number that the stage is judged by."""
        self.last: dict[str, float] = {}
        """The newest value of each."""
        self.interruption = Interruption()
        self.watchdog = Watchdog(config.trainer.watchdog, files.directory.events)
        self.profiler = StepProfiler(config.trainer.profile, files.directory)
        self.trial_steps: int | None = None
        """Where a run ends that is only measured and keeps no checkpoint; None: a whole run."""
        self.saved = 0
        """Step of the newest checkpoint; the beginning needs none."""
        self.open: tuple[dict[str, float], dict[str, str]] | None = None
        """Numbers and hashes of the step that is done, until its line is written."""

    def lessons(self) -> Iterator[Lesson]:
        """The lesson of each step that is left; rows are a pure function of the step."""
        while self.step < self.last_step and not self.interruption.is_wanted:
            with self.profiler.step(self.step + 1):
                yield self.course.lesson(self.step + 1)

    @property
    def last_step(self) -> int:
        """Where it ends."""
        return min(self.total_steps, self.trial_steps or self.total_steps)

    def is_due(self, every: int) -> bool:
        """Whether something that happens every so many steps, and at the end, happens now."""
        return self.step >= self.total_steps or (every > 0 and self.step % every == 0)

    def measure(self) -> dict[str, float]:
        """What the held-out rows say now."""
        with self.interruption.at_once():
            self.display.phase("validate")
            with self.watchdog.watching(self.step, "validate"), span("validate", step=self.step):
                return self.stage.measure()

    def write_down(self, stages: Mapping[str, str], metrics: Mapping[str, float]) -> None:
        """Write and show the numbers of the step that is done, validation included."""
        found = {**metrics, **SPANS.drain(self.step)}
        named = {**stages, "metrics": metrics_stage(found)}
        digest = link(self.chain, step=self.step, stages=named)
        self.files.step(digest, found)
        self.chain = digest.chain
        for goal in self.stage.goals:
            if goal.metric in found:
                self.first.setdefault(goal.metric, found[goal.metric])
                self.last[goal.metric] = found[goal.metric]

    def save(self) -> None:
        """A checkpoint of the step that is done, unless it has one."""
        if self.trial_steps is None and self.saved != self.step:
            loop = {
                "stage": self.config.trainer.stage,
                "step": self.step,
                "chain": self.chain,
                "first": self.first,
                "lacks_validation": None if self.open is None else open_step(*self.open),
            }
            self.files.save(self.stage.state(), loop)
            self.saved = self.step

    def go_on_from(self, loop: Mapping[str, Any]) -> None:
        """Stand where a checkpoint stood; the stage was put there already."""
        self.step = self.saved = int(loop["step"])
        self.chain = str(loop["chain"])
        self.first = dict(loop["first"])
        if loop.get("lacks_validation") is not None:
            self.open = read_open_step(loop["lacks_validation"])


def train_offline(run: OfflineRun) -> None:
    """Draw, update, measure, until the steps are done or the user interrupts."""
    trainer = run.config.trainer
    if run.open is not None:
        run.saved = -1  # the checkpoint that it goes on from lacks what comes now
        _finish(run, *run.open)
    elif run.step == 0 and trainer.val_before_train and (found := run.measure()):
        run.write_down({}, found)
    for lesson in run.lessons():
        metrics = _learn(run, lesson)
        run.step += 1
        with span("digest", step=run.step):
            stages = run.course.stages(lesson, metrics)
        _finish(run, metrics, dict(stages))
    run.save()


def _finish(run: OfflineRun, metrics: dict[str, float], stages: dict[str, str]) -> None:
    """Measure, write down and save a step that is done, where each is due."""
    run.open = metrics, stages
    measured = run.measure() if run.is_due(run.config.trainer.test_freq) else {}
    run.write_down(stages, {**metrics, **measured})
    run.open = None
    if run.is_due(run.config.trainer.save_freq):
        run.save()


def _learn(run: OfflineRun, lesson: Lesson) -> dict[str, float]:
    step = run.step + 1
    run.display.phase("update")
    watched = run.watchdog.watching(step, "update")
    with watched, span("update", step=step), run.profiler.part("update actor"):
        return run.course.update(step, lesson)
