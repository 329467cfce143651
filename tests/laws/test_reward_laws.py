"""Laws of scores: a sum is the sum of its parts, and a fault never turns into a number."""

import asyncio
from decimal import Decimal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from luyen.base.records import Score
from luyen.rewards.calls import outcome_of
from luyen.rewards.metrics import score_metrics
from luyen.rewards.rules.answers import choice, exact, gsm8k, last_number, numeric
from luyen.rewards.rules.format import json_valid
from luyen.rewards.rules.length import length, overlong
from luyen.rewards.scoring import score_all
from luyen.rewards.tree import total, with_part
from tests.unit.rewards.builders import answer, group, prompt

NUMBERS = st.floats(-1e6, 1e6)
PARTS = st.lists(
    st.builds(
        Score,
        name=st.sampled_from("abc"),
        value=NUMBERS | st.none(),
        weight=NUMBERS,
        error=st.just("fault"),
    ),
    min_size=1,
    max_size=5,
)


@given(PARTS)
def test_a_total_is_the_weighted_sum_of_its_parts_or_a_fault(parts):
    score = total(parts)
    assert score.parts == tuple(parts)
    if any(part.value is None for part in parts):
        assert score.value is None
        assert score.error
    else:
        expected = sum(Decimal(p.weight) * Decimal(p.value) for p in parts)
        assert score.value == pytest.approx(float(expected), rel=1e-9, abs=1e-3)


@given(PARTS, NUMBERS)
def test_another_part_moves_a_total_by_its_value_and_never_hides_a_fault(parts, value):
    before, after = total(parts), with_part(total(parts), Score(name="more", value=value))
    if before.value is None:
        assert after.value is None
    else:
        assert after.value == pytest.approx(before.value + value, rel=1e-9, abs=1e-3)


@given(st.text())
def test_every_rule_judges_any_text_between_its_bounds(text):
    for rule, truth in ((exact, "12"), (numeric, "12"), (gsm8k, "12"), (choice, "A")):
        assert rule(prompt(truth), answer(text)) in (0.0, 1.0)
    assert json_valid(prompt(), answer(text)) in (0.0, 1.0)


@given(st.text())
def test_a_truth_is_its_own_answer(text):
    assert exact(prompt(text), answer(text)) == 1.0


@given(st.decimals(allow_nan=False, allow_infinity=False, places=3), st.booleans())
def test_a_number_is_found_however_it_is_written(number, with_commas):
    written = f"{number:,}" if with_commas else f"{number:f}"
    assert last_number(f"it is {written}.") == number
    assert numeric(prompt(str(number)), answer(f"it is {written}.")) == 1.0
    assert gsm8k(prompt(str(number)), answer(f"#### {written}")) == 1.0


@given(st.integers(1, 50), st.integers(0, 60), st.data())
def test_penalties_are_never_positive_and_fall_with_length(most, tokens, data):
    buffer = data.draw(st.integers(1, most))
    hparams = {"buffer": buffer, "penalty_factor": 1.5, "max_response_length": most}

    def penalties(count):
        short = answer("", length=count)
        linear = length(prompt(), short, max_response_length=most)
        return overlong(prompt(), short, **hparams), linear

    here, further = penalties(tokens), penalties(tokens + 1)
    assert all(0 >= a >= b for a, b in zip(here, further, strict=True))
    assert penalties(most) == (pytest.approx(-1.5), -1.0)
    assert penalties(most - buffer)[0] == 0.0


@given(st.floats() | st.integers() | st.text() | st.none() | st.lists(st.floats()))
def test_what_is_returned_is_finite_or_refused(returned):
    outcome = outcome_of(returned, seconds=0.0)
    assert (outcome.numbers is None) != (outcome.refused is None)
    if outcome.numbers is not None:
        assert abs(outcome.numbers["score"]) < float("inf")


class Faulty:
    """Gives the number written in the answer, and a fault where there is none."""

    names = ("score",)

    async def __call__(self, prompt, rollouts):
        await asyncio.sleep(0)
        values = [float(r.text) if r.text else None for r in rollouts]
        return [Score(name="reward", value=v, error=None if v else "empty") for v in values]


@settings(deadline=None)
@given(
    st.lists(st.lists(st.sampled_from(["", "1", "2"]), max_size=3), max_size=6), st.integers(1, 4)
)
def test_a_step_keeps_order_and_counts_faults_whatever_the_limit(texts, num_workers):
    groups = [group(prompt(), *row, draw=i) for i, row in enumerate(texts)]
    done = asyncio.run(score_all(Faulty(), groups, num_workers=num_workers))
    expected = [[float(text) if text else None for text in row] for row in texts]
    assert [[score.value for score in one.scores] for one in done] == expected
    empty = sum(text == "" for row in texts for text in row)
    assert score_metrics(done)["reward/faults"] == empty
