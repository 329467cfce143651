"""A session in a run directory, the shell of online and offline stages.

`open_run` claims the directory and opens its files, `train_to_end` carries out the loop of the
stage: signals, watchdog, interruption, and what is closed and written at the end.
"""

import shutil
import signal
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, final

import yaml

from luyen.base.digests import DigestFile
from luyen.base.errors import UserError
from luyen.base.files import remove_abandoned
from luyen.base.run_lock import OWNER, claim, release
from luyen.base.rundir import DamagedRecord, RunDirectory
from luyen.checkpoint.store import Checkpoint, CheckpointStore
from luyen.checkpoint.tensors import load_state
from luyen.config.check import Report
from luyen.config.loader.parse import stored_values
from luyen.config.pipeline import run_directory
from luyen.config.resume import changed_keys, has_progress, model_changes
from luyen.config.trust import sign_run
from luyen.data.build import TrainData
from luyen.telemetry.artifacts import Artifact
from luyen.telemetry.callbacks import RunCallbacks
from luyen.telemetry.display import Display
from luyen.telemetry.manifest import Manifest
from luyen.telemetry.metrics import read_metrics
from luyen.telemetry.output import OUTPUT
from luyen.telemetry.plots import plot_curves
from luyen.telemetry.sinks import open_sinks
from luyen.telemetry.spans import SPANS
from luyen.telemetry.summary import FINISHED, INTERRUPTED, note, stopped_early
from luyen.train.builders.setup import find_resume_checkpoint, run_identity
from luyen.train.interrupt import Interrupted, Interruption, Stopped
from luyen.train.lineage import inputs_of, note_inputs
from luyen.train.monitor import PhaseWatchdog
from luyen.train.record import Recorder, metrics_at, open_store, saves_in_background
from luyen.train.state import first_logged_step

_COMPARED = ("versions", "code", "hardware", "settings", "threads", "datasets", "files", "revision")
"""Manifest facts that a resumption lists when they have changed."""
_FIX = "undo the change, or choose another trainer.experiment_name"


class ChangedRows(UserWarning):
    """The rows of a resumed run differ from those it started with."""


@final
class Session:
    """A claimed run directory, and what is written into it once the run begins.

    All checks that can refuse a run come before `begin`. If the run does not begin, `abandon`
    removes a new directory; an existing one is unchanged.
    """

    def __init__(
        self, report: Report, facts: dict[str, Any], inputs: list[Artifact], place: Path
    ) -> None:
        """Open the run at `place`, which is claimed, or create it; a UserError if refused."""
        self._report = report
        self._facts = facts
        self._inputs = inputs
        self._config = yaml.dump(
            stored_values(report.config), Dumper=yaml.CSafeDumper, sort_keys=False
        )
        self._provenance = {key: str(origin) for key, origin in report.origins.items()}
        is_there = RunDirectory(place).exists and report.config.trainer.resume_mode != "disable"
        self._is_new = not is_there
        if is_there:
            self.directory = RunDirectory.open(place)
            _refuse_another_run(self.directory, report, facts)
        else:
            self.directory = RunDirectory.create(
                place, config=self._config, provenance=self._provenance, manifest=facts
            )

    def begin(self) -> None:
        """Write configuration, resumption and inputs; called once everything is built."""
        directory, config = self.directory, self._report.config
        if not self._is_new:
            self._warn_of_other_rows()
            directory.note_resumption(self._resumption())
            directory.write_config(self._config, self._provenance)
        sign_run(directory, config)
        note_inputs(directory, config, self._inputs)

    def abandon(self) -> bool:
        """Empty the directory of a new run that did not begin; whether the run was new."""
        if self._is_new:
            for path in self.directory.root.iterdir():
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path, ignore_errors=True)
                elif path.name != OWNER:  # goes with the claim
                    path.unlink(missing_ok=True)
        return self._is_new

    def _warn_of_other_rows(self) -> None:
        begun = self.directory.read_manifest().get("datasets", {}).get("train")
        if has_progress(self.directory) and begun not in (None, self._facts["datasets"]["train"]):
            said = "data.train_files are not as when the run began: it goes on with the rows of now"
            warnings.warn(said, ChangedRows, stacklevel=6)

    def _resumption(self) -> dict[str, Any]:
        """Record of a resumption.

        `changed` has changed facts by kind, and under `config` each changed key with both values.
        """
        directory, facts = self.directory, self._facts
        before = directory.read_manifest()
        changed = {kind: facts[kind] for kind in _COMPARED if facts[kind] != before.get(kind)}
        keys = [one for one in changed_keys(directory, self._report.config) if one.kind != "place"]
        if keys:
            changed["config"] = {k.key: {"before": k.before, "now": k.now} for k in keys}
        return {
            "checkpoint": CheckpointStore(directory.checkpoints).latest(),
            "command": facts["command"],
            "versions": facts["versions"],
            "is_config_new": self._is_config_new(),
            "changed": changed,
        }

    def _is_config_new(self) -> bool:
        """Whether the stored configuration differs; a damaged one counts, and is replaced."""
        try:
            return self.directory.read_config() != self._config
        except UserError as error:
            said = f"{error.value}: {error.why}; it is replaced by the current configuration"
            warnings.warn(said, DamagedRecord, stacklevel=6)
            return True


