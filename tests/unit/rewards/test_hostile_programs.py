"""Answers that attack the rule `code`: each has a score, none is a fault, nothing is dropped."""

from luyen.rewards.rules.all import rule_rewards
from tests.unit.rewards.builders import config, prompt, scores
from tests.unit.sandbox.test_forged_verdicts import FORGERIES


def test_every_hostile_answer_is_a_wrong_answer():
    settings = config(
        components={"code": {"rule": "code", "kwargs": {"credit": "share", "cpu_s": 3}}},
        num_workers=2,
        timeout_s=60.0,
    )
    asked = prompt(["assert secret(7) == 8675309", "assert False"], "mine")
    right = "def secret(x): return 8675309"
    found = scores(settings, asked, right, *FORGERIES.values())
    assert [score.error for score in found] == [None] * (1 + len(FORGERIES))
    assert [score.value for score in found] == [0.5] + [0.0] * len(FORGERIES)


def test_what_makes_the_judge_run_out_of_time_is_a_wrong_answer():
    assert rule_rewards.facts("code")["wrong"] == 0.0
