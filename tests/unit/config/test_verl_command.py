"""verl's own command lines pass `check`, and what it says about them is true."""

from pathlib import Path

import pytest

from luyen.config.check import Report, check
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
    "data.truncation='error'",
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
    'trainer.logger=["console","wandb"]',
    "trainer.project_name='verl_grpo_example_gsm8k'",
    "trainer.experiment_name='qwen2_7b_function_rm'",
    "trainer.n_gpus_per_node=8",
    "trainer.nnodes=1",
    "trainer.save_freq=20",
    "trainer.test_freq=5",
    "trainer.total_epochs=15",
)
"""The arguments of `examples/grpo_trainer/run_qwen2-7b.sh`, with our engine in vLLM's place."""


@pytest.fixture
def report(tmp_path: Path) -> Report:
    words = list(GRPO_7B)
    for name in ("ROWS", "HELD_OUT"):
        file = tmp_path / f"{name}.parquet"
        file.write_bytes(b"rows")
        words = [word.replace(f"={name}", f"={file}") for word in words]
    return check([], words, machine=NODE, installed=lambda _: True)


def test_the_grpo_command_for_7b_passes(report: Report):
    assert len(GRPO_7B) == 37
    assert report.is_sound, report.problems


def test_what_is_said_about_it_is_what_has_no_effect(report: Report):
    said = {
        problem.field.rpartition("actor_rollout_ref.")[2]: problem for problem in report.problems
    }
    assert said.keys() == {
        "ref.fsdp_config.param_offload",
        "rollout.tensor_model_parallel_size",
        "actor.ppo_micro_batch_size_per_gpu",
        "rollout.log_prob_micro_batch_size_per_gpu",
        "ref.log_prob_micro_batch_size_per_gpu",
    }
    assert all("no effect" in problem.why for problem in said.values())
    assert report.plan.where.replicas == 8
    assert report.plan.batch.optimizer_steps == 4
