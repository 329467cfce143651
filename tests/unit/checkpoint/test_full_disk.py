"""Whatever the disk refuses while a checkpoint is made, the one before is whole, so is the next."""

import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from luyen.base.errors import UserError
from luyen.checkpoint import shards, store
from luyen.checkpoint.store import CheckpointStore
from luyen.checkpoint.tensors import load_state
from luyen.checkpoint.writer import CheckpointWriter

PLACES = {
    "mkdir": (Path, "mkdir"),
    "text": (Path, "write_text"),
    "tensors": (shards, "save_file"),
    "rename": (Path, "rename"),
    "sync": (store, "sync"),
}


def state(step: int) -> dict[str, Any]:
    weights = {f"w{i}": torch.full((500,), float(step + i)) for i in range(4)}
    return {
        "actor": weights,
        "actor_optimizer": {"masters": [torch.ones(9)]},
        "loop": {"step": step},
    }


def failing_at(call: int, real: Callable[..., Any], count: list[int]) -> Callable[..., Any]:
    def attempt(*args: Any, **kwargs: Any) -> Any:
        count[0] += 1
        if count[0] == call:
            raise OSError(28, "No space left on device")
        return real(*args, **kwargs)

    return attempt


def what_was_said(writer: CheckpointWriter, step: int) -> str | None:
    try:
        writer.save(step, state(step), facts={})
        writer.wait()
    except UserError as error:
        return str(error)
    return None


@pytest.mark.parametrize("name", PLACES)
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "aside"])
def test_every_call_that_writes_may_be_the_one_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, is_async: bool
):
    kept_in = CheckpointStore(tmp_path / "checkpoints", keep=1)
    writer = CheckpointWriter(kept_in, is_async=is_async)
    writer.save(1, state(1), facts={})
    writer.wait()
    newest, call = 1, 0
    while True:
        call += 1
        count = [0]
        holder, attribute = PLACES[name]
        with monkeypatch.context() as full:
            real = getattr(holder, attribute)
            full.setattr(holder, attribute, failing_at(call, real, count))
            said = what_was_said(writer, newest + 1)
        assert said is None or ("No space left on device" in said and "step_" in said)
        if count[0] < call:
            break
        found = kept_in.newest_sound()
        assert found is not None
        assert found.step in (newest, newest + 1), "the one before, or the new one if it was there"
        newest = found.step
        kept = load_state(found.path, "actor")
        assert kept["w3"][0] == newest + 3
        assert load_state(found.path, "loop") == {"step": newest}
    assert call > 1, "the place was never reached"
    writer.save(newest + 2, state(newest + 2), facts={})
    writer.wait()
    assert [path.name for path in kept_in.directory.iterdir()] == [f"step_{newest + 2:06d}"]


@pytest.mark.parametrize("room", [0, 1, 100, 1000, 5000, 9000])
def test_a_file_that_may_not_grow_is_named_with_the_reason(tmp_path: Path, room: int):
    kept_in = CheckpointStore(tmp_path)
    writer = CheckpointWriter(kept_in)
    writer.save(1, state(1), facts={})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
    try:
        with pytest.raises(UserError, match=r"checkpoint = .*step_000002.*File too large"):
            writer.save(2, {**state(2), "large": {"w": torch.ones(10_000)}}, facts={})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert kept_in.list() == (1,)
    assert kept_in.load(1).step == 1
