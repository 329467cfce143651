"""The page about a task of one's own is followed, with a model of random weights."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.architecture.pages import blocks
from tests.architecture.tree import ROOT
from tests.e2e.tiny import luyen, random_model

PAGE = (ROOT / "docs" / "own_task.md").read_text()


def write_inputs(folder: Path) -> None:
    """The model, the rows and the reward that the page names."""
    (rows,), (reward, _), (config,) = (blocks(PAGE, name) for name in ("json", "python", "yaml"))
    random_model(folder / yaml.safe_load(config)["actor_rollout_ref"]["model"]["path"])
    (folder / "rows.jsonl").write_text(rows)
    (folder / "held_out.jsonl").write_text(rows.splitlines()[0] + "\n")
    (folder / "reward.py").write_text(reward)


def test_the_page_is_followed_to_a_step_with_a_reward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (config,) = blocks(PAGE, "yaml")
    assert len(config.strip().splitlines()) <= 15
    write_inputs(tmp_path)
    (tmp_path / "own.yaml").write_text(config)
    monkeypatch.chdir(tmp_path)
    words = ("own.yaml", "trainer.experiment_name=own", "trainer.device=cpu")
    checked = luyen("check", *words)
    assert checked.exit_code == 0, checked.output
    assert checked.output.startswith("No problems")
    played = luyen("rollout", *words)
    assert played.exit_code == 0, played.output
    assert "then write #### and the number." in played.output
    done = luyen("train", *words)
    assert done.exit_code == 0, done.output
    run = tmp_path / "runs" / "luyen" / "own"
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert steps[-1]["step"] == 1


def test_the_python_of_the_page_trains_as_its_yaml(tmp_path: Path):
    """In a process of its own, as a script; the same rollouts are scored alike."""
    write_inputs(tmp_path)
    _, program = blocks(PAGE, "python")
    (config,) = blocks(PAGE, "yaml")
    (tmp_path / "own.yaml").write_text(config)
    (tmp_path / "own.py").write_text(program)
    done = subprocess.run(
        [sys.executable, "own.py"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    [run] = (tmp_path / "runs" / "luyen").iterdir()
    values = yaml.safe_load((run / "config.yaml").read_text())
    told = yaml.safe_load(config)
    assert values["data"]["prompt_template"] == told["data"]["prompt_template"]
    assert values["data"]["train_batch_size"] == told["data"]["train_batch_size"]
    assert values["actor_rollout_ref"]["rollout"]["n"] == told["actor_rollout_ref"]["rollout"]["n"]
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["step"] == 1
    assert done.stdout.split()[-1] == str(lines[-1]["reward/mean"])


def test_the_reward_of_the_page_tells_right_from_wrong():
    (source, _), (rows,) = blocks(PAGE, "python"), blocks(PAGE, "json")
    told: dict[str, Any] = {}
    exec(source, told)
    score, answer = told["compute_score"], json.loads(rows.splitlines()[0])["answer"]
    assert score("", "3 * 12 = 36, so #### 36", answer) == pytest.approx(1.1)
    assert score("", "it is 36", answer) == 1.0
    assert score("", "#### 35", answer) == pytest.approx(0.1)
    assert score("", "I do not know", answer) == 0.0
