"""Running normalisation: what was seen before a step decides, and a resumed run sees the same."""

import json
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from luyen.rewards.build import BuiltReward, build_reward, part_at
from luyen.rewards.running_stats import Moments
from luyen.rewards.scoring import VALIDATION, ScoredGroup, ScoreJournal
from luyen.telemetry.journal import WorkJournal
from tests.unit.rewards import tree_rules
from tests.unit.rewards.builders import config, group, prompt

NUMBERS = st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=12)
RUNNING: dict[str, Any] = {"rule": "test_number", "normalise": "running"}
STEPS = [("1", "2", "6"), ("0", "0.5", "-3"), ("2.25", "2", "1e3")]


@given(st.lists(NUMBERS, min_size=1, max_size=4))
def test_moments_are_those_of_everything_seen(steps: list[list[float]]):
    seen = Moments()
    for values in steps:
        seen = seen.after(values)
    everything = [value for values in steps for value in values]
    assert seen.count == len(everything)
    assert seen.mean == pytest.approx(fmean(everything), rel=1e-9, abs=1e-9)
    if len(everything) > 1:
        assert seen.std == pytest.approx(stdev(everything), rel=1e-6, abs=1e-6)


@given(NUMBERS, NUMBERS, st.randoms(use_true_random=False))
def test_the_order_within_a_step_changes_no_bit(before: list[float], now: list[float], random):
    shuffled = random.sample(now, len(now))
    assert Moments().after(before).after(now) == Moments().after(before).after(shuffled)


@given(NUMBERS)
def test_a_value_is_normalised_by_mean_and_spread(values: list[float]):
    seen = Moments().after(values)
    found = [seen.normalise(value) for value in values]
    assert fmean(found) == pytest.approx(0.0, abs=1e-6)
    if seen.std > 1e-6:
        assert stdev(found) == pytest.approx(1.0, rel=1e-6)


@pytest.mark.parametrize("count", [2, 3, 12, 96, 1024])
@pytest.mark.parametrize("values", [(0.1,), (0.1 + 0.2, 0.3), (1e-17, -1e-17), (1e6 / 3,)])
def test_what_rounding_leaves_is_no_spread(values: tuple[float, ...], count: int):
    seen = Moments().after([*values] * count).after([*values] * count)
    assert seen.factor == 1.0
    assert seen.normalise(values[0] + 0.5) == pytest.approx(0.5)


def build(**keys: Any) -> BuiltReward:
    assert tree_rules.SEEN is not None
    return build_reward(config(**keys), max_response_length=16)


def judge(reward: BuiltReward, *texts: str, work: ScoreJournal | None = None) -> list[ScoredGroup]:
    return reward.score([group(prompt("", "mine"), *texts)], work)


def values(done: list[ScoredGroup]) -> list[float | None]:
    return [score.value for one in done for score in one.scores]


def test_a_step_is_normalised_by_the_steps_before_it():
    with build(components={"a": {**RUNNING, "weight": 2.0}}) as reward:
        first = judge(reward, "1", "2", "6")
        assert values(first) == [2.0, 4.0, 12.0]  # nothing was seen yet
        reward.advance(first)
        second = judge(reward, "3", "9")
        spread = stdev([1.0, 2.0, 6.0])
        assert values(second) == pytest.approx([0.0, 2 * 6 / spread])
        assert [part_at(s, "a").raw for s in second[0].scores] == [3.0, 9.0]
        again = judge(reward, "3", "9")
        assert values(again) == values(second)  # judging alone counts nothing
        assert values(judge(reward, "3", work=ScoreJournal(purpose=VALIDATION))) == [6.0]


def test_what_is_counted_is_scaled_and_clipped_and_not_gated():
    parts = {
        "right": {"rule": "exact", "weight": 0.0},
        "deep": {
            "parts": {"a": {**RUNNING, "scale": 2.0, "ceiling": 5.0}},
            "gate": {"by": "right", "below": 1.0, "otherwise": -7.0},
        },
    }
    with build(components=parts) as reward:
        for _ in range(2):
            reward.advance(reward.score([group(prompt("12", "mine"), "1", "9", "12")]))
        assert reward.state()["running"]["deep/a"]["count"] == 4
        assert reward.state()["running"]["deep/a"]["mean"] == (2.0 + 5.0) / 2


def test_dapo_and_other_shells_do_not_hide_what_is_counted():
    settings = {
        "components": {"a": RUNNING, "b": RUNNING},
        "combine": "product",
        "reward_manager": {"name": "dapo"},
        "overlong_buffer": {"enable": True, "len": 4},
    }
    with build(**settings) as reward:
        reward.advance(judge(reward, "1", "3"))
        assert reward.state()["running"]["b"] == {"count": 2, "mean": 2.0, "squares": 2.0}


def test_a_resumed_run_gives_the_same_bits():
    keys = {"components": {"a": RUNNING, "b": {"rule": "test_number", "weight": 0.3}}}
    with build(**keys) as whole, build(**keys) as first, build(**keys) as second:
        expected = []
        for texts in STEPS:
            done = judge(whole, *texts)
            whole.advance(done)
            expected.append(values(done))
        first.advance(judge(first, *STEPS[0]))
        second.restore(json.loads(json.dumps(first.state())))
        found = []
        for texts in STEPS[1:]:
            done = judge(second, *texts)
            second.advance(done)
            found.append(values(done))
        assert found == expected[1:]
        assert second.state() == whole.state()


def test_a_step_that_is_taken_up_from_the_journal_counts_the_same(tmp_path: Path):
    keys = {"components": {"a": {**RUNNING, "scale": 0.1}}}
    before = {"running": {"a": {"count": 3, "mean": 0.1, "squares": 0.7}}}
    states = []
    for _ in range(2):
        journal = WorkJournal(tmp_path, run_id="r")
        journal.begin(1, kind="step", basis="same")
        with build(**keys) as reward:
            reward.restore(before)
            tree_rules.SEEN.clear()
            reward.advance(judge(reward, *STEPS[1], work=ScoreJournal(journal=journal)))
            states.append((reward.state(), len(tree_rules.SEEN)))
        journal.close()
    assert states[0] == (states[1][0], 3)
    assert states[1][1] == 0  # nothing was judged again


def test_an_empty_state_is_the_beginning():
    with build(components={"a": RUNNING}) as reward:
        reward.advance(judge(reward, "1", "3"))
        reward.restore({})
        assert reward.state() == {"running": {"a": {"count": 0, "mean": 0.0, "squares": 0.0}}}
