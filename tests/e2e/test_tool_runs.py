"""Runs with tools as a user begins them: the shortest configuration, and `luyen rollout`."""

import json
import subprocess
from pathlib import Path

from luyen.base.records import Source
from tests.e2e.tiny import luyen
from tests.forked_python import forked_python
from tests.runs import CHATTY, TINY, train

TEMPLATE = """
algorithm:
  adv_estimator: grpo
actor_rollout_ref:
  actor:
    use_kl_loss: true
    kl_loss_coef: 0.001
  rollout:
    name: native
    n: 8
    multi_turn:
      enable: true
      tool_config_path: {tools}
data:
  return_raw_chat: true
"""
"""What a user of verl begins with for GRPO over conversations with tools."""
RECIPE = ("recipes/tool_calling.yaml", "data.train_files=tools://calculator?size=8")


def test_the_shortest_configuration_with_tools_runs(tmp_path: Path):
    tools = tmp_path / "tools.yaml"
    tools.write_text("tools:\n  - builtin: calculator\n")
    file = tmp_path / "config.yaml"
    file.write_text(TEMPLATE.format(tools=tools))
    # The template names no rows, no model and no sizes: those of a tiny run.
    own = ("rollout.n=", "adv_estimator=", "max_prompt_length=", "total_training_steps=")
    rest = [word for word in TINY if not any(part in word for part in own)]
    longer = ("data.max_prompt_length=400", "trainer.total_training_steps=1")
    done = train(
        tmp_path / "runs",
        *rest,
        *longer,
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=4096",
        files=[file],
    )
    assert done.course("parity/max_gap") == [0.0]
    assert done.course("turns/mean")[0] >= 1.0
    assert "actor/kl_loss" in done.metrics[-1]


def test_rollouts_are_shown_for_people():
    done = luyen("rollout", *RECIPE, "--n", "2", "--samples", "4", "--pretty")
    assert done.exit_code == 0, done.output
    assert done.output.count("rollout ") == 8
    assert "origin of each token: prompt" in done.output
    assert "calculator{" in done.output
    assert "reward" in done.output


def test_rollouts_are_printed_for_programs():
    done = luyen("rollout", *RECIPE, "--n", "2", "--samples", "8", "--json")
    assert done.exit_code == 0, done.output
    page = json.loads(done.stdout)
    assert len(page) == 16
    called = [rollout for rollout in page if rollout["calls"]]
    assert called
    [branch] = called[0]["branches"]
    assert len(branch["tokens"]) == len(branch["sources"]) == len(branch["logps"])
    names = {source.name.lower() for source in Source}
    assert set(branch["sources"]) == names
    drawn = [logp is not None for logp in branch["logps"]]
    assert drawn == [source == "sampled" for source in branch["sources"]]
    assert all(rollout["reward"]["value"] in (0.0, 1.0) for rollout in page)


def test_a_configuration_with_errors_is_not_played():
    done = luyen("rollout", *RECIPE, "actor_rollout_ref.rollout.multi_turn.format=hermse")
    assert done.exit_code == 1
    assert "did you mean `hermes`" in done.output.replace("Did", "did")


def test_a_checkpoint_with_a_plugins_call_format_is_measured_in_another_process(tmp_path: Path):
    rows = "data.val_files=arithmetic://sum?digits=1&size=4"
    done = train(tmp_path, *CHATTY, rows, "trainer.total_training_steps=1", "trainer.test_freq=1")
    command = [forked_python(), "-m", "luyen", "eval", str(done.root), "--json"]
    measured = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert measured.returncode == 0, measured.stderr
    found = json.loads(measured.stdout)["metrics"]
    assert found["val/faults"] == 0.0
    assert found["val/reward/mean@1"] == done.course("val/reward/mean@1")[-1]
