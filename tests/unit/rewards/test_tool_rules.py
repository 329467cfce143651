"""How well tools were used, by hand, and what every such rule guarantees."""

from math import fsum

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from luyen.base.records import CallStatus, ToolCall
from luyen.rewards.rules.rule import Unscorable
from tests.unit.rewards.conversations import call, conversation, judged

MIXED = (
    call(turn=0),
    call(turn=0, status="malformed"),
    call(turn=1, status="failed"),
    call(turn=2, status="refused"),
    call(turn=2, status="invalid arguments"),
    call(turn=2, status="unknown tool"),
    call(turn=2, status="timed out"),
    call(turn=2),
)


def test_the_share_of_valid_calls_belongs_to_the_turns_that_wrote_them():
    score = judged("tool_valid", conversation(*MIXED))
    assert score.value == 5 / 8
    assert score.by_turn == ((0, 1 / 8), (1, 1 / 8), (2, 3 / 8))


def test_the_share_of_successes_is_among_calls_that_ran():
    score = judged("tool_success", conversation(*MIXED))
    assert score.value == 2 / 4
    assert score.by_turn == ((0, 1 / 4), (2, 1 / 4))


@pytest.mark.parametrize("rule", ["tool_valid", "tool_success", "given"])
def test_doing_nothing_gets_what_without_says(rule: str):
    assert judged(rule, conversation()).value == 0.0
    score = judged(rule, conversation(), without=-1.0)
    assert (score.value, score.by_turn) == (-1.0, ())


def test_doing_nothing_is_no_better_than_one_wrong_call():
    wrong = conversation(call(status="malformed"))
    for rule in ("tool_valid", "tool_success"):
        assert judged(rule, conversation()).value <= judged(rule, wrong).value


def test_a_call_is_needless_when_the_same_was_settled_before():
    calls = (
        call("a", turn=0, arguments={"x": 1, "y": [2]}),
        call("a", turn=1, arguments={"y": [2], "x": 1}),  # the order of keys is no difference
        call("b", turn=1, arguments={"x": 1, "y": [2]}),
        call("a", turn=1, arguments={"x": "1", "y": [2]}),
        call("c", turn=2, status="invalid arguments"),
        call("c", turn=2, status="invalid arguments"),
    )
    score = judged("tool_needless", conversation(*calls))
    assert score.flat() == {
        "tool_needless": -2.0,
        "tool_needless/repeated": -2.0,
        "tool_needless/beyond": 0.0,
    }
    assert score.parts[0].by_turn == ((1, -1.0), (2, -1.0))


@pytest.mark.parametrize("status", ["failed", "timed out", "refused"])
def test_what_did_not_come_through_may_be_tried_again(status: str):
    again = conversation(call(status=status), call(status=status), call())
    assert judged("tool_needless", again).value == 0.0


def test_a_call_counts_once_as_repeated_or_as_beyond():
    calls = [call("a", turn=0), call("a", turn=0), call("b", turn=1), call("c", turn=2)]
    score = judged("tool_needless", conversation(*calls), allowed=2)
    assert [(p.name, p.value, p.by_turn) for p in score.parts] == [
        ("repeated", -1.0, ((0, -1.0),)),
        ("beyond", -1.0, ((2, -1.0),)),
    ]
    assert judged("tool_needless", conversation(*calls), allowed=0).value == -4.0
    assert judged("tool_needless", conversation(*calls)).value == -1.0


def test_a_call_costs_its_price_its_seconds_and_what_is_read():
    calls = (
        call("search", turn=0, seconds=2.0, result="four"),
        call("calc", turn=1, seconds=1.0, result="42"),
        call("calc", turn=1, status="malformed", result="what?"),
    )
    score = judged(
        "tool_cost",
        conversation(*calls),
        per_call=0.5,
        per_second=0.25,
        per_character=0.125,
        prices={"search": 3.0},
    )
    assert score.flat() == {
        "tool_cost": -(3.5 + 0.75 + 11 / 8),
        "tool_cost/calls": -3.5,
        "tool_cost/seconds": -0.75,
        "tool_cost/characters": -11 / 8,
    }
    assert score.parts[0].by_turn == ((0, -3.0), (1, -0.5))
    assert score.parts[2].by_turn == ((0, -0.5), (1, -7 / 8))


def test_given_rewards_keep_their_turns():
    score = judged("given", conversation(given=((0, 0.5), (2, 1.0), (2, -0.25))))
    assert score.value == 1.25
    assert score.by_turn == ((0, 0.5), (2, 0.75))


def test_a_given_reward_that_is_not_finite_is_a_fault_of_that_rollout():
    with pytest.raises(Unscorable, match="not finite"):
        judged("given", conversation(given=((0, float("nan")),)))


CALLS = st.lists(
    st.builds(
        ToolCall,
        turn=st.integers(0, 3),
        name=st.sampled_from(["a", "b", ""]),
        arguments=st.dictionaries(st.sampled_from("xy"), st.integers(0, 1), max_size=2),
        status=st.sampled_from(CallStatus),
        result=st.text(max_size=5),
        seconds=st.floats(0, 9),
    ),
    max_size=8,
)


@pytest.mark.parametrize(
    "rule", ["tool_valid", "tool_success", "tool_needless", "tool_cost", "tool_safety"]
)
@given(calls=CALLS)
@settings(max_examples=40, deadline=None)
def test_the_turns_of_a_leaf_add_up_to_it_and_leaves_to_the_whole(rule: str, calls: list[ToolCall]):
    hparams = {
        "tool_cost": {"per_second": 0.3, "per_character": 0.1},
        "tool_needless": {"allowed": 3},
        "tool_safety": {"forbidden_tools": ["a"], "forbidden_arguments": {"b": "1"}},
    }
    score = judged(rule, conversation(*calls, text=""), **hparams.get(rule, {}))
    leaves = score.parts or (score,)
    for leaf in leaves:
        assert fsum(share for _, share in leaf.by_turn) == pytest.approx(leaf.value, abs=1e-12)
    assert fsum(leaf.value for leaf in leaves) == pytest.approx(score.value, abs=1e-12)
    if rule in ("tool_valid", "tool_success"):
        assert 0.0 <= score.value <= 1.0
    else:
        assert score.value <= 0.0
