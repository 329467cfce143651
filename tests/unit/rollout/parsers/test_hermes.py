"""Hermes on text that real policies get wrong."""

import pytest

from luyen.rollout.parsers.json_formats import parse_hermes
from luyen.rollout.parsers.protocol import ATTEMPT_LIMIT, ParsedTurn, WrittenCall

F = WrittenCall(name="f", arguments={"x": 1})
F_TEXT = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'


def test_text_around_and_between_calls_is_the_content():
    text = f"  Let me see.\n\n{F_TEXT}\nand\n{F_TEXT}{F_TEXT}\nDone. "
    assert parse_hermes(text) == ParsedTurn(content="  Let me see.\nand\nDone. ", calls=(F, F, F))


def test_a_closing_tag_inside_a_string_ends_nothing():
    text = '<tool_call>{"name": "f", "arguments": {"x": "</tool_call><tool_call>{"}}</tool_call>'
    assert parse_hermes(text).calls == (
        WrittenCall(name="f", arguments={"x": "</tool_call><tool_call>{"}),
    )


def test_thinking_marks_inside_a_string_are_part_of_it():
    text = '<tool_call>{"name": "f", "arguments": {"x": "<think></think></think>"}}</tool_call>'
    assert parse_hermes(text + F_TEXT).calls[1:] == (F,)


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ('{"name": "f", "arguments": {"x": 1}', "the call is not valid JSON: Expecting ','"),
        ("print(1)", "the call is not valid JSON: Expecting value at character 0"),
        ("", "the call is not valid JSON: Expecting value"),
        ('"f"', "the call must be a JSON object, not a string"),
        ("null", "the call must be a JSON object, not null"),
        ("true", "the call must be a JSON object, not true or false"),
        ("1.5", "the call must be a JSON object, not a number"),
        ('{"arguments": {}}', 'the call has no "name"'),
        ('{"name": "", "arguments": {}}', 'the "name" of the call must be a string'),
        ('{"name": ["f"], "arguments": {}}', 'the "name" of the call must be a string'),
        ('{"name": "f", "arguments": [1]}', 'the arguments of "f" must be a JSON object, not a li'),
        ('{"name": "f", "arguments": null}', "must be a JSON object, not null"),
        ('{"name": "f", "arguments": "x=1"}', "are a string that is not valid JSON: Expecting"),
        ('{"name": "f", "arguments": "{} {}"}', 'not valid JSON: "{}" follows the object'),
        ('{"name": "f", "arguments": "[1]"}', "must be a JSON object, not a list"),
        ('{"name": "f", "params": {"x": 1}}', 'has no "arguments"; it has "params"'),
        ('{"name": "f", "arguments": {"x": NaN}}', "NaN is not JSON"),
        ('{"name": "f", "arguments": {"x": 1, "x": 2}}', 'the key "x" stands twice'),
        ('{"name": "f", "arguments": {}} {"name": "g"}', "the call is not closed"),
    ],
)
def test_a_bad_call_is_one_problem_stays_in_the_content_and_spares_its_sibling(body: str, why: str):
    bad = f"<tool_call>{body}</tool_call>"
    parsed = parse_hermes(f"{bad}\n{F_TEXT}")
    assert parsed.calls == (F,)
    assert len(parsed.problems) == 1
    assert why in parsed.problems[0]
    assert parsed.content == bad


def test_arguments_in_a_string_are_decoded_and_a_name_alone_is_enough():
    text = r'<tool_call>{"name": "f", "arguments": "{\"x\": 1}"}</tool_call>'
    assert parse_hermes(text).calls == (F,)
    alone = parse_hermes('<tool_call>{"name": "now"}</tool_call>')
    assert alone.calls == (WrittenCall(name="now", arguments={}),)


def test_an_open_tag_does_not_swallow_the_call_behind_it():
    open_call = '<tool_call>{"name": "g", "arguments": {}}\n'
    parsed = parse_hermes(open_call + F_TEXT)
    assert parsed.calls == (F,)
    assert parsed.problems == ("the call is not closed: </tool_call> must follow the JSON object",)


def test_a_closing_tag_alone_is_a_problem():
    parsed = parse_hermes('{"name": "f", "arguments": {}}\n</tool_call>')
    assert parsed.calls == ()
    assert parsed.problems == ("</tool_call> has no <tool_call> before it",)


def test_talk_about_tags_while_thinking_is_no_attempt():
    thought = "I should write <tool_call> and then JSON. <tool_call>{broken"
    for text in (f"<think>{thought}</think>{F_TEXT}", f"{thought}</think>{F_TEXT}"):
        parsed = parse_hermes(text)
        assert (parsed.calls, parsed.problems) == ((F,), ())
        assert parsed.content == text.removesuffix(F_TEXT)


def test_only_the_first_mark_of_thinking_may_close_what_the_prompt_opened():
    text = f"<think>a</think>{F_TEXT} b </think> c"
    assert parse_hermes(text).calls == (F,)


def test_a_turn_of_nothing_but_tags_is_read_up_to_a_limit():
    parsed = parse_hermes("<tool_call>" * 50_000)
    assert len(parsed.problems) == ATTEMPT_LIMIT + 1
    assert parsed.problems[-1] == f"only the first {ATTEMPT_LIMIT} calls of a turn are read"
    # Even so, what comes to light as thinking was none of it.
    assert parse_hermes("<tool_call>" * 50_000 + "</think>" + F_TEXT).calls == (F,)
