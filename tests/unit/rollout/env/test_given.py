"""What worlds hand over: rewards are finite numbers, lines are texts."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from luyen.rollout.env.protocol import number_or_none, text_or_none, with_text


@given(st.floats() | st.integers(-(10**9), 10**9) | st.booleans())
def test_a_number_is_kept_and_what_is_not_finite_is_refused(value):
    if math.isfinite(value):
        assert number_or_none(value, "it") == float(value)
    else:
        with pytest.raises(TypeError, match="it gave"):
            number_or_none(value, "it")


def test_numbers_of_other_packages_count():
    assert number_or_none(np.float32(0.5), "it") == 0.5
    assert number_or_none(torch.tensor(2), "it") == 2.0
    assert number_or_none(None, "it") is None


@pytest.mark.parametrize("value", ["1.0", b"1", [1.0], {"score": 1.0}, object()])
def test_what_is_no_number_is_refused(value):
    with pytest.raises(TypeError, match="a reward is a finite number"):
        number_or_none(value, "it")


@pytest.mark.parametrize("value", [1, ["a"], b"a"])
def test_what_is_no_text_is_refused(value):
    with pytest.raises(TypeError, match="must give a text"):
        text_or_none(value, "it")


def test_more_is_said_in_the_last_message_of_the_user_or_in_a_new_one():
    user = {"role": "user", "content": "a", "name": "x"}
    system = {"role": "system", "content": "s"}
    parts = {"role": "user", "content": [{"type": "text", "text": "a"}]}
    said = {"role": "user", "content": "b"}
    assert with_text([system, user], "b") == (system, {**user, "content": "a\n\nb"})
    assert with_text([user, system], "b") == (user, system, said)
    assert with_text([parts], "b") == (parts, said), "parts are left alone"
    assert with_text([], "b") == (said,)
