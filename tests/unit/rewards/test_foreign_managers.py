"""Reward managers of plugins: what they raise is a fault, what they change is a copy."""

import asyncio
import sys

import pytest

from luyen.base.errors import UserError
from luyen.base.records import Score
from luyen.rewards.reward_managers import reward_managers
from tests.unit.rewards.builders import config, group, prompt, scored


class Reward:
    """Does with a group what it was told."""

    names = ("odd",)

    def __init__(self, does) -> None:
        self._does = does

    async def __call__(self, prompt, rollouts):
        return self._does(prompt, rollouts)


class StepReward(Reward):
    async def score_step(self, groups):
        return [self._does(*group) for group in groups]


does: list = []
reward_managers.register("test_odd")(lambda given: Reward(does[0]))
reward_managers.register("test_odd_step")(lambda given: StepReward(does[0]))
reward_managers.register("test_leaves")(lambda given: sys.exit(0))


def judged(manager: str, what):
    does[:] = [what]
    asked = prompt("12", "mine", tests=[[1]])
    [done] = scored(config(reward_manager={"name": manager}), [group(asked, "a", "b")])
    assert asked.extra_info == {"tests": [[1]]}
    return done


def raising(fault):
    def does(prompt, rollouts):
        raise fault

    return does


@pytest.mark.parametrize("manager", ["test_odd", "test_odd_step"])
@pytest.mark.parametrize(
    "fault",
    [SystemExit(0), KeyboardInterrupt(), GeneratorExit(), asyncio.CancelledError(), ValueError()],
)
def test_what_it_raises_is_the_fault_of_what_it_judged(manager, fault):
    done = judged(manager, raising(fault))
    assert [score.value for score in done.scores] == [None, None]
    assert f"`{manager}`: {type(fault).__name__}" in (done.scores[0].error or "")


@pytest.mark.parametrize("manager", ["test_odd", "test_odd_step"])
def test_what_it_changes_is_a_copy_and_its_scores_count(manager):
    def changes(prompt, rollouts):
        prompt.extra_info["tests"][0].append(2)
        return [Score(name="reward", value=float(i)) for i, _ in enumerate(rollouts)]

    assert [score.value for score in judged(manager, changes).scores] == [0.0, 1.0]


@pytest.mark.parametrize("returned", [None, 1.0, [], [1.0, 2.0], [Score(name="a", value="x")] * 2])
def test_what_is_no_list_of_scores_is_refused(returned):
    with pytest.raises(UserError, match="return a list with a Score per rollout"):
        judged("test_odd", lambda *_: returned)


def test_one_that_cannot_be_made_is_an_error():
    with pytest.raises(UserError, match="making the reward failed: SystemExit: 0"):
        judged("test_leaves", None)
