"""What a reward is: something that judges a group and keeps the parts of every score."""

from collections.abc import Sequence
from typing import Protocol, TypeAlias, runtime_checkable

from luyen.base.records import Prompt, Rollout, Score

Group: TypeAlias = tuple[Prompt, Sequence[Rollout]]
"""A prompt and the rollouts of one draw of it."""


class Reward(Protocol):
    """Judges the rollouts of one prompt, side by side if it likes."""

    @property
    def names(self) -> tuple[str, ...]:
        """Components that a score may hold, as far as they are known before the first call."""
        ...

    async def __call__(self, prompt: Prompt, rollouts: Sequence[Rollout]) -> list[Score]:
        """One score per rollout, in order; where there is no value, there is an error."""
        ...


@runtime_checkable
class StepReward(Protocol):
    """A reward that prefers to see all groups of a step at once."""

    async def score_step(self, groups: Sequence[Group]) -> list[list[Score]]:
        """The scores of every group, in order."""
        ...
