"""A checkpoint is there whole or not at all, and a damaged one is named by its file."""

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from luyen.base.errors import UserError
from luyen.checkpoint.store import CheckpointStore, DamagedCheckpoint, verify


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
    "layout 2.*newer luyen": lambda f: (f / "manifest.json").write_text('{"schema": 2}'),
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

count, rename, replace = 0, pathlib.Path.rename, pathlib.Path.replace

def dying_rename(path, to):
    global count
    if f"rename {count}" == point:
        die()
    count += 1
    done = rename(path, to)
    if f"after {count}" == point:
        die()
    return done

def dying_replace(path, to):
    if point == "manifest":
        die()
    return replace(path, to)

pathlib.Path.rename, pathlib.Path.replace = dying_rename, dying_replace
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
