"""Other projects' names: read as ours with a note, or refused with the exact key to write."""

from typing import Any

import pytest

from luyen.config.check import Report, check
from luyen.config.fields import all_blocks, all_fields
from luyen.config.loader.aliases import FOREIGN, RENAMED, STAGES
from luyen.config.machine import Machine
from luyen.config.problem import Problem
from luyen.config.rules.rule import value_at

LAPTOP = Machine(cpus=2, ram_bytes=16 * 1024**3)
ROWS = "data.train_files=arithmetic://sum"
ACTOR = "actor_rollout_ref.actor"


def report(*words: str) -> Report:
    return check([], [ROWS, *words], machine=LAPTOP)


def about(found: Report, field: str) -> list[Problem]:
    return [problem for problem in found.problems if problem.field == field]


@pytest.mark.parametrize("word", STAGES)
def test_a_stage_by_its_algorithm_is_read_with_a_note(word: str):
    found = report(f"trainer.stage={word}")
    [note] = about(found, "trainer.stage")
    assert (note.id, note.severity) == ("C016", "note")
    for key, value in STAGES[word].items():
        kept: Any = value_at(found.config, key)
        assert kept in (value, (value,))
        assert f"{key}={value}" in note.why


def test_a_stage_and_a_key_that_disagree_are_an_error():
    found = report("trainer.stage=grpo", "algorithm.adv_estimator=rloo")
    [error] = about(found, "algorithm.adv_estimator")
    assert (error.id, error.severity) == ("C016", "error")
    assert not about(report("trainer.stage=grpo", "algorithm.adv_estimator=grpo"), error.field)


@pytest.mark.parametrize("written", ["dpo", "[dpo]"])
def test_dpo_is_the_sigmoid_loss(written: str):
    found = report("trainer.stage=preference", f"preference.loss_type={written}")
    assert found.config.preference.loss_type == ("sigmoid",)
    assert about(found, "preference.loss_type")[0].severity == "note"


@pytest.mark.parametrize(
    ("word", "key", "value"),
    [
        ("custom_reward_function.path=a.py", "reward.custom_reward_function.path", "a.py"),
        ("custom_reward_function.name=score", "reward.custom_reward_function.name", "score"),
        ("reward_model.reward_manager=dapo", "reward.reward_manager.name", "dapo"),
        ("reward_model.enable=False", "reward.reward_model.enable", False),
        ("reward_model.overlong_buffer.len=512", "reward.overlong_buffer.len", 512),
        (
            f"{ACTOR}.ulysses_sequence_parallel_size=1",
            f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size",
            1,
        ),
    ],
)
def test_blocks_where_verl_has_them_are_read_with_a_note(word: str, key: str, value: Any):
    found = report(word)
    assert value_at(found.config, key) == value
    [note] = about(found, word.partition("=")[0])
    assert (note.severity, key in note.fix) == ("note", True)


def test_a_key_under_two_names_is_an_error_where_they_disagree():
    words = ("custom_reward_function.name=a", "reward.custom_reward_function.name=b")
    [error] = about(report(*words), "custom_reward_function.name")
    assert (error.severity, "written too" in error.why) == ("error", True)


@pytest.mark.parametrize("value", ["auto", "disable"])
def test_the_choice_of_workers_is_accepted(value: str):
    assert not about(report(f"trainer.use_legacy_worker_impl={value}"), "trainer")
    assert report(f"trainer.use_legacy_worker_impl={value}").is_sound


@pytest.mark.parametrize(
    ("word", "fix"),
    [
        ("learning_rate=1e-5", f"write {ACTOR}.optim.lr"),
        ("trainer.learning_rate=1e-5", f"write {ACTOR}.optim.lr"),
        ("num_train_epochs=3", "write trainer.total_epochs"),
        ("per_device_train_batch_size=4", "write data.train_batch_size"),
        ("max_completion_length=256", "write data.max_response_length"),
        ("num_generations=8", "write actor_rollout_ref.rollout.n"),
        ("beta=0.1", "preference.beta"),
        ("stage=dpo", "write trainer.stage"),
        (f"{ACTOR}.fsdp_config.model_dtype=bf16", "actor_rollout_ref.model.dtype"),
        ("reward_model.micro_batch_size_per_gpu=4", "reward.reward_model"),
    ],
)
def test_a_key_of_another_project_names_the_one_to_write(word: str, fix: str):
    [error] = about(report(word), word.partition("=")[0])
    assert error.severity == "error"
    assert fix in error.fix


def test_what_is_offered_exists():
    known = [*all_fields(), *(block for block in all_blocks() if block)]
    for text in (*FOREIGN.values(), *RENAMED.values()):
        assert text.startswith("nothing: ") or any(path in text for path in known), text
