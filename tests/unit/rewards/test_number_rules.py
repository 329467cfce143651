"""Rules about numbers and lengths: values worked out by hand."""

from decimal import Decimal

import pytest

from luyen.rewards.rules.answers import gsm8k, last_number, numeric
from luyen.rewards.rules.length import length, overlong
from luyen.rewards.rules.rule import Unscorable
from tests.unit.rewards.builders import answer, prompt


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("", None),
        ("no digits: ١٢ and \uff11\uff12", None),
        ("-5", "-5"),
        ("\u22125", "-5"),
        ("3-5", "5"),
        ("x=-5", "-5"),
        ("f(2)-5", "5"),
        ("$1,234,567.89.", "1234567.89"),
        ("1,2,3", "3"),
        ("12,34", "34"),
        (".5 and 1.", "1"),
        ("6.02e23", "6.02E+23"),
        ("v1.2.3", "0.3"),
        ("1e99999999999999999999999", None),
        ("9" * 20_000, None),
    ],
)
def test_the_last_number_is_found_as_people_write_it(text, number):
    assert last_number(text) == (None if number is None else Decimal(number))


@pytest.mark.parametrize(
    ("text", "truth", "tolerance", "value"),
    [
        ("4 + 8 = 12", "12", 0.0, 1.0),
        ("12 is not 13", "12", 0.0, 0.0),
        ("12.0", 12, 0.0, 1.0),
        ("1,200", "1200", 0.0, 1.0),
        ("0.3333", "0.333", 0.0, 0.0),
        ("0.3333", "0.333", 0.001, 1.0),
        ("-7", "7", 0.0, 0.0),
        ("", "0", 0.0, 0.0),
        ("zero", "0", 0.0, 0.0),
        ("1" * 5_000, "1" * 5_000, 0.0, 1.0),
        ("1" * 5_000, "1" * 4_999 + "2", 0.0, 0.0),
        ("1e400000", "1", 1.0, 0.0),
        ("0.1", 0.1, 0.0, 1.0),
        ("5", ["4", "5"], 0.0, 1.0),
    ],
)
def test_numeric_judges_the_last_number(text, truth, tolerance, value):
    assert numeric(prompt(truth), answer(text), tolerance=tolerance) == value


def test_a_truth_that_is_no_number_cannot_judge():
    with pytest.raises(Unscorable, match="'twelve' is not a number"):
        numeric(prompt("twelve"), answer("12"))


@pytest.mark.parametrize(
    ("text", "strict", "flexible"),
    [
        ("so 72\n#### 72", 1.0, 1.0),
        ("#### 72", 1.0, 1.0),
        ("####72", 1.0, 1.0),
        ("#### $72.00", 1.0, 1.0),
        ("#### 72 apples, 3 pears", 1.0, 0.0),
        ("#### **72**", 1.0, 1.0),
        ("The answer is 72", 0.0, 1.0),
        ("#### 71\n#### 72", 1.0, 1.0),
        ("#### 72\n#### 71", 0.0, 0.0),
        ("#### 72\n####", 0.0, 1.0),
        ("#### -72", 0.0, 0.0),
        ("#### seventy-two", 0.0, 0.0),
        ("####", 0.0, 0.0),
        ("", 0.0, 0.0),
        ("#### \n72", 0.0, 1.0),
        ("#### ٧٢", 0.0, 0.0),
        ("#### " + "9" * 50_000, 0.0, 0.0),
    ],
)
def test_gsm8k_reads_what_follows_the_last_mark(text, strict, flexible):
    asked = prompt("6 * 12 = 72\n#### 72")
    assert gsm8k(asked, answer(text)) == strict
    assert gsm8k(asked, answer(text), method="flexible") == flexible


def test_gsm8k_reads_thousands_and_plain_truths():
    assert gsm8k(prompt("1,072"), answer("#### 1072")) == 1.0
    assert gsm8k(prompt(1072), answer("#### 1,072")) == 1.0


def test_gsm8k_pays_for_the_format_if_asked():
    assert gsm8k(prompt("72"), answer("#### 71"), format_score=0.1) == 0.1
    assert gsm8k(prompt("72"), answer("71"), format_score=0.1) == 0.0


@pytest.mark.parametrize(
    ("truth", "hparams"), [("many", {}), (None, {}), ("72", {"method": "lax"})]
)
def test_gsm8k_says_when_it_cannot_judge(truth, hparams):
    with pytest.raises(Unscorable):
        gsm8k(prompt(truth), answer("#### 72"), **hparams)


@pytest.mark.parametrize(
    ("tokens", "free", "value"),
    [(0, 0, 0.0), (5, 0, -0.5), (10, 0, -1.0), (4, 5, 0.0), (6, 5, -0.2)],
)
def test_length_falls_linearly_to_minus_one(tokens, free, value):
    found = length(prompt(), answer("", length=tokens), free=free, max_response_length=10)
    assert found == pytest.approx(value, abs=1e-15)


@pytest.mark.parametrize(
    ("tokens", "value"), [(0, 0.0), (12, 0.0), (13, -0.5), (14, -1.0), (15, -1.5), (16, -2.0)]
)
def test_overlong_falls_over_the_buffer(tokens, value):
    """min(-(length - (16 - 4)) / 4 * 2, 0)."""
    hparams = {"buffer": 4, "penalty_factor": 2.0, "max_response_length": 16}
    assert overlong(prompt(), answer("", length=tokens), **hparams) == value


@pytest.mark.parametrize("hparams", [{"buffer": 4}, {"buffer": 0}, {"buffer": 17}])
def test_a_buffer_that_does_not_fit_cannot_judge(hparams):
    most = None if hparams["buffer"] == 4 else 16
    with pytest.raises(Unscorable):
        overlong(prompt(), answer(""), max_response_length=most, **hparams)
    with pytest.raises(Unscorable):
        length(prompt(), answer(""), free=16, max_response_length=16)
