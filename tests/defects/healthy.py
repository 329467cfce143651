"""Healthy runs of many kinds, each a few seconds long: the doctor has nothing to say about them."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from luyen.train.start import run_training
from tests.runs import ACTOR, MODEL, ROLLOUT, report_of, train

ROOT = Path(__file__).parents[2]
FILES = [ROOT / "recipes" / "quickstart.yaml"]
SMALL = (
    "data.train_batch_size=4",
    f"{ACTOR}.ppo_mini_batch_size=4",
    f"{ACTOR}.optim.lr=1.0e-4",
    f"{ACTOR}.optim.lr_warmup_steps=2",
    f"{ROLLOUT}.n=4",
    "data.val_files=arithmetic://sum?digits=2&split=held-out&size=8",
    "trainer.total_training_steps=12",
    "trainer.test_freq=6",
    "trainer.logger=jsonl",
)
"""The quickstart with small steps, gently: a dozen take two or three seconds."""
LONG = "trainer.total_training_steps=24"
LORA = (f"{MODEL}.lora_rank=4", f"{ACTOR}.optim.lr=1.0e-3")
DAPO = (
    "algorithm.filter_groups.enable=true",
    "algorithm.filter_groups.metric=reward",
    f"{ACTOR}.clip_ratio_high=0.28",
    f"{ACTOR}.loss_agg_mode=token-mean",
)
SFT = (
    "data.train_files=arithmetic://sum?digits=2&size=200&traces=1",
    "data.val_files=arithmetic://sum?digits=2&split=held-out&size=16&traces=1",
    "data.train_batch_size=8",
    f"{ACTOR}.optim.lr_warmup_steps=4",
    "trainer.total_training_steps=24",
    "trainer.test_freq=12",
    "trainer.logger=jsonl",
)
"""The recipe of the built-in model, with few rows."""
TOOLS = (
    "data.train_files=tools://calculator?size=64",
    "data.train_batch_size=4",
    f"{ACTOR}.ppo_mini_batch_size=4",
    "trainer.total_training_steps=6",
    "trainer.test_freq=-1",
    "trainer.val_before_train=false",
    "data.val_files=tools://calculator?split=held-out&size=8",
    "trainer.logger=jsonl",
)
"""The recipe with a calculator, with few conversations a step."""

WATCHED = (
    "reward.components.exact={rule: exact}",
    "reward.components.brief={rule: length, weight: 0.0}",
    "reward.components.even={rule: regex, weight: 0.0, kwargs: {pattern: '.*[02468]'}}",
)
"""A penalty, and something that has nothing to do with being right, beside the reward."""

HEALTHY: dict[str, tuple[str, ...]] = {
    "grpo": (LONG,),
    "dr. grpo": ("algorithm.norm_adv_by_std_in_grpo=false",),
    "rloo": ("algorithm.adv_estimator=rloo",),
    "reinforce++": ("algorithm.adv_estimator=reinforce_plus_plus",),
    "remax": ("algorithm.adv_estimator=remax",),
    "ppo with a critic": ("algorithm.adv_estimator=gae", LONG, f"{ROLLOUT}.n=8"),
    "lora": LORA,
    "dapo": DAPO,
    "kl in the loss": (f"{ACTOR}.use_kl_loss=true",),
    "kl in the reward": ("algorithm.use_kl_in_reward=true", "trainer.save_freq=4"),
    "two epochs": (f"{ACTOR}.ppo_epochs=2", f"{ACTOR}.ppo_mini_batch_size=2"),
    "gspo": (f"{ACTOR}.policy_loss.loss_mode=gspo",),
    "watched components": WATCHED,
}
"""What is laid over the small quickstart, by name."""


def train_quick(folder: Path, *overrides: str) -> Path:
    """A run of the small quickstart with changes; its run directory."""
    return train(folder, *SMALL, *overrides, files=FILES).root


def train_supervised(folder: Path) -> Path:
    """A supervised run; its run directory."""
    report = report_of(folder, *SFT, files=[ROOT / "recipes" / "builtin_arithmetic.yaml"])
    assert report.is_sound, report.problems
    run_training(report)
    return folder / "luyen" / "builtin_arithmetic"


def train_with_tools(folder: Path, *overrides: str) -> Path:
    """A run in which the built-in model calls a calculator; its run directory."""
    return train(folder, *TOOLS, *overrides, files=[ROOT / "recipes" / "tool_calling.yaml"]).root


def healthy_runs() -> dict[str, Callable[[Path], Path]]:
    """How to make each healthy run below a folder, by name."""
    made = {name: partial(_quick, overrides) for name, overrides in HEALTHY.items()}
    return {**made, "supervised": train_supervised, "tools": train_with_tools}


def _quick(overrides: tuple[str, ...], folder: Path) -> Path:
    return train_quick(folder, *overrides)
