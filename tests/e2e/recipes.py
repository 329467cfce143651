"""The recipes of the repository, made small enough to run in a test."""

from luyen.config.check import check
from luyen.config.pipeline import is_pipeline
from tests.architecture.tree import ROOT
from tests.runs import ACTOR, MODEL, ROLLOUT, TINY

_FILES = sorted((ROOT / "recipes").glob("*.yaml"))
RECIPES = {path.stem: path for path in _FILES if not is_pipeline([path])}
PIPELINES = {path.stem: path for path in _FILES if is_pipeline([path])}
OFFLINE = {n for n, path in RECIPES.items() if check([path]).config.trainer.stage != "rl"}
ONLINE = sorted(set(RECIPES) - OFFLINE)
LEARNED = sorted(set(ONLINE) - {"smollm2_products", "on_policy_distill"})
"""Recipes that raise the reward of the built-in model.

Of the others one needs a model that no test fetches, and one learns from a teacher.
"""
_KEPT = ("data.train_batch_size", f"{ROLLOUT}.n", "algorithm.", f"{ACTOR}.ppo_mini_batch_size")
"""What a recipe says itself and its small form must not lose."""

_DIGIT = "{rule: regex, kwargs: {pattern: '[0-9]', match: search}}"


def _is_general(override: str) -> bool:
    return not override.startswith(_KEPT)


def small(name: str) -> list[str]:
    """Overrides that make a recipe a run of two steps of a random model."""
    report = check([RECIPES[name]])
    if report.config.actor_rollout_ref.rollout.multi_turn.enable:
        return _small_with_tools(report.config.data.train_files[0])
    is_grouped = report.config.actor_rollout_ref.rollout.n > 1
    actor, algorithm = report.config.actor_rollout_ref.actor, report.config.algorithm
    parts = report.config.data.train_batch_size // actor.ppo_mini_batch_size
    prompts = 4 if is_grouped else 16
    overrides = [
        *filter(_is_general, TINY),
        f"{MODEL}.path=builtin://arithmetic",
        "data.val_files=arithmetic://sum?digits=1&split=held-out",
        f"data.train_batch_size={prompts}",
        f"{ACTOR}.ppo_mini_batch_size={prompts // parts}",
        f"{ACTOR}.optim.lr_warmup_steps=1",
    ]
    if report.config.trainer.critic_warmup:
        overrides.append("trainer.critic_warmup=1")
    if algorithm.filter_groups.enable:
        overrides.append("algorithm.filter_groups.metric=score")
    if report.config.reward.components:
        # A part of the recipe's own sum instead of a function of ours: random answers differ in it.
        overrides = [word for word in overrides if "custom_reward_function" not in word]
        overrides.append(f"reward.components.digit={_DIGIT}")
    return overrides


def _small_with_tools(address: str) -> list[str]:
    """Overrides for a recipe with tools: rows, lengths and turns stay its own."""
    return [
        *(word for word in TINY if not word.startswith("data.") or "batch_size" in word),
        f"{MODEL}.path=builtin://tools",
        f"data.train_files={address}?size=32",
        f"data.val_files={address}?split=held-out&size=8",
        f"{ACTOR}.optim.lr_warmup_steps=1",
    ]


def learning(*, seed: int, steps: int) -> list[str]:
    """Overrides of a recipe that is to show, within minutes, that it learns."""
    return [
        f"trainer.total_training_steps={steps}",
        "trainer.test_freq=-1",
        "trainer.logger=jsonl",
        f"trainer.seed={seed}",
    ]
