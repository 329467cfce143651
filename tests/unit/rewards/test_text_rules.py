"""Rules that compare text: values worked out by hand, answers that try to break them."""

import pytest

from luyen.rewards.rules.answers import choice, exact
from luyen.rewards.rules.format import json_valid, regex
from luyen.rewards.rules.rule import Unscorable
from tests.unit.rewards.builders import answer, prompt


@pytest.mark.parametrize(
    ("text", "truth", "hparams", "value"),
    [
        ("12", "12", {}, 1.0),
        (" 12\n", "12", {}, 1.0),
        (" 12", "12", {"strip": False}, 0.0),
        ("", "12", {}, 0.0),
        ("", "", {}, 1.0),
        ("\uff11\uff12", "12", {}, 0.0),
        ("Straße", "STRASSE", {"ignore_case": True}, 1.0),
        ("yes", "Yes", {}, 0.0),
        ("b", ["a", "b"], {}, 1.0),
        ("c", ["a", "b"], {}, 0.0),
        ("12", 12, {}, 1.0),
        ("12" * 100_000, "12", {}, 0.0),
    ],
)
def test_exact_compares_letter_for_letter(text, truth, hparams, value):
    assert exact(prompt(truth), answer(text), **hparams) == value


@pytest.mark.parametrize("truth", [None, []])
def test_a_row_without_a_truth_cannot_be_judged(truth):
    with pytest.raises(Unscorable, match="ground truth"):
        exact(prompt(truth), answer("12"))


@pytest.mark.parametrize(
    ("text", "hparams", "value"),
    [
        ("<think>a\nb</think>7", {"pattern": r"<think>.*</think>\d+"}, 1.0),
        ("x <think>a</think>7", {"pattern": r"<think>.*</think>\d+"}, 0.0),
        ("x <b>7</b> y", {"pattern": "<b>", "match": "search"}, 1.0),
        ("", {"pattern": ".+"}, 0.0),
        ("", {"pattern": ".*"}, 1.0),
        ("größe", {"pattern": r"\w+"}, 1.0),
    ],
)
def test_regex_matches_the_whole_answer_unless_told_to_search(text, hparams, value):
    assert regex(prompt(), answer(text), **hparams) == value


def test_a_pattern_that_is_none_cannot_judge():
    with pytest.raises(Unscorable, match="no regular expression"):
        regex(prompt(), answer("x"), pattern="(")


@pytest.mark.parametrize(
    ("text", "hparams", "value"),
    [
        ('{"a": 1}', {}, 1.0),
        ('{"a": 1}', {"required": ["a"]}, 1.0),
        ('{"a": 1}', {"required": ["a", "b"]}, 0.0),
        ('[{"a": 1}]', {"required": ["a"]}, 0.0),
        ("```json\n[1, 2]\n```", {}, 1.0),
        ("```json\n[1, 2]\n```", {"fenced": False}, 0.0),
        ("Here: {}", {}, 0.0),
        ("", {}, 0.0),
        ("NaN", {}, 0.0),
        ('{"a": 1,}', {}, 0.0),
        ("[" * 100_000, {}, 0.0),
        ("9" * 10_000, {}, 0.0),
        ('"é\\u00e9"', {}, 1.0),
    ],
)
def test_json_is_valid_or_worth_nothing(text, hparams, value):
    assert json_valid(prompt(), answer(text), **hparams) == value


@pytest.mark.parametrize(
    ("text", "truth", "value"),
    [
        ("B", "B", 1.0),
        ("(B).", "B", 1.0),
        ("The answer is **B**", "B", 1.0),
        ("Answer: A\nNo. Answer: B", "B", 1.0),
        ("Answer: A\nNo. Answer: B", "A", 0.0),
        (r"\boxed{\text{B}}", "B", 1.0),
        ("<answer> B </answer>", "B", 1.0),
        ("the answer is b", "B", 1.0),
        ("B", 1, 1.0),
        ("B", "(b)", 1.0),
        ("A bird in the hand", "A", 0.0),
        ("The answer is Absolutely unclear", "A", 0.0),
        ("", "A", 0.0),
        ("Answer: E", "A", 0.0),
        ("Answer: \u0410", "A", 0.0),
        ("A, B, C or D", "A", 0.0),
        ("To answer a question like this", "A", 0.0),
        ("The answer is a mystery", "A", 0.0),
        ("Not option A. **Answer**: option C", "C", 1.0),
        ("I rule out option A and option C", "C", 0.0),
        ("d", "D", 1.0),
    ],
)
def test_choice_takes_the_stated_letter_and_never_guesses(text, truth, value):
    assert choice(prompt(truth), answer(text)) == value


@pytest.mark.parametrize("truth", ["E", "", 4, -1, "AB", True])
def test_a_truth_that_is_no_choice_cannot_judge(truth):
    with pytest.raises(Unscorable, match="ground truth"):
        choice(prompt(truth), answer("A"))


def test_choices_may_be_other_letters():
    assert choice(prompt("F"), answer("Answer: F"), choices="EFGH") == 1.0
