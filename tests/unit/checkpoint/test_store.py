"""A checkpoint is there whole or not at all, and a damaged one is named by its file."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from luyen.base.errors import UserError
from luyen.checkpoint.store import BestMetric, CheckpointStore, DamagedCheckpoint, verify


def fill(text: str):
    def writer(folder: Path) -> None:
        (folder / "model.bin").write_text(text)
        (folder / "shards").mkdir()
        (folder / "shards" / "0.bin").write_bytes(b"\x00" * 1000)

    return writer


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_saved_checkpoint_is_listed_loaded_and_hashed(tmp_path: Path):
    store = CheckpointStore(tmp_path / "checkpoints")
    assert (store.list(), store.latest(), store.newest_sound()) == ((), None, None)
    for step in (5, 10):
        store.save(step, fill(str(step)), facts={"reward/mean": 0.5, "best": float("nan")})
    assert (store.list(), store.latest()) == ((5, 10), 10)
    loaded = store.load(10)
    assert loaded.path == tmp_path / "checkpoints" / "step_000010"
    assert (loaded.path / "model.bin").read_text() == "10"
    assert loaded.facts == {"reward/mean": 0.5, "best": "nan"}
    manifest = json.loads((loaded.path / "manifest.json").read_text())
    assert manifest["files"]["shards/0.bin"] == {
        # sha256 of a thousand zero bytes
        "sha256": "541b3e9daa09b20bf85fa273e5cbd3e80185aa4ec298e765db87742b70138a53",
        "bytes": 1000,
    }
    assert manifest["files"].keys() == {"model.bin", "shards/0.bin"}


def test_looking_makes_nothing(tmp_path: Path):
    CheckpointStore(tmp_path / "none").list()
    assert names(tmp_path) == []


def test_a_writer_that_fails_leaves_nothing_and_harms_nothing(tmp_path: Path):
    store = CheckpointStore(tmp_path)
    store.save(1, fill("one"))

    def interrupted(folder: Path) -> None:
        (folder / "model.bin").write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.save(2, interrupted)
    assert names(tmp_path) == ["step_000001"]
    assert store.load(1).step == 1


def test_a_full_disk_is_said_and_the_last_checkpoint_stays(tmp_path: Path):
    store = CheckpointStore(tmp_path, keep=1)
    store.save(1, fill("one"))

    def full(folder: Path) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(UserError, match=r"step_000002.*No space left.*intact"):
        store.save(2, full)
    assert store.load(1).step == 1


@pytest.mark.parametrize("keep", [1, 2])
def test_only_the_newest_stay(tmp_path: Path, keep: int):
    store = CheckpointStore(tmp_path, keep=keep)
    for step in range(1, 6):
        store.save(step, fill("x"))
    assert names(tmp_path) == [f"step_{step:06d}" for step in range(6 - keep, 6)]


def kept(
    folder: Path, values: list[float | None], *, keep: int, best: BestMetric
) -> tuple[int, ...]:
    store = CheckpointStore(folder, keep=keep, best=best)
    for step, value in enumerate(values, 1):
        metrics = {} if value is None else {"val/accuracy": value}
        store.save(step, fill("x"), facts={"metrics": metrics})
    return store.list()


VALUES = [0.2, 0.9, None, 0.5, float("nan"), 0.9, 0.1, float("inf")]


@pytest.mark.parametrize(
    ("mode", "count", "stay"),
    [("max", 0, (8,)), ("max", 1, (6, 8)), ("max", 3, (2, 4, 6, 8)), ("min", 2, (1, 7, 8))],
)
def test_the_best_stay_besides_the_newest(tmp_path: Path, mode, count: int, stay: tuple[int, ...]):
    best = BestMetric(count=count, metric="val/accuracy", mode=mode)
    assert kept(tmp_path, VALUES, keep=1, best=best) == stay


def test_a_checkpoint_whose_facts_cannot_be_read_is_never_best(tmp_path: Path):
    best = BestMetric(count=1, metric="val/accuracy", mode="max")
    assert kept(tmp_path, [0.5, 0.9], keep=2, best=best) == (1, 2)
    (tmp_path / "step_000002" / "manifest.json").write_text("{")
    CheckpointStore(tmp_path, keep=1, best=best).save(3, fill("x"))
    assert CheckpointStore(tmp_path).list() == (1, 3)


def test_what_a_living_process_is_writing_is_left_alone(tmp_path: Path):
    other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    mine = os.getpid()
    living = tmp_path / f".tmp-step_000007-{other.pid}-0a1b2c3d"
    gone = tmp_path / ".tmp-step_000007-999999999-0a1b2c3d"
    before = tmp_path / f".tmp-step_000007-{mine}-0a1b2c3d"
    for folder in (living, gone, before, tmp_path / ".tmp-odd"):
        folder.mkdir()
    try:
        CheckpointStore(tmp_path).save(1, fill("one"))
        assert names(tmp_path) == [".tmp-odd", living.name, "step_000001"]
    finally:
        other.communicate(b"\n")
    CheckpointStore(tmp_path).save(2, fill("two"))
    assert names(tmp_path) == [".tmp-odd", "step_000001", "step_000002"], "`odd` is not our name"


def test_a_store_leaves_what_another_of_this_process_is_writing(tmp_path: Path):
    def writer(folder: Path) -> None:
        (folder / "model.bin").write_text("one")
        CheckpointStore(tmp_path).save(2, fill("two"))

    CheckpointStore(tmp_path).save(1, writer)
    assert (CheckpointStore(tmp_path).load(1).path / "model.bin").read_text() == "one"


def test_a_step_saved_again_is_replaced(tmp_path: Path):
    store = CheckpointStore(tmp_path, keep=3)
    store.save(4, fill("old"))
    store.save(4, fill("new"))
    assert names(tmp_path) == ["step_000004"]
    assert (store.load(4).path / "model.bin").read_text() == "new"


def spoil_nothing(folder: Path) -> None:
    (folder / "note.txt").write_text("left by a person")


def flip(folder: Path) -> None:
    data = bytearray((folder / "shards" / "0.bin").read_bytes())
    data[500] ^= 1
    (folder / "shards" / "0.bin").write_bytes(data)


def edit(folder: Path) -> None:
    text = (folder / "manifest.json").read_text()
    (folder / "manifest.json").write_text(text.replace('"step": 2', '"step": 3'))


DAMAGE = {
    "0.bin.*sha256 differs": flip,
    "model.bin.*has 2 bytes and was written with 3": lambda f: (f / "model.bin").write_text("tw"),
    "model.bin.*missing": lambda f: (f / "model.bin").unlink(),
    "manifest.json.*missing": lambda f: (f / "manifest.json").unlink(),
    "manifest.json.*damaged": lambda f: (f / "manifest.json").write_text('{"schema": 1'),
    "manifest.json.*not as it was written": edit,
    "layout 3.*newer luyen": lambda f: (f / "manifest.json").write_text('{"schema": 3}'),
}


@pytest.mark.parametrize("said", DAMAGE)
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(tmp_path: Path, said: str):
    store = CheckpointStore(tmp_path)
    store.save(1, fill("one"))
    DAMAGE[said](store.save(2, fill("two")))
    with pytest.raises(UserError, match=said):
        store.load(2)
    with pytest.warns(DamagedCheckpoint, match=said):
        found = store.newest_sound()
    assert found is not None
    assert found.step == 1


def test_a_file_that_nobody_wrote_does_not_matter(tmp_path: Path):
    store = CheckpointStore(tmp_path)
    spoil_nothing(store.save(1, fill("one")))
    assert store.load(1).step == 1


def test_a_step_that_is_not_there_is_named_with_those_that_are(tmp_path: Path):
    store = CheckpointStore(tmp_path)
    store.save(1, fill("one"))
    with pytest.raises(UserError, match=r"checkpoint = 7.*there are: 1"):
        store.load(7)
    with pytest.raises(UserError, match="no such folder"):
        verify(tmp_path / "step_000007")


def test_a_checkpoint_moved_elsewhere_is_still_whole(tmp_path: Path):
    made = CheckpointStore(tmp_path).save(3, fill("three"))
    shutil.move(made, tmp_path / "best")
    assert verify(tmp_path / "best").step == 3


CHILD = """
import os, pathlib, signal, sys
from luyen.checkpoint.store import CheckpointStore
folder, step, point = pathlib.Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
die = lambda: os.kill(os.getpid(), signal.SIGKILL)

