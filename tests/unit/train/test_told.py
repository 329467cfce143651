"""What is told of a step is told of rollouts that were compared, in the order of the batch."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from luyen.base.records import Prompt, Rollout, make_prompt
from luyen.rewards.scoring import ScoredGroup
from luyen.rollout.single_turn import Group
from luyen.train.batch import batch_order
from luyen.train.metrics import StepReport
from luyen.train.scoring import ScoredRollouts
from tests.unit.train.conversations import talk

PROMPTS = [make_prompt([{"role": "user", "content": name}]) for name in "abc"]


def drawn(draw: int, sample: int, **more: Any) -> Rollout:
    return talk("pp00", draw=draw, sample=sample, notes={"unchecked": 1.0}, **more)


def scored(draw: int, *samples: int) -> ScoredGroup:
    rollouts = tuple(drawn(draw, sample) for sample in samples)
    return ScoredGroup(prompt=PROMPTS[draw], rollouts=rollouts, seconds=(None,) * len(rollouts))


class Comparing:
    """Writes into the notes of a rollout which prompt it was compared with, and how often."""

    def __init__(self) -> None:
        self.times = 0

    def compared(self, rollout: Rollout, prompt: Prompt) -> Rollout:
        self.times += 1
        return replace(rollout, notes={"compared with": float(PROMPTS.index(prompt))})


def run_of() -> Any:
    return SimpleNamespace(roles=SimpleNamespace(generation=Comparing()))


def told_of(
    run: Any, *scored: ScoredGroup, broken: list[Rollout], groups: list[Group]
) -> StepReport:
    found = ScoredRollouts(groups=groups, scored=scored, broken=broken, baselines={})
    return StepReport(run, found, SimpleNamespace())


def places(rollouts: Any) -> list[tuple[int, int]]:
    return [(rollout.group.draw, rollout.sample) for rollout in rollouts]


def test_everyone_is_compared_with_the_prompt_of_the_group():
    judged = scored(2, 0, 1), scored(0, 0), scored(1, 1, 0)
    all_rollouts = told_of(run_of(), *judged, broken=[], groups=[]).all_rollouts
    assert places(all_rollouts) == [(2, 0), (2, 1), (0, 0), (1, 1), (1, 0)], "as they were judged"
    assert [r.notes for r in all_rollouts] == [
        {"compared with": float(r.group.draw)} for r in all_rollouts
    ]


def test_what_broke_comes_last_with_its_fault():
    lost = [drawn(0, 1, fault="no line"), drawn(2, 0, fault="no time")]
    step_report = told_of(run_of(), scored(1, 0), scored(0, 0), broken=lost, groups=[])
    all_rollouts = step_report.all_rollouts
    assert places(all_rollouts) == [(1, 0), (0, 0), (0, 1), (2, 0)]
    assert [rollout.fault for rollout in all_rollouts] == [None, None, "no line", "no time"]


def test_those_that_are_learned_from_are_compared_and_in_the_order_of_the_batch():
    all_scored = [scored(2, 1, 0), scored(0, 0, 1), scored(1, 0)]
    lost = [drawn(1, 1, fault="no line")]
    # One rollout of draw 0 and all of draw 1 are left out, as where nothing is learned from them.
    groups = [
        Group(prompt=all_scored[0].prompt, rollouts=all_scored[0].rollouts),
        Group(prompt=all_scored[1].prompt, rollouts=all_scored[1].rollouts[1:]),
    ]
    step_report = told_of(run_of(), *all_scored, broken=lost, groups=groups)
    assert places(step_report.rollouts) == [(0, 1), (2, 0), (2, 1)]
    assert [r.key for r in step_report.rollouts] == [r.key for r in batch_order(groups)]
    assert [r.notes["compared with"] for r in step_report.rollouts] == [0.0, 2.0, 2.0]
    assert all(any(r is other for other in step_report.all_rollouts) for r in step_report.rollouts)


def test_every_rollout_is_compared_once_and_not_before_somebody_asks():
    run, judged = run_of(), (scored(0, 0, 1), scored(1, 0))
    groups = [Group(prompt=s.prompt, rollouts=s.rollouts) for s in judged]
    step_report = told_of(run, *judged, broken=[], groups=groups)
    assert run.roles.generation.times == 0
    for _ in range(2):
        assert len(step_report.rollouts) == len(step_report.all_rollouts) == 3
    assert run.roles.generation.times == 3