def claim_run(place: Path) -> None:
    """Claim a run directory, creating it if needed; a UserError where it cannot be used."""
    directory = RunDirectory(place)
    if not directory.exists:
        directory.demand_unused()
    claim(place)


def open_session(report: Report, data: TrainData, found: Manifest) -> Session:
    """Open a session of an existing or new run, without changing files of an existing one.

    `found` comes from `collect_manifest`. The directory is claimed: the caller must release it.
    """
    place = run_directory(report.config)
    inputs = inputs_of(report.config, found.datasets)  # may raise; before the directory is created
    facts = found.as_json() | {"rows": {"train": len(data.train.prompts)}}
    with ExitStack() as failed:
        claim_run(place)
        failed.callback(release, place)
        remove_abandoned(place)
        session = Session(report, facts, inputs, place)
        failed.pop_all()
    return session


def _refuse_another_run(directory: RunDirectory, report: Report, facts: dict[str, Any]) -> None:
    """A UserError where the run in the directory has another configuration or model."""
    if not has_progress(directory):
        return
    changed = [one for one in changed_keys(directory, report.config) if one.kind is None]
    if changed:
        more = "; ".join(one.words() for one in changed)
        why = f"the run in {directory.root} would be another one: {more}"
        raise UserError(changed[0].key, changed[0].now, why, _FIX)
    for key in model_changes(directory, facts["files"]):
        why = f"its files have other content than when the run in {directory.root} began"
        raise UserError(key, facts["files"], why, _FIX)


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OpenedRun:
    """A claimed run directory with its open files.

    Example:
        >>> sorted(OpenedRun.__slots__)
        ['closing', 'directory', 'recorder', 'resumed']
    """

    directory: RunDirectory
    """The run directory."""
    recorder: Recorder
    """Writes metrics, digests and checkpoints."""
    resumed: Checkpoint | None
    """The checkpoint to resume from; None: the run begins."""
    closing: ExitStack
    """Closes what was opened if the run does not begin."""


@contextmanager
def open_run(
    report: Report, data: TrainData, facts: Manifest, display: Display
) -> Iterator[OpenedRun]:
    """Claim and open a run; it begins when the context ends, once everything is built.

    On an error everything is closed and the claim released: a new directory is emptied, an existing
    run notes why it did not resume.
    """
    session = open_session(report, data, facts)
    directory, root = session.directory, session.directory.root
    with ExitStack() as closing:
        closing.callback(release, root)
        closing.push(_noted(root, "before its first step", unless=session.abandon))
        store = open_store(directory.checkpoints, report.config.trainer)
        resumed = find_resume_checkpoint(report, store, directory)
        recorder = _open_recorder(report, directory, store, resumed, display, closing)
        yield OpenedRun(directory=directory, recorder=recorder, resumed=resumed, closing=closing)
        session.begin()
        closing.pop_all()


def _open_recorder(
    report: Report,
    directory: RunDirectory,
    store: CheckpointStore,
    resumed: Checkpoint | None,
    display: Display,
    closing: ExitStack,
) -> Recorder:
    """Open metrics, digests and checkpoints; lines of steps that will be repeated are dropped."""
    trainer = report.config.trainer
    first_step = first_logged_step(
        load_state(resumed.path, "loop") if resumed is not None else None
    )
    log = open_sinks(
        trainer.logger,
        directory=directory,
        identity=run_identity(report, directory),
        display=display,
        first_step=first_step,
    )
    closing.callback(log.close)
    digests = DigestFile(directory.digests, first_step=first_step)
    closing.callback(digests.close)
    is_async = saves_in_background(trainer, report.plan.where)
    return Recorder(
        directory, log, store, digests, last_metrics=metrics_at(resumed), is_async=is_async
    )


