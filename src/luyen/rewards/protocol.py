"""The reward protocol: a reward scores a group and keeps the parts of every score.

Every source of a node in the reward tree is a `Reward`: a rule, a judge, a learned model. It gives
scores with a value, or with `value=None` and an `error`; it neither raises for one bad answer nor
puts a number in place of a failure. It may set `seconds`, `parts` and `by_turn`; the tree sets name
and weight, scales, clips, normalises and gates. Behind a closed gate a source is not called, so it
may see only some rollouts of a group, or none of a step.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, final, runtime_checkable

from luyen.base.records import Message, Prompt, Rollout, Score

Group: TypeAlias = tuple[Prompt, Sequence[Rollout]]
"""A prompt and its rollouts."""

Ask: TypeAlias = Callable[[Sequence[Message], Mapping[str, Any]], Awaitable[str]]
"""Puts a conversation to a language model, with settings for drawing, and gives its answer."""


class Reward(Protocol):
    """Scores the rollouts of one prompt; it may compare them with each other."""

    @property
    def names(self) -> tuple[str, ...]:
        """Components that a score may hold, as far as they are known before the first call."""
        ...

    async def __call__(self, prompt: Prompt, rollouts: Sequence[Rollout]) -> list[Score]:
        """One score per rollout, in order; where there is no value, there is an error."""
        ...


@runtime_checkable
class StepReward(Protocol):
    """A reward that prefers to see all groups of a step at once.

    One such source anywhere in a tree makes the whole tree be scored step by step.
    """

    async def score_step(self, groups: Sequence[Group]) -> list[list[Score]]:
        """The scores of every group, in order."""
        ...


@final
class StepWide:
    """A reward that scores a whole step at once, because a source inside requires it."""

    def __init__(
        self, one: Reward, many: Callable[[Sequence[Group]], Awaitable[list[list[Score]]]]
    ) -> None:
        self._one = one
        self._many = many

    @property
    def names(self) -> tuple[str, ...]:
        """Those of the reward."""
        return self._one.names

    async def __call__(self, prompt: Prompt, rollouts: Sequence[Rollout]) -> list[Score]:
        """One score per rollout of a single group."""
        return await self._one(prompt, rollouts)

    async def score_step(self, groups: Sequence[Group]) -> list[list[Score]]:
        """The scores of every group, in order."""
        return await self._many(groups)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """What a run brings to its rewards, because rewards cannot make it themselves.

    Example:
        >>> Services().model is None
        True
    """

    model: Reward | None = None
    """The learned reward of `reward.reward_model`."""
    ask: Ask | None = None
    """Calls the run's own rollout engine, for judges without an endpoint."""
    closing: Callable[[], None] | None = None
    """Lets go what was brought, when the rewards are closed."""
