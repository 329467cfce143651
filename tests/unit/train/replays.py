"""Recorded runs to replay, and ways to spoil what they left."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from luyen.base.records import Message, Source
from luyen.base.rundir import RunDirectory
from luyen.config.trust import sign_run
from luyen.data.render import Extension, Renderer
from luyen.pipeline.policy_loading import read_config
from luyen.telemetry.rollout_files import RecordedRollout, read_rollouts, write_rollouts
from tests.runs import ACTOR, CHATTY, MODEL, ROLLOUT

STEPS = "trainer.total_training_steps=3"
TWO = (f"{ACTOR}.ppo_mini_batch_size=2", f"{ACTOR}.ppo_epochs=2")
KL = ("algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.type=adaptive")
ENTROPY = f"{ACTOR}.adaptive_entropy"
CORRECTION = "algorithm.rollout_correction"
HALF_RIGHT = (
    f"reward.custom_reward_function.path={Path(__file__).parents[2] / 'e2e/half_right_reward.py'}"
)
SORTS: dict[str, Sequence[str]] = {
    "grpo": (),
    "rloo": ("algorithm.adv_estimator=rloo", f"{ACTOR}.policy_loss.loss_mode=gspo"),
    "critic": ("algorithm.adv_estimator=gae", "critic.optim.lr=1.0e-3", f"{ROLLOUT}.n=2"),
    "warm-up": ("algorithm.adv_estimator=gae", "trainer.critic_warmup=1", f"{ROLLOUT}.n=2"),
    "lora": (f"{MODEL}.lora_rank=4", f"{ACTOR}.use_kl_loss=true"),
    "remax": ("algorithm.adv_estimator=remax", f"{ROLLOUT}.n=2"),
    "epochs": (*TWO, f"{ACTOR}.shuffle=true"),
    "statistics": (*TWO, f"{ACTOR}.policy_loss.loss_mode=clip_cov"),
    "correction": (
        f"{CORRECTION}.rollout_is=token",
        f"{CORRECTION}.rollout_rs=token_k1",
        f"{CORRECTION}.rollout_rs_threshold=0.5_2.0",
        *TWO,
    ),
    "bypass": (f"{CORRECTION}.bypass_mode=true", f"{CORRECTION}.rollout_is=sequence"),
    "filter": (
        "algorithm.filter_groups.enable=true",
        "algorithm.filter_groups.metric=score",
        HALF_RIGHT,
        f"{ROLLOUT}.n=2",
    ),
    "parts": ("algorithm.adv_estimator=gdpo",),
    "token baseline": (
        "algorithm.adv_estimator=optimal_token_baseline",
        f"{ACTOR}.calculate_sum_pi_squared=true",
    ),
    "adaptive kl": (*KL, "algorithm.kl_ctrl.horizon=20", "algorithm.kl_ctrl.target_kl=0.001"),
    "adaptive entropy": (*TWO, f"{ENTROPY}.enable=true", f"{ENTROPY}.target=9.0"),
    "schedule": (
        f"{ACTOR}.optim.lr_scheduler_type=cosine",
        "trainer.total_training_steps=null",
        "trainer.total_epochs=1",
        "data.train_batch_size=8",
    ),
    "top-p": (f"{ROLLOUT}.top_p=0.8",),
    "bf16": (f"{MODEL}.dtype=bfloat16",),
    "tools": CHATTY,
}
"""Runs of every kind that a step can be replayed of."""


SANITY = f"{ROLLOUT}.multi_turn.tokenization_sanity_check_mode=off"


def always_anew(
    renderer: Renderer,
    tokens: Sequence[int],
    messages: Sequence[Message],
    new_messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] = (),
) -> Extension:
    """A template that rewrites the past at every turn."""
    del tokens
    ids = renderer.prompt_tokens([*messages, *new_messages], tools)
    sources = (Source.PROMPT,) * len(ids)
    return Extension(tokens=tuple(ids), sources=sources, restart="planted")


def edit_rows(
    root: Path, step: int, change: Callable[[list[RecordedRollout]], list[RecordedRollout]]
) -> None:
    """Rewrite the rollouts of a step."""
    path = RunDirectory(root).rollouts(step)
    write_rollouts(path, change(read_rollouts(path)))


def edit_config(root: Path, key: str, value: object) -> None:
    """Give a key of the recorded configuration another value, seal, signature and all."""
    directory = RunDirectory.open(root)
    tree = yaml.safe_load(directory.read_config())
    *blocks, name = key.split(".")
    inner = tree
    for block in blocks:
        inner = inner[block]
    assert name in inner
    inner[name] = value
    directory.write_config(yaml.safe_dump(tree), directory.read_provenance())
    sign_run(directory, read_config([directory.config], []))
