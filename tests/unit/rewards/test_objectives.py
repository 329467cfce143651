"""Trade-offs between components: fronts, correlations, and the numbers of a step."""

from math import sqrt
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from luyen.base.records import Score
from luyen.rewards.metrics import correlation, objectives, score_metrics, surpasses
from luyen.telemetry import spans
from luyen.telemetry.metrics import CATALOG
from luyen.train import metric_names
from tests.unit.rewards import tree_rules
from tests.unit.rewards.builders import config, group, prompt, scored

DECLARED = metric_names, spans
"""Importing them declares the metrics of the loop."""
SMALL = st.floats(-100, 100)


def number(column: int, **keys: Any) -> dict[str, Any]:
    assert tree_rules.SEEN is not None
    return {"rule": "test_number", "kwargs": {"column": column}, **keys}


def judged(*texts: str, components: dict[str, Any] | None = None, **keys: Any):
    parts = components or {"a": number(0), "b": number(1)}
    return scored(config(components=parts, **keys), [group(prompt("", "mine"), *texts)])


def test_the_front_holds_what_nobody_surpasses():
    found = objectives(judged("1 0", "0 1", "0 0", "1 0"))
    assert found.front == 0.75
    assert objectives(judged("1 1", "0 1", "0 0")).front == pytest.approx(1 / 3)


def test_a_negative_weight_turns_a_component_around():
    parts = {"a": number(0), "cost": number(1, weight=-1.0)}
    found = objectives(judged("1 9", "1 3", components=parts))
    assert found.front == 0.5
    assert found.means == {"a": 1.0, "cost": -6.0}


def test_nothing_is_compared_without_two_rollouts_and_two_objectives():
    assert objectives(judged("1 0")).front is None
    assert objectives(judged("1 0", "0 1", components={"a": number(0)})).front is None
    shown = {"a": number(0), "b": number(1, weight=0.0)}
    assert objectives(judged("1 0", "0 1", components=shown)).metrics() == {}
    assert objectives([]).metrics() == {}


def test_correlations_by_hand():
    done = judged("1 2", "2 0", "3 1")
    found = objectives(done)
    assert found.with_other == {("a", "b"): -0.5}
    # totals 3, 2, 4: less their mean 0, -1, 1
    assert found.with_total["a"] == pytest.approx(0.5)
    assert found.with_total["b"] == pytest.approx(1 / 2)
    metrics = score_metrics(done)
    assert metrics["reward/conflict"] == -0.5
    assert metrics["reward/a/correlation"] == pytest.approx(0.5)
    assert not CATALOG.missing(metrics)


@given(st.lists(st.tuples(SMALL, SMALL), min_size=2, max_size=20))
def test_a_correlation_lies_between_minus_1_and_1_and_knows_no_order(pairs):
    found = correlation(pairs)
    assert found is None or -1.0 <= found <= 1.0
    assert correlation([(b, a) for a, b in pairs]) == found
    assert correlation(pairs[::-1]) == found


@given(st.lists(st.integers(-9, 9), min_size=2, max_size=9))
def test_a_line_correlates_fully(xs):
    found = correlation([(float(x), 3.0 * x - 2.0) for x in xs])
    assert found is None if len(set(xs)) == 1 else found == pytest.approx(1.0)


@given(*[st.fixed_dictionaries({"a": SMALL, "b": SMALL})] * 3)
def test_surpassing_is_a_strict_order(one, two, three):
    assert not surpasses(one, one)
    assert not (surpasses(one, two) and surpasses(two, one))
    if surpasses(one, two) and surpasses(two, three):
        assert surpasses(one, three)


def test_metrics_tell_what_was_judged_and_what_was_gated():
    parts = {
        "a": number(0, scale=2.0),
        "b": number(1, gate={"by": "a", "at_least": 2.0}),
    }
    metrics = score_metrics(judged("1 4", "0 9", components=parts))
    assert metrics["reward/a/mean"] == 1.0
    assert metrics["reward/a/raw_mean"] == 0.5
    assert metrics["reward/b/mean"] == 2.0
    assert metrics["reward/b/gated_fraction"] == 0.5
    assert "reward/a/gated_fraction" not in metrics
    assert metrics["time/reward/b"] >= 0
    assert not CATALOG.missing(metrics)


def test_objectives_are_as_judged_whatever_was_made_of_them():
    plain = judged("1 2", "2 0", "3 1")
    normal = judged("1 2", "2 0", "3 1", combine="gdpo")
    assert objectives(plain).means == objectives(normal).means == {"a": 2.0, "b": 1.0}
    assert objectives(plain).with_other == objectives(normal).with_other
    assert isinstance(normal[0].scores[0], Score)
    assert normal[0].scores[0].value == pytest.approx(-1 / sqrt(1.0) + 1.0, abs=1e-5)


def test_a_negative_scale_turns_a_component_around_like_a_negative_weight():
    ways = [{"weight": -1.0}, {"scale": -1.0}, {"scale": -2.0, "shift": 18.0}]
    for keys in ways:
        parts = {"a": number(0), "cost": number(1, **keys)}
        found = objectives(judged("1 9", "1 3", "2 6", components=parts))
        assert found.front == pytest.approx(2 / 3)
        assert found.means["cost"] == -6.0
    both = {"a": number(0), "cost": number(1, weight=-1.0, scale=-1.0)}
    assert objectives(judged("1 9", "1 3", components=both)).means["cost"] == 6.0
