"""Reward managers: naive, prime, batch, dapo and those of plugins, behind a boundary."""

from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, final

from luyen.base.boundary import boundary, last_line, own_copy
from luyen.base.errors import UserError
from luyen.base.records import Prompt, Rollout, Score
from luyen.base.registry import Registry
from luyen.config.schema.reward import RewardConfig
from luyen.rewards.calls import Executor, InlineExecutor, plain_score, short_repr
from luyen.rewards.custom import BatchReward
from luyen.rewards.pool import ScoringPool
from luyen.rewards.protocol import Group, Reward, StepReward, StepWide
from luyen.rewards.rules.length import overlong
from luyen.rewards.rules.rule import answer_of
from luyen.rewards.tree import ROOT, with_part


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ManagerContext:
    """What a reward manager may build with.

    Example:
        >>> given = ManagerContext(reward=RewardConfig(), max_response_length=64,
        ...               pool=ScoringPool(size=1, timeout_s=1.0), build=lambda executor: None)
        >>> given.judge() is None
        True
    """

    reward: RewardConfig
    """The `reward` block."""
    max_response_length: int
    """Most tokens of a response."""
    pool: ScoringPool
    """Processes for what may hang or crash; they start when first needed."""
    build: Callable[[Executor], Reward]
    """Builds the inner reward (components, routes or the custom function) with this executor."""

    def judge(self, executor: Executor | None = None) -> Reward:
        """The reward of the configuration; it runs on this thread unless given an executor."""
        return self.build(executor or InlineExecutor(timeout_s=self.reward.timeout_s))


reward_managers: Registry[Callable[[ManagerContext], Reward]] = Registry(
    "reward manager", "reward.reward_manager.name"
)


# The built-in reward managers.


@reward_managers.register("naive")
def naive(given: ManagerContext) -> Reward:
    """One answer after the other, on this thread; rules that could hang have a process."""
    return given.judge()


@reward_managers.register("prime")
def prime(given: ManagerContext) -> Reward:
    """Every call in a process of a pool, under a time limit."""
    return given.judge(given.pool)


@reward_managers.register("batch")
def batch(given: ManagerContext) -> Reward:
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
def dapo(given: ManagerContext) -> Reward:
    """`naive`, and a penalty for answers that come close to the longest allowed."""
    overlong_buffer = given.reward.overlong_buffer
    if not overlong_buffer.enable:
        return given.judge()
    if overlong_buffer.len > given.max_response_length:
        why = f"the buffer is longer than a response ({given.max_response_length} tokens)"
        fix = "set it to at most data.max_response_length"
        raise UserError("reward.overlong_buffer.len", overlong_buffer.len, why, fix)
    judge = given.judge()
    shortened = OverlongPenalty(
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
class OverlongPenalty:
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


# Reward managers of plugins: exceptions and invalid scores become faults or UserErrors.

_FIELD = "reward.reward_manager.name"


def managed(name: str, given: ManagerContext) -> Reward:
    """The reward that a manager makes of the run's inner reward; a plugin's is guarded."""
    make = reward_managers.get(name)
    if make.__module__.startswith("luyen."):
        return make(given)
    faults: list[BaseException] = []
    with boundary(faults):
        made = make(given)
        guarded = GuardedReward(made, name)
        return StepWide(guarded, guarded.score_groups) if isinstance(made, StepReward) else guarded
    if isinstance(faults[0], UserError):
        raise faults[0]
    why = f"making the reward failed: {last_line(faults[0])}"
    raise UserError(_FIELD, name, why, "correct the manager") from faults[0]


@final
class GuardedReward:
    """A reward of a plugin. It sees copies, and what it raises is the fault of what it scored.

    A UserError ends the run, as everywhere; so does a result of the wrong shape.
    """

    def __init__(self, inner: Any, name: str) -> None:
        self._inner = inner
        self._name = name

    @property
    def names(self) -> tuple[str, ...]:
        """Components that a score may hold, as far as the manager knows them."""
        return self._inner.names

    async def __call__(self, prompt: Prompt, rollouts: Sequence[Rollout]) -> list[Score]:
        """One tree per rollout."""
        groups = [(prompt, rollouts)]
        return (await self._rows(lambda given: self._one(*given[0]), groups))[0]

    async def score_groups(self, groups: Sequence[Group]) -> list[list[Score]]:
        """The scores of every group, in order."""
        return await self._rows(self._inner.score_step, groups)

    async def _one(self, prompt: Prompt, rollouts: Sequence[Rollout]) -> list[Any]:
        return [await self._inner(prompt, rollouts)]

    async def _rows(
        self, score_fn: Callable[[Any], Coroutine[Any, Any, Any]], groups: Sequence[Group]
    ) -> list[list[Score]]:
        faults: list[BaseException] = []
        returned: Any = None
        with boundary(faults):
            returned = await score_fn(own_copy(list(groups)))
        if faults and isinstance(faults[0], UserError):
            raise faults[0]
        if faults:
            error = f"reward manager `{self._name}`: {last_line(faults[0])}"
            return [[Score(name=ROOT, value=None, error=error) for _ in some] for _, some in groups]
        sound: list[list[Score]] = []
        with boundary(faults):  # what is no list of lists is refused below
            rows = [[plain_score(score) for score in row] for row in returned]
            sound = [[score for score in row if score is not None] for row in rows]
        if [len(row) for row in sound] != [len(rollouts) for _, rollouts in groups]:
            why = f"it gave {short_repr(returned)} for {[len(some) for _, some in groups]} rollouts"
            raise UserError(_FIELD, self._name, why, "return a list with a Score per rollout")
        return sound
