"""Weights in a folder: what the disk refuses is said, and nothing outside is touched."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError

from luyen.base.errors import UserError
from luyen.config.schema.run import RunConfig
from luyen.rollout.protocol import generate
from luyen.train.builders.roles import server_place
from tests.generation import request
from tests.peers.engines import served_engine
from tests.tiny_models import tiny_policy


def refuse(*_args: Any, **_more: Any) -> None:
    raise SafetensorError("I/O error: No space left on device (os error 28)")


def test_a_full_disk_is_named_and_former_weights_are_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    policy = tiny_policy("llama", initializer_range=0.15)
    with served_engine("vllm", policy, tmp_path) as (engine, _, driver):
        engine.send_weights(1)
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.mul_(1.1)
        with monkeypatch.context() as full:
            full.setattr("luyen.models.export.save_file", refuse)
            with pytest.raises(UserError, match="No space left") as caught:
                engine.send_weights(2)
        assert "version-2" in str(caught.value.value)
        assert engine.fingerprint() is None
        before = driver.version
        engine.send_weights(2)
        [done] = generate(engine, [request(5, 6)]).values()
        assert (before, driver.version, set(done.versions)) == ("1", "2", {2})


def test_a_version_that_is_a_link_is_replaced(tmp_path: Path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_text("mine")
    policy = tiny_policy("llama", initializer_range=0.15)
    with served_engine("vllm", policy, tmp_path / "server") as (engine, _, _):
        engine.send_weights(1)
        (tmp_path / "server" / "weights" / "version-2").symlink_to(outside)
        engine.send_weights(2)
    assert [path.name for path in outside.iterdir()] == ["kept"]


def test_a_server_gets_a_folder_that_did_not_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A stranger's run directory may have links where the files of a server go."""
    monkeypatch.setattr("luyen.train.builders.roles._SERVERS", iter([0, 0, 0]))
    monkeypatch.setattr("os.getpid", lambda: 77)
    config = RunConfig.model_validate(
        {
            "trainer": {
                "default_local_dir": str(tmp_path),
                "project_name": "p",
                "experiment_name": "run",
            }
        }
    )
    servers, outside = tmp_path / "p" / "run" / "servers", tmp_path / "outside"
    servers.mkdir(parents=True)
    outside.mkdir()
    (servers / "77-0").symlink_to(outside)
    first, second = server_place(config, 0), server_place(config, 0)
    assert not first.folder.is_symlink()
    assert first.folder.is_dir()
    assert [first.folder.name, second.folder.name] == ["77-0-1", "77-0-2"]
    assert list(outside.iterdir()) == []
    assert first.folder.stat().st_mode & 0o777 == 0o700
