"""The run directory: where every file of a run lies, and what makes a folder one.

The manifest is written last when a run begins, so a folder with a manifest is a whole run directory
and one without was never started.
"""

import re
import secrets
import warnings
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast, final

from luyen.base.digests import (
    page_with_checksum,
    read_text_with_checksum,
    text_with_checksum,
    without_checksum,
)
from luyen.base.errors import UserError
from luyen.base.files import TEMPORARY, read_json, write_whole, writing
from luyen.base.input_files import parse_yaml
from luyen.base.run_lock import OWNER

SCHEMA = 2
"""Version of the layout and of the files in it; a reader refuses a later one."""
_WITHOUT_CHECKSUM = 1
"""The version whose manifest, configuration and provenance have no checksums."""

_STEP = re.compile(r"step_(\d+)")
INPUTS = "inputs"
"""Folder of what a run was given as Python objects; it is written before the run begins."""
_BEGINNING = {OWNER, INPUTS, "config.yaml", "provenance.json", "resumptions.json"}
_OTHER_PLACE = (
    "free disk space, change the permissions, or choose another trainer.default_local_dir"
)


class DamagedRecord(UserWarning):
    """A run continues although a record of its history is damaged."""


def step_name(step: int) -> str:
    """How a step is written in file names, so that they sort.

    Example:
        >>> step_name(123)
        'step_000123'
    """
    assert step >= 0, f"step {step} is negative"
    return f"step_{step:06d}"


def step_of(name: str) -> int | None:
    """The step that a file name stands for; None for any other name.

    Example:
        >>> step_of("step_000123.parquet"), step_of(".tmp-step_000123")
        (123, None)
    """
    found = _STEP.fullmatch(name.partition(".")[0])
    return int(found.group(1)) if found else None


def new_run_id() -> str:
    """A name that no other run has: the time to the second, and chance."""
    return f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(3)}"


