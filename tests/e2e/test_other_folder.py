"""A run with relative paths is measured, judged again and gone on with from another folder."""

import json
import shutil
from pathlib import Path

import pytest

from luyen.base.rundir import RunDirectory
from tests.e2e.tiny import luyen, random_model
from tests.runs import ACTOR, MODEL, ROLLOUT

ROW = '{"prompt": [{"role": "user", "content": "%d+1="}], "reward_model": {"ground_truth": "2"}}\n'
CONFIG = f"""
data: {{train_files: rows.jsonl, val_files: [rows.jsonl], train_batch_size: 4,
  max_prompt_length: 32, max_response_length: 6}}
reward: {{custom_reward_function: {{path: judging/reward.py}}}}
algorithm: {{adv_estimator: grpo}}
trainer: {{total_training_steps: 1, logger: [], val_before_train: false}}
{ROLLOUT.partition(".")[0]}:
  model: {{path: model, enable_gradient_checkpointing: false}}
  rollout: {{n: 4}}
  actor: {{ppo_mini_batch_size: 4}}
"""
SHARES = Path(__file__).parent.parent / "shares_reward.py"


def test_a_run_is_used_from_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    home, elsewhere = tmp_path / "home", tmp_path / "elsewhere"
    for folder in (home / "judging", elsewhere):
        folder.mkdir(parents=True)
    random_model(home / "model")
    shutil.copy(SHARES, home / "judging" / "reward.py")
    (home / "rows.jsonl").write_text("".join(ROW % number for number in range(8)))
    (home / "mine.yaml").write_text(CONFIG)
    monkeypatch.chdir(home)
    done = luyen("train", "mine.yaml")
    assert done.exit_code == 0, done.output
    [root] = (home / "runs" / "luyen").iterdir()
    assert root.name.startswith("mine-20"), "named after its file and the time"

    monkeypatch.chdir(elsewhere)
    measured = luyen("eval", root)
    assert measured.exit_code == 0, measured.output
    assert "unnamed" in measured.output
    new = elsewhere / "new.yaml"
    new.write_text("reward: {components: {digit: {rule: regex, kwargs: {pattern: '[0-9]'}}}}\n")
    again = luyen("rescore", root, "--reward", new)
    assert again.exit_code in (0, 1), again.output
    assert "no such file" not in again.output
    more = luyen("train", "--resume", root, "trainer.total_training_steps=2")
    assert more.exit_code == 0, more.output
    assert "trainer.total_training_steps 1 -> 2" in " ".join(more.output.split())
    run = RunDirectory(root)
    lines = [json.loads(line)["step"] for line in run.metrics.read_text().splitlines()]
    assert lines == [1, 2]
    assert list(elsewhere.iterdir()) == [new], "nothing is written beside the caller"
    refused = luyen("train", "--resume", root, f"{ROLLOUT}.n=2", f"{ACTOR}.ppo_epochs=2")
    assert refused.exit_code == 1
    assert f"{ROLLOUT}.n = 2" in refused.output
    assert f"{ACTOR}.ppo_epochs = 2" in refused.output
    assert MODEL not in refused.output
