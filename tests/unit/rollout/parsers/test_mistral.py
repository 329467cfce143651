"""Mistral: the list of version 3 and the repeated token of version 11."""

import pytest

from luyen.rollout.parsers.json_formats import parse_mistral
from luyen.rollout.parsers.protocol import ParsedTurn, WrittenCall

F = WrittenCall(name="f", arguments={"x": 1})


@pytest.mark.parametrize(
    "call",
    [
        '[TOOL_CALLS][{"name": "f", "arguments": {"x": 1}}]',
        '[TOOL_CALLS] [{"arguments": "{\\"x\\": 1}", "name": "f", "id": "VvvODy9mT"}]',
        '[TOOL_CALLS]f[ARGS]{"x": 1}',
        '[TOOL_CALLS]f[CALL_ID]VvvODy9mT[ARGS]{"x": 1}',
        '[TOOL_CALLS]f{"x": 1}',
        '[TOOL_CALLS] f [ARGS] {"x": 1}',
    ],
)
def test_one_call_in_each_of_its_forms(call: str):
    assert parse_mistral(f"Well. {call}") == ParsedTurn(content="Well.", calls=(F,))


def test_a_token_inside_a_string_begins_nothing():
    text = '[TOOL_CALLS]f[ARGS]{"x": "[TOOL_CALLS]g[ARGS]{}"}'
    assert parse_mistral(text).calls == (
        WrittenCall(name="f", arguments={"x": "[TOOL_CALLS]g[ARGS]{}"}),
    )


def test_one_bad_item_of_a_list_spares_the_others():
    parsed = parse_mistral('[TOOL_CALLS][{"name": "f", "arguments": {"x": 1}}, 7, {"id": "a"}]')
    assert parsed.calls == (F,)
    assert parsed.problems == (
        "the call must be a JSON object, not a number",
        'the call has no "name"',
    )


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        ("[TOOL_CALLS]", "a list of calls, or NAME[ARGS]{...}, must follow [TOOL_CALLS]"),
        ("[TOOL_CALLS][]", "the list of calls is empty"),
        ('[TOOL_CALLS][{"name": "f"}', "the list of calls is not valid JSON: Expecting ','"),
        ("[TOOL_CALLS][ARGS]{}", "must follow [TOOL_CALLS]"),
        ('[TOOL_CALLS]{"name": "f", "arguments": {}}', "must follow [TOOL_CALLS]"),
        ("[TOOL_CALLS]f", "must follow [TOOL_CALLS]"),
        ("[TOOL_CALLS]f[ARGS]", 'the arguments of "f" are not valid JSON: Expecting value'),
        ('[TOOL_CALLS]f[ARGS]{"x":', 'the arguments of "f" are not valid JSON'),
        ("[TOOL_CALLS]f[ARGS][1]", 'the arguments of "f" must be a JSON object, not a list'),
    ],
)
def test_a_bad_call_is_one_problem_and_spares_its_sibling(bad: str, why: str):
    parsed = parse_mistral(bad + '[TOOL_CALLS]f[ARGS]{"x": 1}')
    assert parsed.calls == (F,)
    assert len(parsed.problems) == 1
    assert why in parsed.problems[0]
    assert parsed.content == bad


@pytest.mark.parametrize("close", ["[/THINK]", "</think>"])
def test_calls_in_thinking_are_none_in_either_spelling(close: str):
    thought = f"I could [TOOL_CALLS]g[ARGS]{{}} or [TOOL_CALLS] it.{close}"
    for opened in ("", close.replace("/", "")):
        text = f'{opened}{thought}[TOOL_CALLS]f[ARGS]{{"x": 1}}'
        assert parse_mistral(text) == ParsedTurn(content=opened + thought, calls=(F,))
    assert parse_mistral(f"[THINK]{thought.removesuffix(close)}").calls == ()
