"""A run directory of a stranger in which a file is a pipe, a device or a flood: nobody waits."""

import errno
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from luyen.base import input_files
from luyen.base.digests import page_with_checksum
from luyen.base.errors import UserError
from luyen.base.rundir import RunDirectory
from luyen.cli.runs import run_runs
from luyen.studio.diff import compare_runs
from luyen.studio.doctor.diagnose import diagnose
from luyen.studio.doctor.record import read_run
from luyen.studio.runs import list_runs
from luyen.studio.timeline import read_processes
from luyen.telemetry.rollout_files import read_rollouts
from tests.unit.studio.run_files import rollout, write_run, write_steps


def flood(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(input_files.MOST_RECORDS + 1)  # a hole: it takes no room


KINDS: dict[str, Callable[[Path], None]] = {
    "pipe": os.mkfifo,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "flood": flood,
}
FILES = ("config.yaml", "manifest.json", "metrics.jsonl", "digests.jsonl", "notes.jsonl", ".owner")
MORE = ("provenance.json", "resumptions.json", "parity/step_000001.json", "events/controller.jsonl")


def odd(folder: Path, name: str, kind: str) -> Path:
    """A run below a folder with one odd file."""
    root = write_run(folder / "project" / "run", {"reward/mean": [0.5]})
    write_steps(root, [rollout(1)])
    place = root / name
    place.parent.mkdir(exist_ok=True)
    place.unlink(missing_ok=True)
    KINDS[kind](place)
    return root


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", [*FILES, *MORE])
def test_readers_end(tmp_path: Path, name: str, kind: str):
    root = odd(tmp_path, name, kind)
    list_runs(tmp_path)
    for read in (
        lambda: diagnose(read_run(root)),
        lambda: compare_runs(root, root),
        lambda: read_processes(root),
        lambda: RunDirectory.open(root).read_config(),
    ):
        with suppress(UserError):  # what cannot be read may be named, and nothing else is raised
            read()


@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_rollouts_are_refused(tmp_path: Path, kind: str):
    root = odd(tmp_path, "rollouts/step_000001.parquet", kind)
    with pytest.raises(UserError, match="cannot be read"):
        read_rollouts(root / "rollouts/step_000001.parquet")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("created", None),
        ("created", 5),
        ("created", []),
        ("run_id", {}),
        ("rows", []),
        ("rows", {"train": "many"}),
        ("rows", {"train": [1]}),
        ("files", {"a": 3}),
        ("files", 3),
        ("packages", "all"),
        ("settings", [1]),
        ("hardware", "none"),
        ("command", 5),
    ],
)
def test_a_sealed_manifest_of_another_form_is_named(tmp_path: Path, name: str, value: object):
    """As in the run of a stranger, who can make a new seal: other runs are still listed."""
    root = write_run(tmp_path / "project" / "run", {"reward/mean": [0.5]})
    write_run(tmp_path / "project" / "other", {"reward/mean": [0.5]})
    run = RunDirectory.open(root)
    run.manifest.write_text(page_with_checksum({**run.read_manifest(), name: value}))
    with pytest.raises(UserError, match=f"`{name}` is of another form"):
        run.read_manifest()
    notes = {facts.name: facts.note for facts in list_runs(tmp_path)}
    assert f"`{name}` is of another form" in notes["project/run"]
    assert "another form" not in notes["project/other"]
    assert run_runs(tmp_path, as_json=False) == 0


def test_a_run_that_another_user_has_closed_hides_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for name in ("closed", "open"):
        write_run(tmp_path / "project" / name, {"reward/mean": [0.5]})
    closed, is_file = tmp_path / "project" / "closed", Path.is_file

    def refused(path: Path) -> bool:
        if path.parent == closed:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return is_file(path)

    monkeypatch.setattr(Path, "is_file", refused)
    assert [Path(run.path).name for run in list_runs(tmp_path)] == ["open"]
    with pytest.raises(UserError, match=r"closed.*Permission denied"):
        list_runs(closed)
