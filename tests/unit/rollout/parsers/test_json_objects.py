"""Strict JSON from a position."""

import pytest

from luyen.rollout.parsers.protocol import NESTING_LIMIT, flaw, quoted, read_json


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"a": {"b": [1, {"c": null}]}} tail', {"a": {"b": [1, {"c": None}]}}),
        (r'{"a": "\u00e9\ud83d\ude00\n"}', {"a": "é\U0001f600\n"}),
        ('{"a": "}</tool_call>{"}', {"a": "}</tool_call>{"}),
        ("123456789012345678901234567890", 123456789012345678901234567890),
        (" \t\r\n-0.5e-3", -0.0005),
        ('""', ""),
    ],
)
def test_a_value_is_read_up_to_its_end(text: str, value: object):
    found = read_json("xx" + text, 2)
    assert (found.fault, found.value) == (None, value)
    rest = " tail" if text.endswith("tail") else ""
    assert ("xx" + text)[found.end :] == rest


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "Expecting value, but the text ends there"),
        ("{'a': 1}", "Expecting property name enclosed in double quotes at character 1"),
        ('{"a": 1,, "b": 2}', "at character 8"),
        ('{"a": "x\ny"}', "Invalid control character"),
        ('{"a": tru}', 'Expecting value at character 6, near "tru}"'),
        ('{"a": "x', "Unterminated string"),
    ],
)
def test_what_is_not_json_says_where(text: str, why: str):
    found = read_json(text, 0)
    assert found.fault is not None
    assert why in found.fault


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('{"a": NaN}', "NaN is not JSON"),
        ("[Infinity]", "Infinity is not JSON"),
        ('{"a": [-Infinity]}', "-Infinity is not JSON"),
        ('{"a": 1, "b": {"c": 1, "c": "</x>"}}', 'the key "c" stands twice in one object'),
        ('{"a": 1e999}', "a number is too large"),
        ("9" * 5000, "a number has 5000 digits, which is too long"),
        (r'["\ud800"]', "a string holds half of a surrogate pair"),
        (r'{"\udc00": 1}', "a string holds half of a surrogate pair"),
    ],
)
def test_what_python_would_let_pass_is_refused_and_its_end_is_known(text: str, why: str):
    found = read_json(text + " more", 0)
    assert found.fault == why
    assert found.end == len(text)


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


def test_nesting_has_a_limit_that_no_stack_reaches():
    assert read_json(nested(NESTING_LIMIT), 0).fault is None
    for depth in (NESTING_LIMIT + 2, 900, 200_000):
        fault = read_json(nested(depth), 0).fault
        assert fault == f"it is nested more than {NESTING_LIMIT} levels deep"


def test_the_walk_over_a_value_does_not_recurse():
    value: list[object] = []
    for _ in range(100_000):
        value = [value]
    assert flaw(value) is not None
    while value:  # Freed level by level: the interpreter would recurse.
        value = value.pop()  # type: ignore[assignment]


def test_a_quotation_is_one_short_ascii_line():
    assert quoted("a\n\u2028\ud800") == r'"a\n\u2028\ud800"'
    assert len(quoted("x" * 1000)) < 80
