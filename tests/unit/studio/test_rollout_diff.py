"""The first difference between the rollouts of two runs, worked out by hand."""

from dataclasses import replace
from typing import Any

import pytest

from luyen.base.records import (
    Branch,
    CallStatus,
    GroupId,
    Rollout,
    Score,
    Source,
    StopReason,
    ToolCall,
)
from luyen.studio.diff import first_difference
from luyen.telemetry.rollout_files import RecordedRollout


def rollout(draw: int = 0, sample: int = 0, **changes: Any) -> Rollout:
    made = Rollout(
        group=GroupId(step=1, draw=draw, uid=f"u{draw}"),
        sample=sample,
        tokens=(5, 6, 7),
        sources=(Source.PROMPT, Source.SAMPLED, Source.SAMPLED),
        turns=(0, 0, 0),
        logps=(None, -0.5, -0.25),
        versions=(None, 0, 0),
        stop=StopReason.ANSWERED,
        text="ok",
        score=Score(name="reward", value=1.0, parts=(Score(name="digits", value=0.5),)),
        calls=(ToolCall(turn=0, name="add", status=CallStatus.OK, result="3", seconds=0.1),),
    )
    return replace(made, **changes)


def recorded(*rollouts: Rollout) -> list[RecordedRollout]:
    return [RecordedRollout(rollout=r, advantages=(None, 0.5, 0.5)) for r in rollouts]


BOTH = (rollout(0), rollout(1))


@pytest.mark.parametrize("stage", ["prompts", "rollouts", "rewards", "advantages"])
def test_equal_rollouts_show_no_difference_whatever_the_clock_said(stage: str):
    slow = replace(BOTH[0].calls[0], seconds=9.0, attempts=2)
    late = rollout(0, calls=(slow,), notes={"seconds": 3.0})
    assert first_difference(recorded(*BOTH), recorded(late, BOTH[1]), stage) is None


def test_the_first_token_that_differs_is_told_with_origin_and_log_probability():
    other = rollout(1, tokens=(5, 6, 9), logps=(None, -0.5, -1.25))
    found = first_difference(recorded(*BOTH), recorded(BOTH[0], other), "rollouts")
    assert found is not None
    assert (found.rollout, found.what, found.place) == ("1.1.u1/0", "token", "2")
    told = {"source": "sampled", "turn": 0, "version": 0}
    assert found.a == {"id": 7, "logp": -0.25, **told}
    assert found.b == {"id": 9, "logp": -1.25, **told}


def test_a_log_probability_alone_is_a_difference_and_nan_is_itself():
    other = rollout(0, logps=(None, -0.5, -0.25000003))
    found = first_difference(recorded(BOTH[0]), recorded(other), "rollouts")
    assert found is not None
    assert found.place == "2"
    nan = rollout(0, logps=(None, float("nan"), -0.25))
    again = rollout(0, logps=(None, float("nan"), -0.25))
    assert first_difference(recorded(nan), recorded(again), "rollouts") is None


def test_a_shorter_rollout_ends_where_the_other_goes_on():
    short = rollout(
        0,
        tokens=(5, 6),
        sources=(Source.PROMPT, Source.SAMPLED),
        turns=(0, 0),
        logps=(None, -0.5),
        versions=(None, 0),
    )
    ones, others = recorded(BOTH[0]), [RecordedRollout(rollout=short)]
    found = first_difference(ones, others, "rollouts")
    assert found is not None
    assert (found.place, found.b) == ("2", None)


def test_a_token_of_an_earlier_branch_is_told_with_its_branch():
    branch = Branch(
        tokens=(5, 8), sources=BOTH[0].sources[:2], turns=(0, 0), logps=(None, -1.0),
        versions=(None, 0),
    )  # fmt: skip
    one = rollout(0, earlier=(branch,))
    other = rollout(0, earlier=(replace(branch, tokens=(5, 9)),))
    ones, others = ([RecordedRollout(rollout=r)] for r in (one, other))
    found = first_difference(ones, others, "rollouts")
    assert found is not None
    assert found.place == "0:1"


def test_a_call_with_another_result_is_told():
    other = rollout(0, calls=(replace(BOTH[0].calls[0], result="4"),))
    found = first_difference(recorded(BOTH[0]), recorded(other), "rollouts")
    assert found is not None
    assert (found.what, found.place) == ("call", "0")
    assert (found.a["result"], found.b["result"]) == ("3", "4")


def test_the_part_of_a_reward_is_told_before_the_whole():
    score = Score(name="reward", value=0.5, parts=(Score(name="digits", value=0.25),))
    found = first_difference(recorded(BOTH[0]), recorded(rollout(0, score=score)), "rewards")
    assert found is not None
    assert (found.what, found.place) == ("reward", "reward/digits")
    assert (found.a["value"], found.b["value"]) == (0.5, 0.25)


def test_another_prompt_and_a_missing_rollout_are_told():
    elsewhere = replace(rollout(1), group=GroupId(step=1, draw=1, uid="zz"))
    found = first_difference(recorded(*BOTH), recorded(BOTH[0], elsewhere), "prompts")
    assert found is not None
    assert (found.rollout, found.a, found.b) == ("draw 1", "u1", "zz")
    found = first_difference(recorded(*BOTH), recorded(BOTH[0]), "rollouts")
    assert found is not None
    assert (found.rollout, found.what, found.b) == ("1.1.u1/0", "rollout", None)


def test_an_advantage_and_a_rollout_that_was_left_out_are_told():
    ones, others = recorded(BOTH[0]), recorded(BOTH[0])
    others = [replace(others[0], advantages=(None, 0.5, -0.5))]
    found = first_difference(ones, others, "advantages")
    assert found is not None
    assert (found.what, found.place, found.a, found.b) == ("advantage", "2", 0.5, -0.5)
    found = first_difference(ones, [replace(ones[0], advantages=None)], "advantages")
    assert found is not None
    assert found.b is None
