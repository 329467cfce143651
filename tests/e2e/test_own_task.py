"""The page about a task of one's own is followed, with a model of random weights."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.architecture.pages import blocks
from tests.architecture.tree import ROOT
from tests.e2e.tiny import luyen, random_model

PAGE = (ROOT / "docs" / "own_task.md").read_text()


def test_the_page_is_followed_to_a_step_with_a_reward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (rows,), (reward,), (config,) = (blocks(PAGE, name) for name in ("json", "python", "yaml"))
    assert len(config.strip().splitlines()) <= 15
    random_model(tmp_path / yaml.safe_load(config)["actor_rollout_ref"]["model"]["path"])
    (tmp_path / "rows.jsonl").write_text(rows)
    (tmp_path / "held_out.jsonl").write_text(rows.splitlines()[0] + "\n")
    (tmp_path / "reward.py").write_text(reward)
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


def test_the_reward_of_the_page_tells_right_from_wrong():
    (source,), (rows,) = blocks(PAGE, "python"), blocks(PAGE, "json")
    told: dict[str, Any] = {}
    exec(source, told)
    score, answer = told["compute_score"], json.loads(rows.splitlines()[0])["answer"]
    assert score("", "3 * 12 = 36, so #### 36", answer) == pytest.approx(1.1)
    assert score("", "it is 36", answer) == 1.0
    assert score("", "#### 35", answer) == pytest.approx(0.1)
    assert score("", "I do not know", answer) == 0.0
