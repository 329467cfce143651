"""Reward managers of plugins: what they raise or give that is no score is a fault, or an error."""

from collections.abc import Callable, Coroutine, Sequence
from typing import Any, final

from luyen.base.errors import UserError
from luyen.base.faults import last_line
from luyen.base.foreign import boundary, own_copy
from luyen.base.records import Prompt, Rollout, Score
from luyen.rewards.compose import ROOT
from luyen.rewards.outcome import plain_score, shown
from luyen.rewards.protocol import Group, Reward, StepReward, StepWide
from luyen.rewards.registries import Given, reward_managers

_FIELD = "reward.reward_manager.name"


def managed(name: str, given: Given) -> Reward:
    """The reward that a manager makes of the judge of a run; one of a plugin is guarded."""
    make = reward_managers.get(name)
    if make.__module__.startswith("luyen."):
        return make(given)
    faults: list[BaseException] = []
    with boundary(faults):
        made = make(given)
        guarded = GuardedReward(made, name)
        return StepWide(guarded, guarded.judge_step) if isinstance(made, StepReward) else guarded
    if isinstance(faults[0], UserError):
        raise faults[0]
    why = f"making the reward failed: {last_line(faults[0])}"
    raise UserError(_FIELD, name, why, "mend the manager") from faults[0]


@final
class GuardedReward:
    """A reward of a plugin. It sees copies, and what it raises is the fault of what it judged.

    An error that a user can mend ends the run, as everywhere; so does an answer of another shape.
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
        asked = [(prompt, rollouts)]
        return (await self._rows(lambda given: self._one(*given[0]), asked))[0]

    async def judge_step(self, groups: Sequence[Group]) -> list[list[Score]]:
        """The scores of every group, in order."""
        return await self._rows(self._inner.score_step, groups)

    async def _one(self, prompt: Prompt, rollouts: Sequence[Rollout]) -> list[Any]:
        return [await self._inner(prompt, rollouts)]

    async def _rows(
        self, judge: Callable[[Any], Coroutine[Any, Any, Any]], groups: Sequence[Group]
    ) -> list[list[Score]]:
        faults: list[BaseException] = []
        returned: Any = None
        with boundary(faults):
            returned = await judge(own_copy(list(groups)))
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
            why = f"it gave {shown(returned)} for {[len(some) for _, some in groups]} rollouts"
            raise UserError(_FIELD, self._name, why, "return a list with a Score per rollout")
        return sound
