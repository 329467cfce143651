"""Whole commands on broken models: one line, an exit code, no traceback, nothing executed."""

import shutil
import subprocess
from pathlib import Path

import pytest

from luyen.data.tokenizer import resolve_path
from tests.forked_python import forked_python
from tests.unit.models.broken_cases import AT_LOADING, IN_BOTH

CASES = {
    "NaN": (AT_LOADING, "holds 3 NaN of 49152 numbers", "fetch the model again"),
    "a pickle that would run": (AT_LOADING, "it holds no weights", "never run"),
    "more layers than the config": (IN_BOTH, "it holds 5 layers", "set num_hidden_layers"),
}


@pytest.mark.parametrize("name", CASES)
def test_train_refuses_a_broken_model_in_one_line(name: str, tmp_path: Path):
    table, why, fix = CASES[name]
    folder = shutil.copytree(resolve_path("builtin://arithmetic"), tmp_path / "model")
    table[name][0](folder)
    words = [
        "data.train_files=arithmetic://sum?digits=1&size=32",
        f"actor_rollout_ref.model.path={folder}",
        "data.train_batch_size=4",
        "actor_rollout_ref.rollout.n=2",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        f"trainer.default_local_dir={tmp_path}/runs",
    ]
    command = [forked_python(), "-m", "luyen", "train", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    said = done.stdout + done.stderr
    assert done.returncode == 1, said
    assert "Traceback" not in said
    assert "actor_rollout_ref.model.path" in said
    assert why in said
    assert fix in said
    assert not Path("/tmp/luyen-was-executed").exists()
