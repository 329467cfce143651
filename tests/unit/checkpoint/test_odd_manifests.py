"""A manifest that somebody wrote, with a seal that fits, is refused by its name."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from luyen.base.errors import UserError
from luyen.checkpoint.store import MANIFEST, CheckpointStore, _manifest_checksum, verify
from luyen.runtime.roles import Roles
from luyen.train import record
from luyen.train.state import LoopState, first_logged_step

ODD: dict[str, Callable[[dict[str, Any]], object]] = {
    "facts.metrics": lambda m: m["facts"].update(metrics=3),
    "numbers": lambda m: m["facts"].update(metrics={"a": "x"}),
    "facts.chain": lambda m: m["facts"].update(chain=5),
    "facts": lambda m: m.update(facts=7),
    "files": lambda m: m.update(files=[]),
    "SHA-256": lambda m: m.update(files={"loop.json": 3}),
    "step": lambda m: m.update(step="1"),
}


def write_loop(folder: Path) -> None:
    (folder / "loop.json").write_text("{}")


@pytest.mark.parametrize("name", ODD)
def test_a_manifest_of_another_form_is_refused_by_its_name(tmp_path: Path, name: str):
    path = CheckpointStore(tmp_path).save(
        1,
        write_loop,
        facts={"metrics": {"a": 1.0, "b": "inf"}, "chain": "00"},
    )
    assert verify(path).step == 1
    manifest = json.loads((path / MANIFEST).read_text())
    del manifest["seal"]
    ODD[name](manifest)
    (path / MANIFEST).write_text(json.dumps({**manifest, "seal": _manifest_checksum(manifest)}))
    with pytest.raises(UserError, match=name) as raised:
        verify(path)
    assert str(path / MANIFEST) in str(raised.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("cursor", -5),
        ("cursor", 10**30),
        ("step", -1),
        ("step", 2**53 + 1),
        ("version", -2),
        ("skipped", 10**30),
        ("first_validation", 5),
        ("kl_history", "ab"),
        ("sampler", {}),
        ("asked", [3]),
        ("asked", "ab"),
        ("origin", "abc"),
        ("reward", []),
        ("chain", 3),
        ("returned", ["0"]),
        ("returned", [1.0]),
        ("returned", [-1]),
        ("returned", [10**30]),
    ],
)
def test_a_loop_with_an_impossible_value_is_refused(key: str, value: object):
    saved = LoopState().as_json()
    assert LoopState.from_json(saved) == LoopState()
    with pytest.raises((TypeError, ValueError), match=key):
        LoopState.from_json({**saved, key: value})


def test_a_step_of_a_loop_that_is_text_is_refused():
    with pytest.raises(UserError, match="no whole number"):
        first_logged_step({"step": "x"})


def test_a_loop_of_another_step_than_its_checkpoint_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    roles = Mock(spec=Roles)
    for step in (2, 9):
        saved = LoopState(step=step).as_json()
        monkeypatch.setattr(record, "load_state", lambda *_, found=saved: found)
        if step == 2:
            assert record.load_checkpoint(tmp_path / "step_000002", roles).step == step
        else:
            with pytest.raises(UserError, match="`step` is 9"):
                record.load_checkpoint(tmp_path / "step_000002", roles)
