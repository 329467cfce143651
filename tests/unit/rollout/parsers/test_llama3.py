"""Llama 3: JSON with and without its tag, and calls written like Python."""

import pytest

from luyen.rollout.parsers.llama3 import parse_llama3, read_pythonic
from luyen.rollout.parsers.protocol import ParsedTurn, WrittenCall

F = WrittenCall(name="f", arguments={"x": 1})
F_TEXT = '{"name": "f", "parameters": {"x": 1}}'


@pytest.mark.parametrize(
    "text",
    [
        F_TEXT,
        f"\n{F_TEXT}\n",
        f"<|python_tag|>{F_TEXT}",
        '{"type": "function", "name": "f", "parameters": {"x": 1}}',
        '{"name": "f", "arguments": {"x": 1}}',
        f"[{F_TEXT}]",
        "[f(x=1)]",
        "<|python_tag|>f(x=1)",
        "<|python_tag|>f.call(x=1)",
    ],
)
def test_one_call_in_each_of_its_forms(text: str):
    assert parse_llama3(text) == ParsedTurn(content=text.strip()[:0], calls=(F,))


@pytest.mark.parametrize(
    "text",
    [
        '{"answer": 42}',
        '{"name": "Paris"}',
        "[1, 2, 3]",
        "[]",
        '["name"]',
        "{x} is a set",
        "{",
        "[see (1) below]",
        f"The call would be {F_TEXT}",
        "f(x=1)",
    ],
)
def test_an_answer_is_no_call(text: str):
    assert parse_llama3(text) == ParsedTurn(content=text, calls=())


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('{"name": "f", "parameters": {"x": 1}', "the call is not valid JSON: Expecting ','"),
        ('{"parameters": {"x": 1}}', 'the call has no "name"'),
        ('{"name": "f", "parameters": 3}', 'the arguments of "f" must be a JSON object'),
        (
            '{"name": "f", "parameters": {}, "arguments": {}}',
            'has "parameters" and "arguments", and only one can count',
        ),
        ('<|python_tag|>{"answer": 42}', 'the call has no "name"'),
        ("<|python_tag|>import os", "neither JSON nor a call follows <|python_tag|>"),
        ("<|python_tag|>", "neither JSON nor a call follows <|python_tag|>"),
        ("<|python_tag|>[]", "the list is empty"),
        ("[f(1)]", 'the arguments of "f" must be written as KEY=VALUE, near "1)]"'),
        ("[f(x=1), g(", "must be written as KEY=VALUE, where the text ends"),
    ],
)
def test_a_bad_call_is_one_problem_and_stays_in_the_content(text: str, why: str):
    parsed = parse_llama3(text)
    assert parsed.calls == ()
    assert len(parsed.problems) == 1
    assert why in parsed.problems[0]
    assert parsed.content == text


def test_several_calls_and_text_around_them():
    parsed = parse_llama3(f"Sure.<|python_tag|>{F_TEXT}; {F_TEXT}\n{F_TEXT} bye")
    assert parsed == ParsedTurn(content="Sure.\nbye", calls=(F, F, F))


def test_a_broken_call_behind_a_good_one_is_reported_and_kept():
    parsed = parse_llama3(f'{F_TEXT}; {{"name": "g", "para')
    assert parsed.calls == (F,)
    assert len(parsed.problems) == 1
    assert parsed.content == '; {"name": "g", "para'


@pytest.mark.parametrize(
    ("written", "value"),
    [
        (r"'it\'s \u00e9\x41\n\d'", "it's éA\n\\d"),
        ('"a, b)]"', "a, b)]"),
        ("[1, -2.5, 1e3, .5, [], {},]", [1, -2.5, 1000.0, 0.5, [], {}]),
        ("{'a': True, \"b\": {'c': None}}", {"a": True, "b": {"c": None}}),
        ("true", True),
        ("null", None),
        ("+7", 7),
    ],
)
def test_python_literals_are_read(written: str, value: object):
    parsed = parse_llama3(f"[f(x={written})]")
    assert parsed.problems == ()
    assert repr(parsed.calls[0].arguments["x"]) == repr(value)


@pytest.mark.parametrize(
    ("call", "why"),
    [
        ("f(x=__import__('os'))", "a value must be a string, number"),
        ("f(x=1+1)", ") is missing"),
        ("f(x=y)", "a value must be"),
        ("f(x=Trueish)", "a value must be"),
        ("f(x=1 y=2)", ") is missing"),
        ("f(x=1, x=2)", '"x" stands twice in "f"'),
        ("f(x==1)", "KEY=VALUE"),
        ("f(x={1: 2})", "the keys of a dict must be strings, each once"),
        ("f(x={'a': 1, 'a': 2})", "the keys of a dict must be strings, each once"),
        ("f(x={'a' 1})", ": is missing in a dict"),
        ("f(x=[1 2])", "] is missing in a list"),
        ("f(x=1e999)", "a number is too large"),
        (f"f(x={'9' * 5000})", "5000 digits"),
        (r"f(x='\ud800')", "half of a surrogate pair"),
        (f"f(x={'[' * 5000})", "levels deep"),
        ("f(x='a\nb')", "a value must be"),
        ("[f(x=1) g()]", "] is missing in the list of calls"),
        ("[f(x=1), 2]", "a call must begin with the name of a tool"),
    ],
)
def test_what_is_more_than_a_literal_is_refused(call: str, why: str):
    found = read_pythonic(call, 0)
    assert found.calls == ()
    assert found.fault is not None
    assert why in found.fault
    assert len(found.fault.splitlines()) == 1
