"""A run that goes on from an earlier point does not take its former future for its own."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from luyen.checkpoint.store import CheckpointStore
from luyen.checkpoint.superseded import SupersededCheckpoints, archive_superseded


def fill(folder: Path) -> None:
    (folder / "model.bin").write_text("w")


def saved(store: CheckpointStore, *steps: int) -> None:
    for step in steps:
        store.save(step, fill)


def test_later_checkpoints_go_aside_and_are_whole_there(tmp_path: Path):
    store = CheckpointStore(tmp_path, keep=2)
    saved(store, 4, 6)
    with pytest.warns(SupersededCheckpoints, match="left-step_000006"):
        [place] = archive_superseded(store, 4)
    assert (store.list(), (place / "model.bin").read_text()) == ((4,), "w")
    saved(store, 5)
    assert store.list() == (4, 5), "those being made stay"


def test_what_went_aside_before_is_not_written_over(tmp_path: Path):
    store = CheckpointStore(tmp_path)
    for _ in range(2):
        saved(store, 1, 2)
        with pytest.warns(SupersededCheckpoints):
            archive_superseded(store, 1)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["left-step_000002", "left-step_000002-2", "step_000001"]


def test_nothing_later_nothing_said(tmp_path: Path, recwarn: pytest.WarningsRecorder):
    store = CheckpointStore(tmp_path)
    saved(store, 1)
    assert (archive_superseded(store, 1), len(recwarn)) == ([], 0)


def test_of_what_was_left_behind_as_many_stay_as_the_store_keeps(tmp_path: Path):
    store = CheckpointStore(tmp_path, keep=1)
    for later in (3, 4, 5, 6):
        saved(CheckpointStore(tmp_path), 1, later)
        with pytest.warns(SupersededCheckpoints):
            archive_superseded(store, 1)
    (tmp_path / "left-of-mine").mkdir()
    source = tmp_path / "left-step_000005"
    assert names(tmp_path) == ["left-of-mine", source.name, "left-step_000006", "step_000001"]
    archive_superseded(store, 1, source=source)
    assert source.is_dir(), "the run goes on from it"
    archive_superseded(store, 1)
    assert names(tmp_path) == ["left-of-mine", "left-step_000006", "step_000001"]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_checkpoint_and_those_it_replaces_are_told_at_once(tmp_path: Path):
    told: list[tuple[str, list[str]]] = []

    class Heard:
        def kept(self, path: Path, going: Sequence[Path] = ()) -> None:
            told.append((path.name, [old.name for old in going if old.is_dir()]))

        def going(self, path: Path) -> None:
            told.append((path.name, []))

    store = CheckpointStore(tmp_path, keep=1, watcher=Heard())
    for step in (1, 2):
        store.save(step, lambda folder: (folder / "a").touch())
    assert told == [("step_000001", []), ("step_000002", ["step_000001"])]
