"""gpt-oss: messages, channels and recipients."""

import pytest

from luyen.rollout.parsers.json_formats import parse_gpt_oss
from luyen.rollout.parsers.protocol import ParsedTurn, WrittenCall

F = WrittenCall(name="f", arguments={"x": 1})
ANALYSIS = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
CALL = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"x": 1}'


@pytest.mark.parametrize(
    "call",
    [
        CALL,
        CALL + "<|call|>",
        '<|channel|>commentary to=functions.f<|constrain|>json<|message|>{"x": 1}',
        '<|channel|>commentary to=functions.f json<|message|>{"x": 1}',
        '<|channel|>commentary to=functions.f<|message|>{"x": 1}',
        ' to=functions.f<|channel|>commentary json<|message|>{"x": 1}',
        '<|channel|>commentary to=f <|constrain|>json<|message|>{"x": 1}',
        '<|channel|>analysis to=functions.f<|message|>{"x": 1}<|return|>',
    ],
)
def test_one_call_in_each_of_its_forms(call: str):
    assert parse_gpt_oss(call) == ParsedTurn(content="", calls=(F,))
    assert parse_gpt_oss(ANALYSIS + call) == ParsedTurn(content="Hm.", calls=(F,))
    assert parse_gpt_oss("<|start|>assistant" + call).calls == (F,)


def test_content_is_the_final_message_and_with_calls_everything_said_before():
    final = "<|channel|>final<|message|>42"
    preamble = "<|channel|>commentary<|message|>Plan.<|end|><|start|>assistant"
    assert parse_gpt_oss(ANALYSIS + final) == ParsedTurn(content="42", calls=())
    assert parse_gpt_oss(ANALYSIS + preamble + CALL) == ParsedTurn(content="Hm.\nPlan.", calls=(F,))
    both = f"{ANALYSIS}{final}<|end|><|start|>assistant{CALL}"
    assert parse_gpt_oss(both) == ParsedTurn(content="Hm.\n42", calls=(F,))
    assert parse_gpt_oss("<|channel|>analysis<|message|>So") == ParsedTurn(content="So", calls=())
    assert parse_gpt_oss("just text") == ParsedTurn(content="just text", calls=())


def test_several_calls_in_order():
    g = CALL.replace(".f", ".g") + "<|end|><|start|>assistant"
    assert [c.name for c in parse_gpt_oss(ANALYSIS + g + CALL).calls] == ["g", "f"]


def test_calls_in_the_text_of_a_message_are_no_calls():
    thought = '<|channel|>analysis<|message|>to=functions.f {"x": 1} <tool_call>'
    assert parse_gpt_oss(thought) == ParsedTurn(content=thought.partition("sage|>")[2], calls=())


def test_an_end_inside_a_string_ends_nothing():
    text = CALL.replace("1}", '"<|call|><|end|><|start|>"}')
    assert parse_gpt_oss(text).calls == (
        WrittenCall(name="f", arguments={"x": "<|call|><|end|><|start|>"}),
    )


def test_what_another_role_says_to_the_assistant_is_no_call():
    text = "<|start|>functions.f to=assistant<|channel|>commentary<|message|>{}<|end|>"
    assert parse_gpt_oss(text).calls == ()
    browse = '<|channel|>analysis to=browser.search<|message|>{"q": 1}'
    assert parse_gpt_oss(browse).calls[0].name == "browser.search"


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (CALL.replace("1}", "1"), 'the arguments of "f" are not valid JSON: Expecting'),
        (CALL.replace('{"x": 1}', ""), 'the arguments of "f" are not valid JSON: Expecting value'),
        (CALL.replace('{"x": 1}', "[1]"), 'the arguments of "f" must be a JSON object, not a list'),
        (CALL.replace("1}", "1} or so"), 'the call of "f" must end behind its JSON object'),
        (CALL.replace("functions.f", "functions."), "the call has no name"),
        ("<|channel|>commentary to=functions.f <|constrain|>json", "the call has no <|message|>"),
        (
            '<|channel|>final <|constrain|>functions.f<|message|>{"x": 1}',
            "a call must name its tool as to=functions.NAME",
        ),
    ],
)
def test_a_bad_call_is_one_problem_and_spares_its_sibling(bad: str, why: str):
    assert parse_gpt_oss(bad).calls == ()
    parsed = parse_gpt_oss(f"{bad}<|end|><|start|>assistant{CALL}")
    assert parsed.calls == (F,)
    assert len(parsed.problems) == 1
    assert why in parsed.problems[0]
