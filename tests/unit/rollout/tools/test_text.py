"""Results as text: any value, any length, nothing that a tokenizer refuses."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from luyen.rollout.tools.protocol import TRUNCATION_MARK, Side, as_text, truncate_text

SIDES = st.sampled_from(["left", "middle", "right"])


@given(text=st.text(st.characters(exclude_categories=[])), most=st.integers(1, 40), side=SIDES)
def test_a_result_can_be_encoded_and_keeps_to_its_length(text: str, most: int, side: Side):
    found = truncate_text(text, most=most, side=side)
    found.encode()
    if len(text) <= most:
        assert TRUNCATION_MARK in text or TRUNCATION_MARK not in found
    else:
        assert TRUNCATION_MARK in found
        assert len(found) <= most + len(f"...{TRUNCATION_MARK}...")


@given(text=st.text(st.characters(codec="utf-8"), min_size=11), side=SIDES)
def test_what_is_kept_are_the_ends_of_the_text(text: str, side: Side):
    found = truncate_text(text, most=10, side=side)
    head, tail = {"left": (10, 0), "middle": (5, 5), "right": (0, 10)}[side]
    assert found.startswith(text[:head])
    assert found.endswith(text[len(text) - tail :])


@given(text=st.text(st.characters(codec="utf-8")))
def test_short_text_is_left_alone(text: str):
    assert truncate_text(text, most=len(text), side="middle") == text


def test_bytes_that_are_no_text_are_replaced_and_huge_ones_are_cut_first():
    assert as_text(b"ok \xff\xfe") == "ok \ufffd\ufffd"
    huge = b"\xf0\x9f\x99\x82" * 25_000_000
    text = as_text(huge)
    assert len(text) < 3_000_000
    assert truncate_text(text, most=4, side="middle") == f"🙂🙂...{TRUNCATION_MARK}...🙂🙂"


def test_a_string_of_100_mb_is_not_copied():
    huge = "x" * 100_000_000
    assert as_text(huge) is huge
    assert truncate_text(huge, most=4, side="right") == f"{TRUNCATION_MARK}...xxxx"


def test_lone_surrogates_are_replaced_and_pairs_joined():
    assert truncate_text("a\ud800b", most=9, side="left") == "a\ufffdb"
    assert truncate_text("\ud83d\ude42", most=9, side="left") == "🙂"


def test_values_without_a_json_form_are_refused():
    loop: list[object] = []
    loop.append(loop)
    for value in (object(), loop, {"a": object()}):
        with pytest.raises(TypeError, match="no JSON form"):
            as_text(value)
    assert as_text({"when": float("inf"), "set": {1}}) == '{"when": Infinity, "set": [1]}'


def test_an_iterator_without_end_is_no_result():
    assert as_text(iter([1, (2, 3)])) == "[1, [2, 3]]"
    for endless in (itertools.repeat(0), {"found": [itertools.count()]}, iter([itertools.count()])):
        with pytest.raises(TypeError, match="no text"):
            as_text(endless)
