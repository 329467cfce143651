"""The digest of a step knows what was judged, and neither the clock nor the words of a fault."""

from dataclasses import replace

import pytest

from luyen.base.digests import hash_value
from luyen.base.records import Rollout, Score
from luyen.train.record import _rollout_score
from tests.unit.rewards.builders import rollout

PART = Score(name="brief", value=-1.0, weight=0.5, raw=-3.0)
TREE = Score(name="reward", value=-0.5, parts=(PART,))


def digest(score: Score) -> str:
    judged: Rollout = replace(rollout("x"), score=score)
    return hash_value(_rollout_score(judged))


def test_time_and_words_change_nothing():
    slow = replace(TREE, parts=(replace(PART, seconds=9.0),), seconds=1.0)
    assert digest(slow) == digest(TREE)
    lost = Score(name="reward", value=None, error="one")
    assert digest(replace(lost, error="two")) == digest(lost)


@pytest.mark.parametrize(
    "change", [{"raw": -2.0}, {"raw": None}, {"gated": True}, {"combine": "min"}, {"value": -2.0}]
)
def test_what_was_judged_and_made_of_it_counts(change):
    assert digest(replace(TREE, parts=(replace(PART, **change),))) != digest(TREE)


def test_a_plain_tree_is_told_as_before_there_was_more_to_tell():
    plain = Score(name="reward", value=1.0, parts=(Score(name="right", value=1.0),))
    step_report = ["reward", 1.0, 1.0, [["right", 1.0, 1.0, [], False, ()]], False, ()]
    judged = replace(rollout("x"), score=plain)
    assert _rollout_score(judged) == [*judged.key, step_report, ()]
