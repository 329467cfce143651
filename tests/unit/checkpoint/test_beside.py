"""Checkpoints of two ranks that go on training: the same files, whole or absent, errors heard."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from luyen.base.errors import UserError
from luyen.checkpoint.store import CheckpointStore, read_manifest
from luyen.checkpoint.tensors import save_state
from luyen.checkpoint.writer import CheckpointWriter, WritersGone
from tests.unit.checkpoint.rank_processes import RankProcesses


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankProcesses]:
    """The same two for all tests; the last one ends them."""
    found = RankProcesses(tmp_path_factory.mktemp("ranks"))
    found.all("learn", 0)
    yield found
    found.stop()


@pytest.fixture
def writer(tmp_path: Path) -> CheckpointWriter:
    return CheckpointWriter(CheckpointStore(tmp_path / "beside"), is_async=True)


def save(writer: CheckpointWriter, ranks: RankProcesses, step: int) -> None:
    """As `luyen.runtime.ray.ranks.RankGroup.save` does it."""

    def fill(folder: Path) -> None:
        ranks.all("begin_write", folder)
        save_state(folder, "loop", {"step": step})

    writer.save_remote(step, fill, lambda: all(ranks.all("is_written")), facts={})


def files(store: CheckpointStore, step: int) -> dict[str, object]:
    return read_manifest(store.load(step).path)["files"]


def held(ranks: RankProcesses) -> tuple[list[Any], list[Any]]:
    """Digests of what ranks hold."""
    return ranks.all("moment_sums"), ranks.all("weight_sums")


def test_ranks_learn_while_they_write_and_the_files_are_those_of_waiting(
    tmp_path: Path, ranks: RankProcesses, writer: CheckpointWriter
):
    def wait_for(folder: Path) -> None:
        ranks.all("write", folder)
        save_state(folder, "loop", {"step": 1})

    waiting = CheckpointStore(tmp_path / "waiting")
    waiting.save(1, wait_for)
    before = held(ranks)
    ranks.all("hold", True)
    written = ranks.all("heard")
    save(writer, ranks, 1)
    ranks.all("learn", 1)
    assert (writer.finished(), writer.store.list()) == ([], ())
    ranks.all("hold", False)
    writer.wait()
    assert (writer.finished(), writer.store.list()) == ([1], (1,))
    for old, now in zip(written, ranks.all("heard"), strict=True):
        # Both files of a rank, weights and optimizer, came after the step.
        assert now[len(old) :] == ["learned", "written", "written"]
    assert files(writer.store, 1) == files(waiting, 1)
    assert held(ranks) != before
    ranks.all("load", writer.store.path(1))
    assert held(ranks) == before


def test_the_next_save_waits_and_its_copies_do_not_touch_the_last(
    ranks: RankProcesses, writer: CheckpointWriter
):
    save(writer, ranks, 1)
    first = held(ranks)
    ranks.all("learn", 1)
    save(writer, ranks, 2)
    assert writer.store.list() == (1,), "the first was whole before the second began"
    ranks.all("learn", 2)
    writer.wait()
    assert writer.finished() == [1, 2]
    ranks.all("load", writer.store.path(1))
    assert held(ranks) == first


def test_the_error_of_a_rank_reaches_the_loop_and_leaves_no_checkpoint(
    ranks: RankProcesses, writer: CheckpointWriter
):
    ranks.some([1], "fill_disk", True)
    save(writer, ranks, 1)
    with pytest.raises(UserError, match="No space left on device"):
        writer.wait()
    assert writer.store.list() == ()
    ranks.some([1], "fill_disk", False)
    while not all(ranks.all("has_ended")):
        pass
    save(writer, ranks, 2)
    writer.wait()
    assert [path.name for path in writer.store.directory.iterdir()] == ["step_000002"]


def test_writers_that_are_gone_are_not_reported_twice(tmp_path: Path):
    def gone() -> bool:
        raise WritersGone

    writer = CheckpointWriter(CheckpointStore(tmp_path / "beside"), is_async=True)
    writer.save_remote(1, lambda folder: (folder / "part").touch(), gone, facts={})
    writer.wait()
    assert writer.finished() == []
    assert list(writer.store.directory.iterdir()) == []


def test_a_rank_that_dies_while_it_writes_leaves_nothing(
    ranks: RankProcesses, writer: CheckpointWriter
):
    ranks.all("hold", True)
    save(writer, ranks, 1)
    with pytest.raises(EOFError):
        ranks.some([1], "die")
    with pytest.raises((EOFError, BrokenPipeError)):
        writer.finished()
    assert list(writer.store.directory.iterdir()) == []
    assert writer.finished() == []
    writer.wait()
