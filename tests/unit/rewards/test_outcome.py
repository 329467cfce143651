"""What counts as a score, and what becomes of everything else."""

from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest

from luyen.base.boundary import boundary
from luyen.rewards.calls import fault_of, outcome_of
from luyen.rewards.rules.rule import Unscorable


@pytest.mark.parametrize(
    ("returned", "numbers"),
    [
        (1, {"score": 1.0}),
        (True, {"score": 1.0}),
        (0.5, {"score": 0.5}),
        (Fraction(1, 4), {"score": 0.25}),
        (Decimal("0.5"), {"score": 0.5}),
        (np.float32(0.5), {"score": 0.5}),
        (np.bool_(True), {"score": 1.0}),
        ({"score": 1}, {"score": 1.0}),
        ({"score": 0, "acc": True, "pred": "42"}, {"score": 0.0, "acc": 1.0}),
    ],
)
def test_numbers_are_taken(returned, numbers):
    assert outcome_of(returned, seconds=0.0).numbers == numbers


@pytest.mark.parametrize(
    "returned",
    [
        None,
        "1.0",
        [1.0],
        float("nan"),
        float("inf"),
        10**400,
        [10**5000],
        1j,
        {},
        {"acc": 1.0},
        {"score": None},
        {"score": "1"},
        {"score": 1.0, "acc": None},
        {"score": 1.0, "acc": float("nan")},
        {"score": 1.0, "parts": [1.0]},
        np.zeros(2),
    ],
)
def test_anything_else_is_refused_and_shown(returned):
    outcome = outcome_of(returned, seconds=0.0)
    assert outcome.numbers is None
    assert outcome.refused
    assert len(outcome.refused) < 250


def test_a_fault_is_the_last_line_of_its_traceback():
    faults: list[BaseException] = []
    with boundary(faults):
        1 / 0  # noqa: B018
    with boundary(faults):
        raise Unscorable("no ground truth")
    with boundary(faults):
        raise ValueError("first\nsecond")
    zero, unscorable, two_lines = (fault_of([fault]) for fault in faults)
    assert (zero.error or "").startswith("ZeroDivisionError: division by zero (test_outcome.py:")
    assert (unscorable.error, unscorable.is_unscorable) == ("no ground truth", True)
    assert (two_lines.error or "").startswith("ValueError: first (")
