"""A run that goes on from an earlier point does not take its former future for its own."""

from pathlib import Path

import pytest

from luyen.checkpoint.courses import LeftBehind, leave_behind
from luyen.checkpoint.store import CheckpointStore


def fill(folder: Path) -> None:
    (folder / "model.bin").write_text("w")


def saved(store: CheckpointStore, *steps: int) -> None:
    for step in steps:
        store.save(step, fill)


def test_later_checkpoints_go_aside_and_are_whole_there(tmp_path: Path):
    store = CheckpointStore(tmp_path, keep=2)
    saved(store, 4, 6)
    with pytest.warns(LeftBehind, match="left-step_000006"):
        [place] = leave_behind(store, 4)
    assert (store.list(), (place / "model.bin").read_text()) == ((4,), "w")
    saved(store, 5)
    assert store.list() == (4, 5), "those being made stay"


def test_what_went_aside_before_is_not_written_over(tmp_path: Path):
    store = CheckpointStore(tmp_path)
    for _ in range(2):
        saved(store, 1, 2)
        with pytest.warns(LeftBehind):
            leave_behind(store, 1)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["left-step_000002", "left-step_000002-2", "step_000001"]


def test_nothing_later_nothing_said(tmp_path: Path, recwarn: pytest.WarningsRecorder):
    store = CheckpointStore(tmp_path)
    saved(store, 1)
    assert (leave_behind(store, 1), len(recwarn)) == ([], 0)
