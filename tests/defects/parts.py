"""Defects that really run: a training whose reward, sampler, batch or engine is sabotaged."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import luyen.train.batch
from luyen.base.records import Rollout, Source
from luyen.engine.optim import MasterOptimizer, OptimizerStep
from luyen.rollout.single_turn import Group
from luyen.runtime.in_process import SharedRollout
from tests.defects.healthy import train_quick, train_with_tools
from tests.runs import ACTOR

_HERE = Path(__file__).parent
_SHORT = "trainer.total_training_steps=6"
_ODD = f"reward.custom_reward_function.path={_HERE / 'odd_rewards.py'}"
_REWARD = "reward.custom_reward_function.name"
_ROWS = (f"data.sampler.class_path={_HERE / 'odd_samplers.py'}", "data.sampler.class_name")
_TOOLS = "actor_rollout_ref.rollout.multi_turn"
_PARTS = (
    "reward.components.exact={rule: numeric, weight: 0.01}",
    "reward.components.digit={rule: regex, weight: 50, kwargs: {pattern: '[5-9]', match: search}}",
)
_NINES = (
    "reward.components.nines={rule: regex, kwargs: {pattern: '9', match: search}}",
    "reward.components.exact={rule: exact, weight: 0.0}",
    "data.train_batch_size=16",
    f"{ACTOR}.ppo_mini_batch_size=16",
    f"{ACTOR}.optim.lr=3.0e-4",
    "trainer.total_training_steps=16",
)
"""A reward for answers that hold a 9; whether they are right is watched and not learned."""
Sabotage = AbstractContextManager[Any]


def masks(change: Callable[[bool, int], bool]) -> Sabotage:
    """Batches whose mask is made from the right one and the place; the first token never trains."""
    pack = luyen.train.batch.pack

    def sabotaged(tokens: Any, *, masks: Any, **rest: Any) -> Any:
        wrong = [[i > 0 and change(mask, i) for i, mask in enumerate(row)] for row in masks]
        return pack(tokens, masks=wrong, **rest)

    return patch.object(luyen.train.batch, "pack", sabotaged)


def sampled(change: Callable[[Rollout], Rollout]) -> Sabotage:
    """An engine whose rollouts are changed before anyone sees them."""
    generate = SharedRollout.generate

    def sabotaged(self: SharedRollout, *words: Any, **rest: Any) -> list[Group]:
        groups = generate(self, *words, **rest)
        return [replace(g, rollouts=tuple(change(r) for r in g.rollouts)) for g in groups]

    return patch.object(SharedRollout, "generate", sabotaged)


def off_by(rollout: Rollout) -> Rollout:
    """Log-probabilities that are a little too high."""
    logps = tuple(None if p is None else p - 0.1 for p in rollout.logps)
    return replace(rollout, logps=logps)


def first_weights(rollout: Rollout) -> Rollout:
    """Versions of an engine that never received an update."""
    versions = tuple(0 if s == Source.SAMPLED else None for s in rollout.sources)
    return replace(rollout, versions=versions)


def no_optimizer() -> Sabotage:
    """An optimizer that forgets to write the weights."""

    def sabotaged(self: MasterOptimizer, lr: float) -> OptimizerStep:
        self.zero_grad()
        return OptimizerStep(grad_norm=1.0, is_applied=True, lr=lr)

    return patch.object(MasterOptimizer, "step", sabotaged)


SABOTAGED: dict[str, tuple[str, Callable[[], Sabotage], tuple[str, ...]]] = {
    "a constant reward": ("reward-all-equal", nullcontext, (_ODD, f"{_REWARD}=constant", _SHORT)),
    "rewards alike in a group": (
        "zero-variance-groups",
        nullcontext,
        (_ODD, f"{_REWARD}=by_prompt", _SHORT),
    ),
    "a heavy component": ("reward-dominance", nullcontext, (*_PARTS, _SHORT)),
    "a reward for the wrong thing": ("reward-hacking", nullcontext, _NINES),
    "rewards that break": (
        "many-faults",
        nullcontext,
        (_ODD, f"{_REWARD}=often_broken", "reward.on_fault=drop", _SHORT),
    ),
    "nearly every group is dropped": (
        "starvation",
        nullcontext,
        (
            _ODD,
            f"{_REWARD}=seldom_different",
            "algorithm.filter_groups.enable=true",
            "algorithm.filter_groups.metric=reward",
            _SHORT,
        ),
    ),
    "an inverted mask": ("inverted-mask", lambda: masks(lambda mask, i: not mask), (_SHORT,)),
    "a mask with holes": (
        "empty-mask",
        lambda: masks(lambda mask, i: mask and i % 2 == 0),
        (_SHORT,),
    ),
    "learning rate 0": ("learning-rate", nullcontext, (f"{ACTOR}.optim.lr=0", _SHORT)),
    "an optimizer that writes nothing": (
        "frozen-parameters",
        no_optimizer,
        (_SHORT, "trainer.save_freq=2"),
    ),
    "a clip without room": (
        "clip-saturation",
        nullcontext,
        (f"{ACTOR}.clip_ratio=1.0e-6", f"{ACTOR}.ppo_epochs=4", _SHORT),
    ),
    "answers are cut": ("truncation", nullcontext, ("data.max_response_length=2", _SHORT)),
    "an engine that is off": ("parity-gap", lambda: sampled(off_by), (_SHORT,)),
    "an engine with old weights": ("stale-weights", lambda: sampled(first_weights), (_SHORT,)),
    "a sampler that repeats": (
        "repeated-prompts",
        nullcontext,
        (_ROWS[0], f"{_ROWS[1]}=TheSameRows", _SHORT),
    ),
    "a sampler that draws twice": (
        "duplicate-prompts",
        nullcontext,
        (_ROWS[0], f"{_ROWS[1]}=EveryRowTwice", _SHORT),
    ),
    "nothing is held out": (
        "no-validation",
        nullcontext,
        ("data.val_files=[]", "trainer.test_freq=-1", "trainer.total_training_steps=20"),
    ),
}
"""Defect -> the rule that names it, what is sabotaged, and what the configuration says."""

WITH_TOOLS: dict[str, tuple[str, tuple[str, ...]]] = {
    "a format nobody writes": (
        "tools-never-called",
        (f"trainer.plugins=[{_HERE / 'deaf_plugin.py'}]", f"{_TOOLS}.format=deaf"),
    ),
    "a tool that always fails": (
        "tools-failing",
        (
            f"{_TOOLS}.tool_config_path=null",
            f"{_TOOLS}.function_tool_path={_HERE / 'failing_tools.py'}",
        ),
    ),
}
"""The same for runs with tools."""


def sabotage(name: str, folder: Path) -> Path:
    """The run directory of a training with this defect."""
    if name in WITH_TOOLS:
        return train_with_tools(folder, *WITH_TOOLS[name][1])
    _, broken, overrides = SABOTAGED[name]
    with broken():
        return train_quick(folder, *overrides)
