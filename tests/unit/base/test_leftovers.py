"""What killed writers left is swept, what a live one writes is not, and other names never."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from luyen.base import files
from luyen.base.files import (
    in_progress,
    is_abandoned,
    remove_abandoned,
    remove_abandoned_writes,
    temporary_path,
)

DEAD = 999999999


def unfinished(path: Path, pid: int) -> Path:
    """The name that another process would have chosen."""
    return path.with_name(temporary_path(path).name.replace(f"-{os.getpid()}-", f"-{pid}-"))


def names(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


def test_only_what_killed_writers_left_is_swept(tmp_path: Path):
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        folders = [tmp_path, *(tmp_path / n for n in ("rollouts", "validation", "checkpoints"))]
        kept: list[str] = []
        for folder in folders:
            folder.mkdir(exist_ok=True)
            live = unfinished(folder / "step_000001.parquet", other.pid)
            for path in (live, folder / ".tmp-mine", folder / "step_000001.parquet"):
                path.touch()
                kept.append(path.relative_to(tmp_path).as_posix())
            unfinished(folder / "step_000001.parquet", DEAD).touch()
            (folder / f".tmp-step_000002.parquet-{DEAD}-0a1b2c3d").touch()
            (unfinished(folder / "step_000001", DEAD) / "actor").mkdir(parents=True)
        remove_abandoned(tmp_path)
        wanted = sorted([*kept, *(f.name for f in folders[1:])])
        assert names(tmp_path) == wanted
        other.communicate(b"\n")
    remove_abandoned(tmp_path)
    assert not [name for name in names(tmp_path) if str(other.pid) in name]


def test_what_this_process_is_writing_is_no_leftover(tmp_path: Path):
    path = temporary_path(tmp_path / "a.txt")
    path.touch()
    with in_progress(path):
        remove_abandoned(tmp_path)
        assert path.exists()
    remove_abandoned(tmp_path)
    assert not path.exists()


def test_the_ids_of_another_machine_mean_nothing_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(files.platform, "node", lambda: "elsewhere")
    path = unfinished(tmp_path / "a.txt", DEAD)
    path.touch()
    monkeypatch.undo()
    assert not is_abandoned(path), "nobody here can know"
    os.utime(path, (0, 0))
    assert is_abandoned(path), "nothing was written for more than a day"


def test_stacks_that_a_killed_watchdog_never_wrote_are_swept(tmp_path: Path):
    events = tmp_path / "events"
    events.mkdir()
    (events / f"locked-{DEAD}.txt").touch()
    (events / f"locked-{DEAD - 1}.txt").write_text("stacks")
    (events / f"locked-{os.getpid()}.txt").touch()
    remove_abandoned(tmp_path)
    assert names(events) == sorted([f"locked-{DEAD - 1}.txt", f"locked-{os.getpid()}.txt"])


def test_a_writer_sweeps_what_earlier_ones_of_the_same_file_left(tmp_path: Path):
    mine, other = unfinished(tmp_path / "out", DEAD), unfinished(tmp_path / "in", DEAD)
    mine.mkdir()
    other.mkdir()
    remove_abandoned_writes(tmp_path / "out")
    assert names(tmp_path) == [other.name]


@pytest.mark.parametrize("name", ["x" * 255, "é" * 127])
def test_the_longest_name_has_an_unfinished_one(tmp_path: Path, name: str):
    path = temporary_path(tmp_path / name)
    path.touch()
    assert is_abandoned(path)
