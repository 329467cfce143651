"""verl's own command lines pass `check`, and what it says about them is true.

The words are those that the shell hands to verl's trainer (quotes are gone by then), with our
engine in vLLM's place.
"""

from pathlib import Path

import pytest

from luyen.config.check import Report, batch_lines, check
from luyen.config.explain import explain
from luyen.config.machine import Machine

NODE = Machine(cpus=96, ram_bytes=1024**4, gpu_bytes=(80 * 1024**3,) * 8)
GRPO_7B = (
    "algorithm.adv_estimator=grpo",
    "data.train_files=ROWS",
    "data.val_files=HELD_OUT",
    "data.train_batch_size=1024",
    "data.max_prompt_length=512",
    "data.max_response_length=1024",
    "data.filter_overlong_prompts=True",
    "data.truncation=error",
    "actor_rollout_ref.model.path=Qwen/Qwen2-7B-Instruct",
    "actor_rollout_ref.actor.optim.lr=1e-6",
    "actor_rollout_ref.model.use_remove_padding=True",
    "actor_rollout_ref.actor.ppo_mini_batch_size=256",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=40",
    "actor_rollout_ref.actor.use_kl_loss=True",
    "actor_rollout_ref.actor.kl_loss_coef=0.001",
    "actor_rollout_ref.actor.kl_loss_type=low_var_kl",
    "actor_rollout_ref.actor.entropy_coeff=0",
    "actor_rollout_ref.model.enable_gradient_checkpointing=True",
    "actor_rollout_ref.actor.fsdp_config.param_offload=False",
    "actor_rollout_ref.actor.fsdp_config.optimizer_offload=False",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=40",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
    "actor_rollout_ref.rollout.name=native",
    "actor_rollout_ref.rollout.gpu_memory_utilization=0.6",
    "actor_rollout_ref.rollout.n=5",
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=40",
    "actor_rollout_ref.ref.fsdp_config.param_offload=True",
    "algorithm.use_kl_in_reward=False",
    "trainer.critic_warmup=0",
    "trainer.logger=[console,wandb]",
    "trainer.project_name=verl_grpo_example_gsm8k",
    "trainer.experiment_name=qwen2_7b_function_rm",
    "trainer.n_gpus_per_node=8",
    "trainer.nnodes=1",
    "trainer.save_freq=20",
    "trainer.test_freq=5",
    "trainer.total_epochs=15",
)
"""`examples/grpo_trainer/run_qwen2-7b.sh`."""
PPO_QUICKSTART = (
    "data.train_files=ROWS",
    "data.val_files=HELD_OUT",
    "data.train_batch_size=256",
    "data.max_prompt_length=512",
    "data.max_response_length=512",
    "actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B-Instruct",
    "actor_rollout_ref.actor.optim.lr=1e-6",
    "actor_rollout_ref.actor.ppo_mini_batch_size=64",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
    "actor_rollout_ref.rollout.name=native",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
    "actor_rollout_ref.rollout.gpu_memory_utilization=0.4",
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=4",
    "critic.optim.lr=1e-5",
    "critic.model.path=Qwen/Qwen2.5-0.5B-Instruct",
    "critic.ppo_micro_batch_size_per_gpu=4",
    "algorithm.kl_ctrl.kl_coef=0.001",
    "trainer.logger=console",
    "trainer.val_before_train=False",
    "trainer.n_gpus_per_node=1",
    "trainer.nnodes=1",
    "trainer.save_freq=10",
    "trainer.test_freq=10",
    "trainer.total_epochs=15",
)
"""The PPO command of verl's quickstart page."""
GRPO_4B = (
    "algorithm.adv_estimator=grpo",
    "data.train_files=ROWS",
    "data.val_files=HELD_OUT",
    "data.train_batch_size=512",
    "data.max_prompt_length=1024",
    "data.max_response_length=1024",
    "data.filter_overlong_prompts=True",
    "data.truncation=error",
    "algorithm.use_kl_in_reward=False",
    "actor_rollout_ref.model.path=Qwen/Qwen3-4B",
    "actor_rollout_ref.model.use_remove_padding=True",
    "actor_rollout_ref.model.enable_gradient_checkpointing=True",
    "actor_rollout_ref.actor.optim.lr=1e-6",
    "actor_rollout_ref.actor.ppo_mini_batch_size=256",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2",
    "actor_rollout_ref.actor.use_kl_loss=True",
    "actor_rollout_ref.actor.kl_loss_coef=0.001",
    "actor_rollout_ref.actor.kl_loss_type=low_var_kl",
    "actor_rollout_ref.actor.entropy_coeff=0",
    "actor_rollout_ref.actor.fsdp_config.param_offload=False",
    "actor_rollout_ref.actor.fsdp_config.optimizer_offload=False",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=3000",
    "actor_rollout_ref.actor.use_dynamic_bsz=True",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=2",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
    "actor_rollout_ref.rollout.name=native",
    "actor_rollout_ref.rollout.gpu_memory_utilization=0.6",
    "actor_rollout_ref.rollout.enable_chunked_prefill=False",
    "actor_rollout_ref.rollout.enforce_eager=False",
    "actor_rollout_ref.rollout.free_cache_engine=True",
    "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=True",
    "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=4096",
    "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes=4096",
    "actor_rollout_ref.rollout.n=5",
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=2",
    "actor_rollout_ref.ref.fsdp_config.param_offload=True",
    "actor_rollout_ref.ref.log_prob_use_dynamic_bsz=True",
    "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu=8192",
    "trainer.critic_warmup=0",
    'trainer.logger=["console","wandb"]',
    "trainer.project_name=verl_grpo_example_geo3k",
    "trainer.experiment_name=glm41v_9b_function_rm",
    "trainer.n_gpus_per_node=8",
    "trainer.nnodes=1",
    "trainer.save_freq=20",
    "trainer.test_freq=5",
    "trainer.total_epochs=15",
)
"""`examples/grpo_trainer/run_qwen3_4b_fsdp.sh`."""


