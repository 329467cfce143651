"""Which values reach a bar."""

import struct
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from luyen.base.records import lowest, reaches


@pytest.mark.parametrize(
    ("value", "bar", "does"),
    [
        (1.0, 1.0, True),
        (0.7 + 0.2 + 0.1, 1.0, True),
        (0.99, 1.0, False),
        (0.3 - 0.2 - 0.1, 0.0, True),
        (-0.001, 0.0, False),
        (0.0, 1e-9, False),
        (-1.1, -1.0, False),
        (-5.0, -inf, True),
        (1e300, inf, False),
    ],
)
def test_rounding_does_not_decide(value: float, bar: float, does: bool):
    assert reaches(value, bar) is does


@given(st.floats(-1e6, 1e6), st.floats(-1e6, 1e6))
def test_more_never_reaches_less(value: float, bar: float):
    assert reaches(bar, bar)
    assert not reaches(value, bar) or reaches(value + 1.0, bar)
    assert reaches(value, bar) == (value >= lowest(bar))


@given(st.floats(1e-3, 1e6))
def test_single_precision_is_enough(bar: float):
    assert reaches(struct.unpack("f", struct.pack("f", bar))[0], bar)
