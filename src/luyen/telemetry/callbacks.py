"""Callbacks of a Python program: told what a run has done, and able to ask for its end.

A callback cannot damage a run. It gets records that cannot be changed, after the line or the
checkpoint that they are about is written; what it raises is noted in the run by the callback's
name, and training goes on.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import cast, final

from luyen.base.boundary import boundary, last_line
from luyen.base.errors import UserError, did_you_mean
from luyen.base.secrets import masked
from luyen.telemetry.early_stopping import EarlyStopping, Stagnation
from luyen.telemetry.metrics import StepMetrics
from luyen.telemetry.output import say
from luyen.telemetry.summary import note

_LONGEST_REASON = 500
"""Characters of a reason that are kept: it is one line of a summary."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingProgress:
    """Where a run is.

    Example:
        >>> TrainingProgress(run=Path("runs/a/b"), step=3, total_steps=10).step
        3
    """

    run: Path
    """The run directory."""
    step: int
    """Finished steps."""
    total_steps: int
    """Steps of the whole run."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """Returned by a callback: the run ends after this step, with a checkpoint.

    Example:
        >>> Stop(reason="the budget is spent").reason
        'the budget is spent'
    """

    reason: str
    """Why; the summary and `luyen runs` say it."""

    def __post_init__(self) -> None:
        reason = cast(object, self.reason)
        if not isinstance(reason, str) or not reason.strip():
            raise UserError("Stop.reason", repr(reason)[:80], "it is no text", "say why")


class Callback:
    """What a callback may define; each method does nothing by itself.

    Methods return None, or a `Stop` where the run is to end.

    Example:
        >>> class Printer(Callback):
        ...     def on_step(self, progress, metrics):
        ...         print(progress.step, metrics["reward/mean"])
        >>> progress = TrainingProgress(run=Path("."), step=1, total_steps=2)
        >>> Printer().on_step(progress, {"reward/mean": 0.5})
        1 0.5
    """

    def on_start(self, progress: TrainingProgress) -> Stop | None:
        """Before the first step of this session."""

    def on_step(self, progress: TrainingProgress, metrics: Mapping[str, float]) -> Stop | None:
        """After the line of a step is written; `metrics` are those of the line."""

    def on_validation(
        self, progress: TrainingProgress, metrics: Mapping[str, float]
    ) -> Stop | None:
        """After a validation; `metrics` are its own."""

    def on_checkpoint(self, progress: TrainingProgress, path: Path) -> Stop | None:
        """After a checkpoint was handed to its writer; `path` is where it lies."""

    def on_end(self, progress: TrainingProgress, reason: str | None) -> None:
        """At the end; `reason` says why a run ended before its last step, where that was asked."""


@final
class RunCallbacks:
    """The callbacks of a run and its early stopping; why the run is to end, once it is."""

    def __init__(self, run: Path, early_stopping: EarlyStopping | None) -> None:
        self._run = run
        self._rule = early_stopping
        self._seen = Stagnation()
        self._callbacks: tuple[Callback, ...] = ()
        self._noted: set[str] = set()
        self.reason: str | None = None
        """Why the run ends before its last step; None: nothing asked for that."""

    def use(self, callbacks: Sequence[Callback]) -> None:
        """Take the callbacks of this session."""
        self._callbacks = tuple(callbacks)

    def start(self, step: int, total_steps: int, lines: Sequence[StepMetrics]) -> None:
        """A session begins after `step`; `lines` are those that the run has written."""
        if self._rule is not None:
            self._seen = Stagnation.read(self._rule, lines)
            self.reason = self._seen.reason(self._rule)
        self._tell("on_start", self._progress(step, total_steps))

    def recorded(
        self,
        step: int,
        total_steps: int,
        metrics: Mapping[str, float],
        validation: Mapping[str, float],
    ) -> None:
        """The line of a step, validation included, is written."""
        if self._rule is not None:
            self._seen = self._seen.after(self._rule, step, metrics)
            self.reason = self.reason or self._seen.reason(self._rule)
            if self._rule.is_due(step, has_validation=bool(validation)):
                self._note_unmeasured(self._rule.metric, metrics)
        progress = self._progress(step, total_steps)
        if step > 0:
            self._tell("on_step", progress, MappingProxyType(dict(metrics)))
        if validation:
            self._tell("on_validation", progress, MappingProxyType(dict(validation)))

    def saved(self, step: int, total_steps: int, path: Path) -> None:
        """A checkpoint of this step was handed to its writer."""
        self._tell("on_checkpoint", self._progress(step, total_steps), path)

    def end(self, step: int, total_steps: int) -> None:
        """The session ended."""
        reason = self.reason if step < total_steps else None
        self._tell("on_end", self._progress(step, total_steps), reason)

    def _progress(self, step: int, total_steps: int) -> TrainingProgress:
        return TrainingProgress(run=self._run, step=step, total_steps=total_steps)

    def _tell(self, event: str, *given: object) -> None:
        for callback in self._callbacks:
            faults: list[BaseException] = []
            with boundary(faults):
                method = getattr(callback, event)
                answer = method(*given)
                if isinstance(answer, Stop):
                    self.reason = self.reason or masked(answer.reason)[:_LONGEST_REASON]
                elif answer is not None:
                    raise TypeError(
                        f"it returned a {type(answer).__name__}, and not None or a luyen.Stop"
                    )
            if faults:
                self._note_fault(f"{type(callback).__name__}.{event}", faults[0])

    def _note_fault(self, name: str, fault: BaseException) -> None:
        """The first fault of each method; a callback that fails is still called."""
        self._note_once(name, f"the callback {name} failed: {last_line(fault)}; training goes on")

    def _note_unmeasured(self, metric: str, metrics: Mapping[str, float]) -> None:
        """A metric that the run does not measure would never stop it."""
        if metric not in metrics and self._seen == Stagnation():
            why = f"nothing measured {metric}, which trainer.early_stopping.metric names"
            self._note_once("early stopping", f"{why}: {did_you_mean(metric, metrics)}")

    def _note_once(self, subject: str, words: str) -> None:
        if subject not in self._noted:
            self._noted.add(subject)
            say(words)
            note(self._run, words)


def demand_callbacks(callbacks: Sequence[object]) -> list[Callback]:
    """The callbacks; a UserError for what is none."""
    found: list[Callback] = []
    for one in callbacks:
        if not isinstance(one, Callback):
            fix = "give objects of a class that derives from luyen.Callback"
            raise UserError("callbacks", type(one).__name__, "it is no callback", fix)
        found.append(one)
    return found