def checked(words: tuple[str, ...], folder: Path) -> Report:
    given = list(words)
    for name in ("ROWS", "HELD_OUT"):
        file = folder / f"{name}.parquet"
        file.write_bytes(b"rows")
        given = [word.replace(f"={name}", f"={file}") for word in given]
    return check([], given, machine=NODE, installed=lambda _: True)


def said(report: Report) -> dict[str, str]:
    """Key -> what is said of it; a key of which two things are said would lose one."""
    fields = [problem.field for problem in report.problems]
    assert len(set(fields)) == len(fields), report.problems
    return {
        problem.field.removeprefix("actor_rollout_ref."): problem.why for problem in report.problems
    }


@pytest.mark.parametrize("words", [GRPO_7B, PPO_QUICKSTART, GRPO_4B], ids=("7b", "ppo", "4b"))
def test_a_command_of_verl_passes(words: tuple[str, ...], tmp_path: Path):
    report = checked(words, tmp_path)
    assert report.is_sound, report.problems
    assert all(str(problem.origin) == "command line" for problem in report.problems)


def test_what_is_said_about_grpo_for_7b_is_what_has_no_effect(tmp_path: Path):
    report = checked(GRPO_7B, tmp_path)
    assert said(report).keys() == {
        "ref.fsdp_config.param_offload",
        "rollout.n",
        "actor.ppo_micro_batch_size_per_gpu",
        "rollout.log_prob_micro_batch_size_per_gpu",
        "ref.log_prob_micro_batch_size_per_gpu",
    }
    noted = {key for key, why in said(report).items() if "no effect" not in why}
    assert noted == {"rollout.n"}, "each copy is divided over two devices, so that there are four"
    assert report.plan.where.replicas == 4
    assert report.plan.batch.optimizer_steps == 4


def test_a_fix_names_the_whole_key(tmp_path: Path):
    fixes = {problem.field: problem.fix for problem in checked(GRPO_7B, tmp_path).problems}
    for side in ("rollout", "ref"):
        block = f"actor_rollout_ref.{side}"
        fix = fixes[f"{block}.log_prob_micro_batch_size_per_gpu"]
        assert f"{block}.log_prob_use_dynamic_bsz=false" in fix


def test_ppo_without_a_kl_term_is_told_once_that_there_is_no_reference(tmp_path: Path):
    report = checked(PPO_QUICKSTART, tmp_path)
    words = said(report)
    assert words.keys() == {
        "actor.ppo_micro_batch_size_per_gpu",
        "critic.ppo_micro_batch_size_per_gpu",
        "rollout.log_prob_micro_batch_size_per_gpu",
        "ref.log_prob_micro_batch_size_per_gpu",
    }
    assert "no reference policy" in words["ref.log_prob_micro_batch_size_per_gpu"]
    assert report.plan.batch.samples_per_prompt == 1
    assert ("rollouts", "256 prompts x 1 sample = 256") in batch_lines(report.plan.batch)


def test_memory_switches_of_newer_commands_are_notes(tmp_path: Path):
    notes = {p.field: p for p in checked(GRPO_4B, tmp_path).problems if p.severity == "note"}
    for name in ("enable_chunked_prefill", "checkpoint_engine.update_weights_bucket_megabytes"):
        assert "no effect" in notes[f"actor_rollout_ref.rollout.{name}"].why


@pytest.mark.parametrize(
    "word",
    [
        "data.val_batch_size=1312",
        "actor_rollout_ref.actor.fsdp_config.grad_offload=False",
        "critic.model.fsdp_config.grad_offload=False",
    ],
)
def test_keys_of_older_commands_change_nothing(word: str, tmp_path: Path):
    assert checked((*PPO_QUICKSTART, word), tmp_path).is_sound


def test_a_block_that_nobody_knows_is_placed_where_it_was_written(tmp_path: Path):
    word = "actor_rollout_ref.rollout.checkpoint_motor.size=1"
    report = checked((*PPO_QUICKSTART, word), tmp_path)
    (problem,) = [one for one in report.problems if one.severity == "error"]
    assert problem.field == "actor_rollout_ref.rollout.checkpoint_motor"
    assert str(problem.origin) == "command line"


def test_explain_says_the_same_as_check_of_a_key_without_effect():
    assert "weights of the reference" in explain("actor_rollout_ref.ref.fsdp_config.param_offload")
