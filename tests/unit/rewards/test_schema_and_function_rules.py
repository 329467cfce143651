"""JSON held against schemas, and programs judged by calls of their functions."""

import pytest

from luyen.rewards.build import build_reward
from luyen.rewards.rules.code import code
from luyen.rewards.rules.code import tests_of as read_tests
from luyen.rewards.rules.format import json_schema
from luyen.rewards.rules.rule import Unscorable
from tests.unit.rewards.builders import answer, config, group, prompt

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"name": "Li", "age": 3}', 1.0),
        ('```json\n{"name": "Li"}\n```', 1.0),
        ('{"age": 3}', 0.0),
        ('{"name": "Li", "age": -1}', 0.0),
        ('{"name": "Li", "age": NaN}', 0.0),
        ('{"name": "Li", "more": 1}', 0.0),
        ('Here: {"name": "Li"}', 0.0),
        ("", 0.0),
        ("[" * 100_000, 0.0),
    ],
)
def test_json_fits_a_schema_or_not(text, value):
    assert json_schema(prompt(None), answer(text), schema=PERSON) == value


def test_a_row_may_bring_its_own_schema():
    text = answer('{"name": "Li"}')
    assert json_schema(prompt(PERSON), text) == 1.0
    assert json_schema(prompt('{"type": "array"}'), text) == 0.0
    assert json_schema(prompt("x", json_schema={"type": "object"}), text) == 1.0
    assert json_schema(prompt(PERSON), answer('```\n{"name": "Li"}\n```'), fenced=False) == 0.0


def test_the_draft_that_a_schema_names_is_used():
    fourth = {"$schema": "http://json-schema.org/draft-04/schema#", "minimum": 1}
    strict = fourth | {"exclusiveMinimum": True}
    assert [json_schema(prompt(s), answer("1")) for s in (fourth, strict)] == [1.0, 0.0]


@pytest.mark.parametrize(
    ("truth", "why"),
    [
        (None, "no schema"),
        (3, "no schema"),
        ("{", "no JSON"),
        ({"type": "objekt"}, "the schema is none"),
        ({"$ref": "http://example.invalid/schema.json"}, "points to what it does not hold"),
    ],
)
def test_a_schema_that_cannot_judge_is_no_zero(truth, why):
    with pytest.raises(Unscorable, match=why):
        json_schema(prompt(truth), answer("{}"))


def test_an_answer_on_which_a_pattern_of_a_schema_hangs_does_not_fit():
    schema = {"type": "string", "pattern": "^(a|a)*$"}
    parts = {"fits": {"rule": "json_schema", "kwargs": {"schema": schema}}}
    settings = config(components=parts, timeout_s=1.0, num_workers=1)
    with build_reward(settings, max_response_length=16) as reward:
        [done] = reward.score([group(prompt(None), '"aa"', '"' + "a" * 60 + '!"')])
        counted = reward.take_counts()
    assert [score.value for score in done.scores] == [1.0, 0.0]
    assert counted == {"judging/unjudgeable/json_schema": 1.0}


ADD = "```python\ndef add(a, b):\n    return a + b\n```"
METHOD = "```python\nclass Solution:\n    def add(self, a, b):\n        return a + b\n```"
PAIRS = {"fn_name": "add", "inputs": [[1, 2], [[1], [2]]], "outputs": [3, [1, 2]]}


@pytest.mark.parametrize("text", [ADD, METHOD])
@pytest.mark.parametrize(
    ("truth", "value"),
    [
        (PAIRS, 1.0),
        (PAIRS | {"outputs": [[3], [[1, 2]]]}, 1.0),
        (PAIRS | {"inputs": ["1\n2", "[1]\n[2]"], "outputs": ["3", "[1, 2]"]}, 1.0),
        (PAIRS | {"outputs": [3, [2, 1]]}, 0.5),
        (PAIRS | {"fn_name": "sub"}, 0.0),
    ],
)
def test_functions_are_called_with_arguments_and_held_to_results(text, truth, value):
    assert code(prompt(truth), answer(text), credit="share").value == value


def test_a_tuple_is_a_list_and_text_is_text():
    pair = "def pair(a):\n    return a, a"
    assert code(
        prompt({"fn_name": "pair", "inputs": [["x"]], "outputs": [["x", "x"]]}), answer(pair)
    )
    assert code(
        prompt({"fn_name": "str", "inputs": [[12]], "outputs": ["12"]}), answer("str = str")
    )


@pytest.mark.parametrize(
    "truth",
    [
        {"fn_name": "a b", "inputs": [[1]], "outputs": [1]},
        {"fn_name": "import", "inputs": [[1]], "outputs": [1]},
        {"fn_name": "f", "inputs": [1], "outputs": [1]},
        {"fn_name": "f", "inputs": [[1]], "outputs": [1, 2]},
        {"fn_name": "f", "inputs": [[{1, 2}]], "outputs": [1]},
        {"fn_name": "f"},
    ],
)
def test_calls_that_cannot_be_made_are_no_zero(truth):
    with pytest.raises(Unscorable):
        read_tests(truth)


@pytest.mark.parametrize(
    "truth",
    [
        "# later",
        "pass",
        "x = 1",
        "import os",
        '"assert f(1) == 2"',
        '"[\\"assert f(1) == 2\\"]"',
        "def check(candidate):\n    assert candidate(1) == 2",
        "def test(n=1): f(n)",
        ["assert f(1) == 2", "# and no more"],
    ],
)
def test_a_row_whose_test_asserts_nothing_cannot_be_scored(truth):
    with pytest.raises(Unscorable, match="asserts nothing"):
        code(prompt(truth), answer("```python\ndef f(x): return 0\n```"))


@pytest.mark.parametrize("truth", ["assert f(1) ==", "assert f(1) == 2\n  x", "f(\0)"])
def test_a_test_that_is_no_python_is_not_held_against_the_program(truth):
    with pytest.raises(Unscorable, match="no Python"):
        code(prompt(truth), answer("```python\ndef f(x): return 2\n```"))


@pytest.mark.parametrize(
    "test",
    [
        "for i in range(3): assert f(i) == i",
        "def check(candidate):\n    assert candidate(1) == 2\ncheck(f)",
        "if f(1) != 2: raise ValueError",
        "f(1)",
        "class T:\n    assert f(1) == 2",
        "assert '\\d' == f(1)",
    ],
)
def test_other_tests_are_read(test):
    assert read_tests(test) == [test]
