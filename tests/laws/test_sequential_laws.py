"""Laws of the sequential test of a mean: fair evidence, rare errors, differences are found."""

import math
import random
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from luyen.algorithms.sequential_test import MeanTest


def run(values: list[float], bound: float = 0.0) -> MeanTest:
    test = MeanTest(bound=bound)
    for value in values:
        test = test.observe(value)
    return test


@given(
    st.floats(-0.9, 0.9),
    st.floats(0.01, 1.0),
    st.floats(0.01, 1.0),
    st.integers(1, 5),
)
def test_the_expected_evidence_of_a_true_claim_is_at_most_one(
    bound: float, up: float, down: float, count: int
):
    """Exact expectation over all paths of a two-point distribution whose mean is the bound."""
    high, low = min(1.0, bound + up), max(-1.0, bound - down)
    chance = (bound - low) / (high - low)
    total = 0.0
    for path in product((True, False), repeat=count):
        weight = math.prod(chance if is_high else 1 - chance for is_high in path)
        evidence = run([high if is_high else low for is_high in path], bound).log_evidence
        total += weight * math.exp(evidence)
    assert total == pytest.approx(1.0, abs=1e-9)


@given(st.lists(st.floats(-1, 1), max_size=50), st.floats(-0.5, 0.5))
def test_a_larger_bound_leaves_less_evidence(values: list[float], bound: float):
    # Not a law of one stake alone: the largest stake shrinks with the bound.
    assert run(values, bound).count == len(values)
    grown = run([min(1.0, value + 0.25) for value in values], bound)
    assert grown.log_evidence >= run(values, bound).log_evidence - 1e-12


@given(st.lists(st.floats(-1, 1), max_size=30), st.randoms(use_true_random=False))
def test_the_order_of_values_does_not_matter(values: list[float], mixed: random.Random):
    shuffled = mixed.sample(values, len(values))
    assert run(shuffled).log_evidence == pytest.approx(run(values).log_evidence, abs=1e-9)


def share_refuted(mean: float, *, runs: int = 100, count: int = 250, alpha: float = 0.05) -> float:
    """Share of runs that ever refute "the mean is at most 0", with differences of coin tosses."""
    source, refuted = random.Random(0), 0
    for _ in range(runs):
        test = MeanTest(bound=0.0)
        for _ in range(count):
            better = source.random() < 0.5 + mean / 2
            worse = source.random() < 0.5 - mean / 2
            test = test.observe(float(better) - float(worse))
            if test.is_significant(alpha):
                refuted += 1
                break
    return refuted / runs


def test_errors_are_rarer_than_promised_however_often_one_looks():
    assert share_refuted(0.0) <= 0.05


def test_a_difference_is_found():
    assert share_refuted(0.4, runs=40) >= 0.95


@pytest.mark.parametrize("value", [1.5, -2.0, math.nan])
def test_values_outside_are_refused(value: float):
    with pytest.raises(ValueError, match="from -1 to 1"):
        MeanTest(bound=0.0).observe(value)