class StageRun(Protocol):
    """A run of any stage, as its session sees it."""

    @property
    def recorder(self) -> Recorder:
        """Its files."""
        ...

    @property
    def display(self) -> Display:
        """Shows its progress."""
        ...

    @property
    def interruption(self) -> Interruption:
        """Whether a signal has come."""
        ...

    @property
    def callbacks(self) -> RunCallbacks:
        """What is told of its steps."""
        ...

    @property
    def watchdog(self) -> PhaseWatchdog:
        """Watches its phases."""
        ...

    @property
    def step(self) -> int:
        """Finished steps."""
        ...

    @property
    def is_recorded(self) -> bool:
        """Whether the finished step has its line."""
        ...

    @property
    def total_steps(self) -> int:
        """Steps of the whole run."""
        ...

    @property
    def last_step(self) -> int:
        """The last step of this session."""
        ...

    def limit(self, trial_steps: int | None) -> None:
        """Make it a trial run, which ends after this step without a checkpoint; None: it is not."""
        ...

    def save_progress(self) -> None:
        """Save the last finished step after an interruption, unless it has a checkpoint."""
        ...


class Closable(Protocol):
    """Something that is closed at the end of a session."""

    def close(self) -> None:
        """Close it."""
        ...


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SessionEnd:
    """How a session ended.

    Example:
        >>> SessionEnd(headline=FINISHED, steps=3, seconds=1.5, curves=()).steps
        3
    """

    headline: str
    """Finished or interrupted, in words."""
    steps: int
    """Steps of this session."""
    seconds: float
    """Its duration."""
    curves: Sequence[Path]
    """Pictures of the metrics."""


def train_to_end(
    run: StageRun, train: Callable[[], None], *, parts: Sequence[Closable] = ()
) -> SessionEnd:
    """Carry out the loop of a run, until its last step or an interruption.

    Closes display, recorder and the other `parts` of the run, in this order, also on an error.
    """
    directory = run.recorder.directory
    started, first = time.monotonic(), run.step
    with ExitStack() as ending:
        _note_run_events(ending, directory)
        for part in reversed((run.display, run.recorder, *parts, SPANS)):
            ending.callback(part.close)
        SPANS.open(directory.events, process="controller")
        run.display.start(run.total_steps, done=run.step)
        lines = read_metrics(directory.metrics) if directory.metrics.is_file() else []
        run.callbacks.start(run.step, run.total_steps, lines)
        with run.interruption, run.watchdog:
            try:
                train()
            except Interrupted:
                run.save_progress()
            run.recorder.flush()
        run.callbacks.end(run.step, run.total_steps)
    seconds = time.monotonic() - started
    curves = plot_curves(directory.metrics, directory.report)
    done = run.step if run.is_recorded else run.step - 1
    return SessionEnd(
        headline=headline(
            directory,
            run.interruption,
            step=done,
            last_step=run.last_step,
            reason=run.callbacks.reason,
        ),
        steps=run.step - first,
        seconds=seconds,
        curves=curves,
    )


def _note_run_events(ending: ExitStack, directory: RunDirectory) -> None:
    """While `ending` is open, note lost output streams and the error that ends the run."""
    OUTPUT.listen(partial(note, directory.root))
    ending.callback(OUTPUT.listen, None)
    ending.push(_noted(directory.root, "in training"))


def headline(
    directory: RunDirectory,
    interruption: Interruption,
    *,
    step: int,
    last_step: int,
    reason: str | None = None,
) -> str:
    """How the session ended, for its summary; an end before the last step is noted in the run.

    `reason` is that of early stopping or of a callback.
    """
    if step >= last_step:
        return FINISHED
    if not interruption.is_wanted:
        if reason is None:
            return FINISHED
        note(directory.root, f"{stopped_early(step)}: {reason}")
        return f"Stopped early, {reason}"
    number = interruption.number
    who = signal.Signals(number).name if number is not None else "its caller"
    note(directory.root, f"interrupted by {who} after step {step} of {last_step}")
    return INTERRUPTED


_Leave = Callable[
    [type[BaseException] | None, BaseException | None, TracebackType | None], bool | None
]


def _noted(run: Path, when: str, *, unless: Callable[[], bool] = lambda: False) -> _Leave:
    def leave(
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,  # noqa: ARG001 - the form of an exit
    ) -> None:
        if kind is None or unless():
            return
        words = f"stopped by {error}" if kind is Stopped else f"{kind.__name__}: {error}"
        note(run, f"ended {when}: {words}")

    return leave
