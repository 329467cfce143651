"""Defaults that follow from other keys: by stage, adapter, estimator and batch."""

from pathlib import Path
from typing import Any

import pytest

from luyen.cli.check import report_json, report_lines
from luyen.config.check import Report, check
from luyen.config.machine import Machine
from luyen.config.rules.rule import value_at
from luyen.config.schema.block import derived_values
from luyen.config.schema.run import RunConfig

LAPTOP = Machine(cpus=2, ram_bytes=16 * 1024**3)
ROWS = "data.train_files=arithmetic://sum"
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
LR, N, ESTIMATOR = f"{ACTOR}.optim.lr", f"{ROLLOUT}.n", "algorithm.adv_estimator"
MINI, LORA = f"{ACTOR}.ppo_mini_batch_size", "actor_rollout_ref.model.lora_rank=8"


def report(*words: str) -> Report:
    return check([], [ROWS, *words], machine=LAPTOP)


@pytest.mark.parametrize(
    ("words", "key", "value"),
    [
        (("data.train_batch_size=4",), MINI, 4),
        (("data.train_batch_size=4", f"{MINI}=2"), MINI, 2),
        (("data.train_batch_size=4", f"{MINI}=null"), MINI, 4),
        ((f"{ESTIMATOR}=grpo",), N, 8),
        ((f"{ESTIMATOR}=grpo", f"{N}=4"), N, 4),
        ((f"{ESTIMATOR}=reinforce_plus_plus",), N, 1),
        ((f"{N}=4",), ESTIMATOR, "grpo"),
        ((f"{N}=4", "critic.optim.lr=1e-5"), ESTIMATOR, "gae"),
        ((f"{N}=1",), ESTIMATOR, "gae"),
        ((), ESTIMATOR, "gae"),
        ((), N, 1),
        ((), LR, 1e-6),
        ((LORA,), LR, 1e-5),
        (("trainer.stage=sft",), LR, 1e-5),
        (("trainer.stage=sft", LORA), LR, 1e-4),
        (("trainer.stage=preference",), LR, 5e-7),
        (("trainer.stage=preference", LORA), LR, 5e-6),
        (("trainer.stage=preference", LORA, f"{LR}=0.001"), LR, 0.001),
        ((), "critic.optim.lr", 1e-5),
        ((), "trainer.save_freq", 50),
        (("trainer.total_training_steps=300",), "trainer.save_freq", 30),
        (("trainer.total_training_steps=20",), "trainer.save_freq", 10),
        (("trainer.total_training_steps=9",), "trainer.save_freq", -1),
        (("trainer.save_freq=-1",), "trainer.save_freq", -1),
        ((), "trainer.max_ckpt_to_keep", 2),
        (("trainer.max_ckpt_to_keep=null",), "trainer.max_ckpt_to_keep", None),
        (("trainer.save_freq=5",), "trainer.max_ckpt_to_keep", None),
    ],
)
def test_a_key_that_is_not_written_follows_from_others(words: Any, key: str, value: Any):
    assert value_at(report(*words).config, key) == value


def test_a_small_batch_alone_is_no_error():
    found = report("data.train_batch_size=4", f"{ESTIMATOR}=grpo")
    assert found.is_sound, found.problems
    assert found.plan.batch.optimizer_steps == 1


def test_what_was_derived_is_written_once_the_configuration_is_stored():
    config = report("data.train_batch_size=4", LORA).config
    again = RunConfig.model_validate(config.model_dump(mode="json"))
    assert again == config
    assert derived_values(again) == {}


def test_check_shows_what_is_derived_and_only_that():
    found = report("data.train_batch_size=4", f"{N}=2")
    text = "\n".join(report_lines(found, [], LAPTOP))
    assert f"{MINI} = 4" in text
    assert f"{ESTIMATOR} = grpo" in text
    assert f"{N} =" not in text
    assert report_json(found)["plan"]["derived"][MINI] == 4
    offline = "\n".join(report_lines(report("trainer.stage=sft"), [], LAPTOP))
    assert f"{LR} = 1e-05" in offline
    assert MINI not in offline


def test_a_derived_key_cannot_be_named_by_another(tmp_path: Path):
    path = tmp_path / "a.yaml"
    path.write_text(f"data: {{train_batch_size: '${{{MINI}}}'}}")
    [problem] = [p for p in check([path], [ROWS], machine=LAPTOP).problems if p.id == "C008"]
    assert f"write {MINI}" in problem.fix


def test_a_warm_up_longer_than_the_run_is_shortened_with_a_note():
    found = report("trainer.total_training_steps=3", f"{ACTOR}.optim.lr_warmup_steps=10")
    assert found.is_sound
    [note] = [p for p in found.problems if p.id == "M05"]
    assert (note.severity, "shortened to 3" in note.why) == ("note", True)
