"""The reward managers that come with the package."""

from collections.abc import Sequence
from typing import final

from luyen.base.errors import UserError
from luyen.base.records import Prompt, Rollout, Score
from luyen.rewards.batch import BatchReward
from luyen.rewards.compose import with_part
from luyen.rewards.protocol import Group, Reward, StepReward, StepWide
from luyen.rewards.registries import Given, reward_managers
from luyen.rewards.rules.length import overlong
from luyen.rewards.rules.rule import answer_of


@reward_managers.register("naive")
def naive(given: Given) -> Reward:
    """One answer after the other, on this thread; rules that could hang have a process."""
    return given.judge()


@reward_managers.register("prime")
def prime(given: Given) -> Reward:
    """Every call in a process of a pool, under a time limit."""
    return given.judge(given.pool)


@reward_managers.register("batch")
def batch(given: Given) -> Reward:
    """One call of the custom function for all answers of a step."""
    custom_reward_function = given.reward.custom_reward_function
    if custom_reward_function.path is None:
        why = "it hands lists to a function of yours, and none is named"
        fix = "set reward.custom_reward_function.path, or reward.reward_manager.name=naive"
        raise UserError("reward.reward_manager.name", "batch", why, fix)
    return BatchReward(
        custom_reward_function.path,
        custom_reward_function.name,
        custom_reward_function.reward_kwargs,
        timeout_s=given.reward.timeout_s,
    )


@reward_managers.register("dapo")
def dapo(given: Given) -> Reward:
    """`naive`, and a penalty for answers that come close to the longest allowed."""
    overlong_buffer = given.reward.overlong_buffer
    if not overlong_buffer.enable:
        return given.judge()
    if overlong_buffer.len > given.max_response_length:
        why = f"the buffer is longer than a response ({given.max_response_length} tokens)"
        fix = "set it to at most data.max_response_length"
        raise UserError("reward.overlong_buffer.len", overlong_buffer.len, why, fix)
    judge = given.judge()
    shortened = Shortened(
        judge,
        buffer=overlong_buffer.len,
        penalty_factor=overlong_buffer.penalty_factor,
        max_response_length=given.max_response_length,
    )
    if not isinstance(judge, StepReward):
        return shortened

    async def step(groups: Sequence[Group]) -> list[list[Score]]:
        rows = await judge.score_step(groups)
        return [shortened.apply(g, scores) for g, scores in zip(groups, rows, strict=True)]

    return StepWide(shortened, step)


@final
class Shortened:
    """A reward with DAPO's soft overlong penalty as one more part of every tree."""

    def __init__(
        self, inner: Reward, *, buffer: int, penalty_factor: float, max_response_length: int
    ) -> None:
        self._inner = inner
        self._buffer = buffer
        self._penalty_factor = penalty_factor
        self._max_response_length = max_response_length

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the inner reward, and `overlong`."""
        return (*self._inner.names, "overlong")

    async def __call__(self, prompt: Prompt, rollouts: Sequence[Rollout]) -> list[Score]:
        """One tree per rollout."""
        return self.apply((prompt, rollouts), await self._inner(prompt, rollouts))

    def apply(self, group: Group, scores: Sequence[Score]) -> list[Score]:
        """The scores of a group with the penalty of each."""
        prompt, rollouts = group
        pairs = zip(scores, rollouts, strict=True)
        return [with_part(score, self._penalty(prompt, rollout)) for score, rollout in pairs]

    def _penalty(self, prompt: Prompt, rollout: Rollout) -> Score:
        value = overlong(
            prompt,
            answer_of(rollout),
            buffer=self._buffer,
            penalty_factor=self._penalty_factor,
            max_response_length=self._max_response_length,
        )
        assert isinstance(value, float)
        return Score(name="overlong", value=value)