@final
class RunDirectory:
    """The paths of one run. Making the object touches nothing; `create` and `open` look.

    Example:
        >>> RunDirectory(Path("runs/demo/first")).rollouts(7).as_posix()
        'runs/demo/first/rollouts/step_000007.parquet'
    """

    def __init__(self, root: Path | str) -> None:
        self.root = _expanded(Path(root))
        self.manifest = self.root / "manifest.json"
        self.config = self.root / "config.yaml"
        self.provenance = self.root / "provenance.json"
        self.resumptions = self.root / "resumptions.json"
        self.journal = self.root / "journal"
        self.metrics = self.root / "metrics.jsonl"
        self.digests = self.root / "digests.jsonl"
        self.events = self.root / "events"
        self.tensorboard = self.root / "tensorboard"
        self.checkpoints = self.root / "checkpoints"
        self.report = self.root / "report"
        self.inputs = self.root / INPUTS
        """Files made of Python objects that the run was given."""

    @classmethod
    def create(
        cls,
        root: Path | str,
        *,
        config: str,
        provenance: Mapping[str, Any],
        manifest: Mapping[str, Any],
    ) -> "RunDirectory":
        """Begin a run: its config as YAML, where each key came from, and the facts of the run.

        Refused where there is a run already, or a folder with files that are not ours. Where other
        processes may want the same directory, it is claimed first (`luyen.base.run_lock`).
        """
        made = cls(root)
        made.demand_unused()
        with writing(made.root, field="run directory", fix=_OTHER_PLACE):
            made.root.mkdir(parents=True, exist_ok=True)
        made.write_config(config, provenance)
        write_whole(made.resumptions, page_with_checksum({"resumptions": []}), is_private=True)
        for folder in (made.events, made.root / "rollouts", made.checkpoints):
            with writing(folder, fix=_OTHER_PLACE):
                folder.mkdir(exist_ok=True)
        identity = {
            "schema": SCHEMA,
            "run_id": new_run_id(),
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        write_whole(made.manifest, page_with_checksum(identity | dict(manifest)), is_private=True)
        return made

    @classmethod
    def open(cls, root: Path | str) -> "RunDirectory":
        """A run that was begun earlier, to go on with or to read."""
        found = cls(root)
        if not found.exists:
            why = "no run was begun there: it has no manifest.json"
            raise UserError("run directory", str(found.root), why, "give the folder of a run")
        facts = found.read_manifest()
        schema = facts.get("schema")
        if isinstance(schema, int) and schema > SCHEMA:
            why = f"its files follow layout {schema!r}, and this version reads up to {SCHEMA}"
            raise UserError("run directory", str(found.root), why, "install a newer luyen")
        if not isinstance(schema, int) or "run_id" not in facts:
            raise _foreign(found.manifest, "manifest of a run")
        return found

    @property
    def exists(self) -> bool:
        """Whether a run was begun here; a UserError if the folder cannot be read."""
        try:
            return self.manifest.is_file()
        except OSError as error:
            why = f"it cannot be read: {error.strerror or error}"
            fix = "change the permissions, or give another folder"
            raise UserError("run directory", str(self.root), why, fix) from error

    @property
    def run_id(self) -> str:
        """The run's name in every log; a resumed run keeps it."""
        return str(self.read_manifest()["run_id"])

    def read_manifest(self) -> dict[str, Any]:
        """The facts that were written when the run began, as they were written.

        A UserError when they are not as they were written, or of another form.
        """
        page = read_json(self.manifest)
        found = without_checksum(page, self.manifest, is_demanded=page.get("schema") == SCHEMA)
        if page.get("schema") in (1, SCHEMA):  # of a later layout nothing is known
            # The first layout had no date.
            needed = ("run_id", "created") if page.get("schema") == SCHEMA else ("run_id",)
            _refuse_other_forms(found, self.manifest, needed)
        return found

    def write_config(self, config: str, provenance: Mapping[str, Any]) -> None:
        """Write the configuration in force, as YAML, and where each key of it came from.

        Only its owner can read it: keys of one's own may hold secrets.
        """
        write_whole(self.config, text_with_checksum(config), is_private=True)
        write_whole(self.provenance, page_with_checksum(provenance), is_private=True)

    def read_config(self) -> str:
        """The configuration as YAML; a UserError when it is not as it was written."""
        return read_text_with_checksum(self.config, is_demanded=self._has_checksums())

    def read_settings(self) -> dict[str, Any]:
        """The configuration as a tree; a UserError when it is not as it was written, or none."""
        text = self.read_config()
        try:
            found = parse_yaml(text)
        except ValueError as error:
            why = f"it cannot be read: {error}"
            raise UserError("file", str(self.config), why, "restore it from a copy") from error
        if not isinstance(found, dict):
            raise _foreign(self.config, "configuration of a run")
        return cast(dict[str, Any], found)

    def read_provenance(self) -> dict[str, str]:
        """Where each key was written; a UserError when the file is not as it was written."""
        page = read_json(self.provenance)
        found = without_checksum(page, self.provenance, is_demanded=self._has_checksums())
        if not all(isinstance(place, str) for place in found.values()):
            raise _foreign(self.provenance, "list of where keys were written")
        return found

    def read_resumptions(self) -> list[dict[str, Any]]:
        """What was noted each time the run was resumed, oldest first.

        A UserError when the file is not as it was written, or is missing: a run begins with one
        that lists nothing.
        """
        if not self.resumptions.is_file() and not self._has_checksums():
            return []
        page = without_checksum(read_json(self.resumptions), self.resumptions, is_demanded=True)
        if not isinstance(page.get("resumptions"), list):
            raise _foreign(self.resumptions, "list of resumptions")
        return page["resumptions"]

    def note_resumption(self, facts: Mapping[str, Any]) -> None:
        """Append the facts of a session that resumes the run.

        A damaged list is an error; a missing one is recreated, with a warning.
        """
        before: list[dict[str, Any]] = []
        if self.resumptions.is_file():
            try:
                before = self.read_resumptions()
            except UserError as error:
                fix = "restore it from a copy, or remove it and go on without what it lists"
                raise UserError(error.field, error.value, error.why, fix) from error
        elif self._has_checksums():
            said = f"{self.resumptions}: it is missing; what it listed is lost"
            warnings.warn(said, DamagedRecord, stacklevel=2)
        when = {"time": datetime.now(UTC).isoformat(timespec="seconds")}
        listed = [*before, when | dict(facts)]
        write_whole(self.resumptions, page_with_checksum({"resumptions": listed}), is_private=True)

    def _has_checksums(self) -> bool:
        """Whether this run was begun with checksums; files without a manifest were not."""
        return self.exists and self.read_manifest().get("schema") != _WITHOUT_CHECKSUM

    def rollouts(self, step: int, *, validation: bool = False) -> Path:
        """Where the rollouts of a step go."""
        kind = "validation" if validation else "rollouts"
        return self.root / kind / f"{step_name(step)}.parquet"

    def parity(self, step: int) -> Path:
        """Where the tokens lie about which sampler and trainer disagreed most in a step."""
        return self.root / "parity" / f"{step_name(step)}.json"

    def checkpoint(self, step: int) -> Path:
        """Where the checkpoint of a step lies."""
        return self.checkpoints / step_name(step)

    def demand_unused(self) -> None:
        """A UserError unless a run may begin here.

        What an interrupted `create` left is ours to replace; anything else is not.
        """
        if self.exists:
            why = "it holds a run already"
            fix = "resume it, or choose another trainer.experiment_name"
            raise UserError("run directory", str(self.root), why, fix)
        if self.root.exists() and not self.root.is_dir():
            why, fix = "a file of that name is in the way", "choose another experiment name"
            raise UserError("run directory", str(self.root), why, fix)
        for path in self._present():
            ours = path.name in _BEGINNING or path.name.startswith(TEMPORARY)
            if not ours and not (path.is_dir() and not any(path.iterdir())):
                why = f"it is not empty (`{path.name}`) and holds no run: no manifest.json"
                fix = "choose another trainer.experiment_name, clear the folder, or, if it was a "
                fix += "run, restore its manifest.json from a copy"
                raise UserError("run directory", str(self.root), why, fix)

    def _present(self) -> list[Path]:
        try:
            return sorted(self.root.iterdir()) if self.root.is_dir() else []
        except OSError as error:
            why = f"it cannot be listed: {error.strerror or error}"
            raise UserError("run directory", str(self.root), why, _OTHER_PLACE) from error


def _expanded(root: Path) -> Path:
    try:
        return root.expanduser()
    except RuntimeError as error:
        why, fix = f"there is no user {root.parts[0]}", "write the path without `~`"
        raise UserError("run directory", str(root), why, fix) from error


_TEXTS = ("run_id", "created", "code", "folder")
_BLOCKS = (
    *("versions", "packages", "hardware", "settings", "threads", "seeds", "datasets", "files"),
    *("revision", "rows"),
)
_FORMS: dict[str, type] = {
    **dict.fromkeys(_TEXTS, str),
    **dict.fromkeys(_BLOCKS, dict),
    "command": list,
}
"""What readers of a manifest rely on; a fact may be missing, or null."""


def _refuse_other_forms(manifest: Mapping[str, Any], path: Path, needed: tuple[str, ...]) -> None:
    """A UserError where a fact is of another form than readers rely on, or a needed one missing."""
    for name, form in _FORMS.items():
        is_missing = manifest.get(name) is None and name not in needed
        if not is_missing and not isinstance(manifest.get(name), form):
            raise _foreign(path, f"manifest of a run: `{name}` is of another form")
    inner: dict[str, type] = {"rows": int, "files": dict}
    for name, form in inner.items():
        entries: Mapping[str, Any] = manifest.get(name) or {}
        if not all(type(value) is form for value in entries.values()):
            raise _foreign(path, f"manifest of a run: `{name}` is of another form")


def _foreign(path: Path, what: str) -> UserError:
    """The content is whole, and is that of another file."""
    return UserError("file", str(path), f"it is no {what}", "restore it from a copy")