def writer(to):
    (to / "model.bin").write_text("new")
    if point == "writing":
        die()

count, rename, write_text = 0, pathlib.Path.rename, pathlib.Path.write_text

def dying_rename(path, to):
    global count
    if f"rename {count}" == point:
        die()
    count += 1
    done = rename(path, to)
    if f"after {count}" == point:
        die()
    return done

def dying_write(path, text, encoding=None):
    if point == "manifest" and path.name == "manifest.json":
        write_text(path, text[:40], encoding)
        die()
    return write_text(path, text, encoding)

pathlib.Path.rename, pathlib.Path.write_text = dying_rename, dying_write
CheckpointStore(folder, keep=2).save(step, writer)
"""

# (where the writer dies, what the newest checkpoint then holds); step 2 holds "old" before.
FRESH = {
    "writing": "old",
    "manifest": "old",
    "rename 0": "old",
    "after 1": "new",
    "rename 1": "new",
}
AGAIN = {
    "writing": "old",
    "manifest": "old",
    "rename 0": "old",
    "rename 1": "old",
    "after 2": "new",
}


@pytest.mark.parametrize(
    ("step", "point", "holds"),
    [(3, point, holds) for point, holds in FRESH.items()]
    + [(2, point, holds) for point, holds in AGAIN.items()],
)
def test_killed_at_any_point_the_newest_checkpoint_is_whole(
    tmp_path: Path, step: int, point: str, holds: str
):
    store = CheckpointStore(tmp_path, keep=2)
    for earlier in (1, 2):
        store.save(earlier, lambda to: (to / "model.bin").write_text("old"))  # type: ignore[arg-type]
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(tmp_path), str(step), point], check=False
    )
    assert done.returncode == -signal.SIGKILL
    found = store.newest_sound()
    assert found is not None
    assert found.step == (step if holds == "new" else 2)
    assert (found.path / "model.bin").read_text() == holds
    assert all(store.load(known).step == known for known in store.list())
    store.save(9, fill("next"))
    left = [name for name in names(tmp_path) if not name.startswith("step_")]
    assert left in ([], ["replaced-step_000002"]), "what the dead writer left is swept"
    assert store.list() == (found.step, 9)
