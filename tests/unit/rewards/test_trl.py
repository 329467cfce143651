"""Reward functions as TRL calls them, and faults that are tolerated up to a share of a step."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from luyen.base.errors import UserError
from luyen.base.records import Rollout, Score
from luyen.rewards.calls import InlineExecutor
from luyen.rewards.custom import BatchReward, CustomReward
from luyen.rewards.llm_judge.faults import JudgeFault
from luyen.rewards.scoring import ScoredGroup, Tolerance, apply_fault_policy
from tests.unit.rewards.builders import group, prompt

CODE = """
def text_length(completions, **kwargs):
    return [float(len(one)) for one in completions]

def conversation(completions, **kwargs):
    return [float(one[0]["content"] == one[-1]["content"]) for one in completions]

def columns(prompts, completions, completion_ids, ground_truth, answer, difficulty):
    assert [message["role"] for message in prompts[0]] == ["user"]
    return [difficulty[i] + (one == answer[i] == ground_truth[i])
            for i, one in enumerate(completions)]

def three(completions, **kwargs):
    return [1.0, 2.0, 3.0]
"""


def made(tmp_path: Path, name: str, *, whole: bool = False) -> CustomReward | BatchReward:
    path = tmp_path / "trl_reward.py"
    path.write_text(CODE)
    if whole:
        return BatchReward(str(path), name, {}, timeout_s=5.0)
    return CustomReward(str(path), name, {}, executor=InlineExecutor(timeout_s=5.0))


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize(
    ("name", "values"), [("text_length", [2.0, 3.0]), ("conversation", [1.0, 1.0])]
)
def test_a_completion_reads_as_text_and_as_a_conversation(
    tmp_path: Path, name: str, values: list[float], whole: bool
):
    asked, rollouts = group(prompt(), "42", "abc")
    scores = asyncio.run(made(tmp_path, name, whole=whole)(asked, rollouts))
    assert [score.value for score in scores] == values


def test_columns_come_by_name_and_only_those_it_takes(tmp_path: Path):
    asked, rollouts = group(prompt(truth="42", difficulty=3, unused="x"), "42", "7")
    scores = asyncio.run(made(tmp_path, "columns")(asked, rollouts))
    assert [score.value for score in scores] == [4.0, 3.0]


def test_another_number_of_scores_is_refused(tmp_path: Path):
    asked, rollouts = group(prompt(), "42")
    with pytest.raises(UserError, match="which is no score"):
        asyncio.run(made(tmp_path, "three")(asked, rollouts))


def step(sound: int, *errors: str) -> list[ScoredGroup]:
    asked, rollouts = group(prompt(), *(str(i) for i in range(sound + len(errors))))
    judged: list[Rollout] = []
    for i, rollout in enumerate(rollouts):
        error = errors[i] if i < len(errors) else None
        score = Score(name="reward", value=1.0 if error is None else None, error=error)
        fault = None if error is None else f"reward: {error}"
        judged.append(replace(rollout, score=score, fault=fault))
    return [ScoredGroup(prompt=asked, rollouts=tuple(judged), seconds=(None,) * len(judged))]


BROKEN = "ValueError: x"
AWAY = str(JudgeFault("connection", "refused"))


@pytest.mark.parametrize(
    ("sound", "errors", "is_left_out"),
    [
        (9, [BROKEN], True),
        (9, [BROKEN, BROKEN], False),
        (198, [BROKEN, BROKEN], True),
        (197, [BROKEN, BROKEN, BROKEN], False),
        (18, [AWAY, f"judge: {AWAY}"], True),
        (17, [AWAY] * 3, False),
        (17, [AWAY, AWAY, BROKEN], True),
        (0, [BROKEN], False),
        (0, [AWAY], False),
    ],
)
def test_faults_are_tolerated_up_to_a_share_by_their_cause(
    sound: int, errors: list[str], is_left_out: bool
):
    if is_left_out:
        assert len(apply_fault_policy(step(sound, *errors), Tolerance())) == len(errors)
        return
    with pytest.raises(UserError, match="could not be computed") as caught:
        apply_fault_policy(step(sound, *errors), Tolerance())
    key = "max_outside_share" if AWAY in errors else "max_fault_share"
    assert key in caught.value.fix
