"""A session in a run directory: claim, resume checks, what is written when it starts and ends."""

import shutil
import signal
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, final

import yaml

from luyen.base.errors import UserError
from luyen.base.files import remove_abandoned
from luyen.base.run_lock import OWNER, claim, release
from luyen.base.rundir import DamagedRecord, RunDirectory
from luyen.checkpoint.store import CheckpointStore
from luyen.config.check import Report
from luyen.config.loader.parse import stored_values
from luyen.config.pipeline import run_directory
from luyen.config.resume import changed_keys, has_progress, model_changes
from luyen.config.trust import sign_run
from luyen.data.build import TrainData
from luyen.telemetry.artifacts import Artifact
from luyen.telemetry.manifest import Manifest
from luyen.telemetry.output import OUTPUT
from luyen.telemetry.summary import FINISHED, INTERRUPTED, note
from luyen.train.interrupt import Interruption, Stopped
from luyen.train.lineage import inputs_of, note_inputs

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
        self._config = yaml.safe_dump(stored_values(report.config), sort_keys=False)
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
            warnings.warn(said, ChangedRows, stacklevel=4)

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
            warnings.warn(said, DamagedRecord, stacklevel=4)
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


def release_on_error(opened: ExitStack, session: Session) -> None:
    """On exit of `opened`, release the claim; an existing run notes why it did not resume."""
    root = session.directory.root
    opened.callback(release, root)
    opened.push(_noted(root, "before its first step", unless=session.abandon))


def note_run_events(ending: ExitStack, directory: RunDirectory) -> None:
    """While `ending` is open, note lost output streams and the error that ends the run."""
    OUTPUT.listen(partial(note, directory.root))
    ending.callback(OUTPUT.listen, None)
    ending.push(_noted(directory.root, "in training"))


def headline(
    directory: RunDirectory, interruption: Interruption, *, step: int, last_step: int
) -> str:
    """How the session ended, for its summary; an interruption is noted in the run."""
    if not interruption.is_wanted or step >= last_step:
        return FINISHED
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
