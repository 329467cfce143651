"""Cosine rewards for length, and penalties for repetition; values by hand."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from luyen.base.records import Branch, Source
from luyen.rewards.rules.length import cosine, repetition
from luyen.rewards.rules.rule import Unscorable
from tests.unit.rewards.builders import answer, config, prompt, rollout, scores


@pytest.mark.parametrize(
    ("length", "value"),
    [(0, 2.0), (4, 1.5 + 0.5 * math.sqrt(0.5)), (8, 1.5), (16, 1.0), (20, 1.0)],
)
def test_cosine_goes_from_one_end_to_the_other(length, value):
    asked = answer("x", length=length)
    found = cosine(prompt(), asked, at_zero=2.0, at_limit=1.0, max_response_length=16)
    assert found == pytest.approx(value)


def test_an_answer_that_was_cut_has_a_value_of_its_own():
    hparams = {"at_zero": 2.0, "at_limit": 1.0, "when_cut": -10.0, "max_response_length": 16}
    assert cosine(prompt(), answer("x", length=16), **hparams) == -10.0
    assert cosine(prompt(), answer("x", length=15), **hparams) > 1.0


@given(st.floats(-9, 9), st.floats(-9, 9), st.integers(0, 64), st.integers(0, 64))
def test_cosine_is_monotone_and_stays_between_its_ends(at_zero, at_limit, one, other):
    short, long = (
        cosine(
            prompt(),
            answer("x", length=length),
            at_zero=at_zero,
            at_limit=at_limit,
            max_response_length=64,
        )
        for length in sorted((one, other))
    )
    low, high = sorted((at_zero, at_limit))
    assert low - 1e-9 <= min(short, long) <= max(short, long) <= high + 1e-9
    assert (long - short) * (at_limit - at_zero) >= -1e-9


def test_cosine_needs_a_limit():
    with pytest.raises(Unscorable, match="max_response_length is not set"):
        cosine(prompt(), answer("x"))


def test_the_tree_of_the_paper_rewards_brief_when_right_and_long_when_wrong():
    parts = {
        "right": {"rule": "exact", "weight": 0.0},
        "brief": {
            "rule": "cosine",
            "kwargs": {"at_zero": 2.0, "at_limit": 1.0},
            "gate": {"by": "right"},
        },
        "tried": {
            "rule": "cosine",
            "kwargs": {"at_zero": -10.0, "at_limit": 0.0},
            "gate": {"by": "right", "below": 1.0},
        },
    }
    right, wrong = scores(config(components=parts), prompt("12"), "12", "13", longest=8)
    assert right.value == pytest.approx(1.5)
    assert wrong.value == pytest.approx(-5.0)


def talk(tokens: list[int], marks: str):
    sources = tuple(Source.SAMPLED if m == "s" else Source.TOOL for m in marks)
    logps = tuple(-0.5 if m == "s" else None for m in marks)
    versions = tuple(0 if m == "s" else None for m in marks)
    streams = {"tokens": tuple(tokens), "sources": sources, "turns": (0,) * len(tokens)}
    return {**streams, "logps": logps, "versions": versions}


@pytest.mark.parametrize(
    ("tokens", "marks", "ngram", "value"),
    [
        ([1, 2, 3, 4], "ssss", 2, 0.0),
        ([1, 2, 1, 2, 1], "sssss", 2, -0.5),  # 12 21 12 21
        ([7] * 11, "s" * 11, 2, -0.9),
        ([1, 1, 1], "sss", 4, 0.0),  # no n-gram at all
        ([1, 2, 9, 9, 9, 1, 2], "sstttss", 2, -0.5),  # the tool's words are not the policy's
        ([1, 2, 9, 1, 3], "sstss", 2, 0.0),  # none reaches over the tool's word
    ],
)
def test_repetition_of_tokens(tokens, marks, ngram, value):
    one = replace(rollout(""), **talk(tokens, marks))
    assert repetition(prompt(), one, ngram=ngram) == pytest.approx(value)


def test_repetition_counts_earlier_branches():
    before = Branch(**talk([1, 2], "ss"))
    one = replace(rollout(""), **talk([1, 2], "ss"), earlier=(before,))
    assert repetition(prompt(), one, ngram=2) == -0.5


def test_repetition_of_words():
    one = rollout("To be or not to be")
    assert repetition(prompt(), one, ngram=2, unit="word") == pytest.approx(-1 / 5)
    assert repetition(prompt(), rollout(""), unit="word") == 0.0


def test_repetition_refuses_knobs_that_mean_nothing():
    with pytest.raises(Unscorable, match="at least one token"):
        repetition(prompt(), rollout("a"), ngram=0)
    with pytest.raises(Unscorable, match="neither token nor word"):
        repetition(prompt(), rollout("a"), unit="letter")  # type: ignore[arg-type]
