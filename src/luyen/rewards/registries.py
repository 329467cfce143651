"""Reward managers: named ways to turn the judge of a run into the reward of its rollouts."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

from luyen.base.registry import Registry
from luyen.config.schema.reward import Reward as RewardConfig
from luyen.rewards.calls import Executor, Inline
from luyen.rewards.pool import Pool
from luyen.rewards.protocol import Reward


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """What a reward manager may build with.

    Example:
        >>> given = Given(reward=RewardConfig(), max_response_length=64,
        ...               pool=Pool(size=1, timeout_s=1.0), build=lambda executor: None)
        >>> given.judge() is None
        True
    """

    reward: RewardConfig
    """The `reward` block."""
    max_response_length: int
    """Most tokens of a response."""
    pool: Pool
    """Processes for what may hang or crash; they start when first needed."""
    build: Callable[[Executor], Reward]
    """Makes the judge (components, routes or the custom function) with its calls run there."""

    def judge(self, executor: Executor | None = None) -> Reward:
        """What the configuration judges by; called on this thread unless told otherwise."""
        return self.build(executor or Inline(timeout_s=self.reward.timeout_s))


reward_managers: Registry[Callable[[Given], Reward]] = Registry(
    "reward manager", "reward.reward_manager.name"
)
