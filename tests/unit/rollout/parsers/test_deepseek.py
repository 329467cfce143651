"""DeepSeek: the fenced form of V3 and R1, and the short one of V3.1."""

import pytest

from luyen.rollout.parsers.json_formats import (
    DEEPSEEK_CALL_BEGIN,
    DEEPSEEK_CALL_END,
    DEEPSEEK_CALLS_BEGIN,
    DEEPSEEK_CALLS_END,
    DEEPSEEK_SEPARATOR,
    parse_deepseek,
)
from luyen.rollout.parsers.protocol import ParsedTurn, WrittenCall

F = WrittenCall(name="f", arguments={"x": 1})
SHORT = f'{DEEPSEEK_CALL_BEGIN}f{DEEPSEEK_SEPARATOR}{{"x": 1}}{DEEPSEEK_CALL_END}'
FENCED = (
    f"{DEEPSEEK_CALL_BEGIN}function{DEEPSEEK_SEPARATOR}f\n"
    f'```json\n{{"x": 1}}\n```{DEEPSEEK_CALL_END}'
)


def test_the_tokens_are_those_of_the_tokenizer():
    assert (
        DEEPSEEK_CALLS_BEGIN.encode()
        == b"<\xef\xbd\x9ctool\xe2\x96\x81calls\xe2\x96\x81begin\xef\xbd\x9c>"
    )
    assert DEEPSEEK_SEPARATOR.encode() == b"<\xef\xbd\x9ctool\xe2\x96\x81sep\xef\xbd\x9c>"


@pytest.mark.parametrize("call", [SHORT, FENCED])
def test_the_tokens_around_all_calls_are_no_content_and_may_be_missing(call: str):
    for text in (
        f"Well.{DEEPSEEK_CALLS_BEGIN}{call}{DEEPSEEK_CALLS_END}",
        f"Well.\n{DEEPSEEK_CALLS_BEGIN}\n{call}\n{DEEPSEEK_CALLS_END}",
        f"Well.{DEEPSEEK_CALLS_BEGIN}{call}",
        f"Well.{call}",
    ):
        assert parse_deepseek(text) == ParsedTurn(content="Well.", calls=(F,))


def test_a_fence_and_an_end_inside_a_string_end_nothing():
    inside = f"```{DEEPSEEK_CALL_END}{DEEPSEEK_CALLS_END}"
    for call in (SHORT, FENCED):
        parsed = parse_deepseek(call.replace("1}", f'"{inside}"}}'))
        assert parsed.calls == (WrittenCall(name="f", arguments={"x": inside}),)


def test_a_tool_may_be_called_function_in_the_short_form():
    parsed = parse_deepseek(
        f"{DEEPSEEK_CALL_BEGIN}function{DEEPSEEK_SEPARATOR}{{}}{DEEPSEEK_CALL_END}"
    )
    assert parsed.calls == (WrittenCall(name="function", arguments={}),)


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (
            f"{DEEPSEEK_CALL_BEGIN}f{DEEPSEEK_SEPARATOR}{{x}}{DEEPSEEK_CALL_END}",
            'the arguments of "f" are not valid JSON',
        ),
        (
            f"{DEEPSEEK_CALL_BEGIN}f{DEEPSEEK_SEPARATOR}[1]{DEEPSEEK_CALL_END}",
            "must be a JSON object, not a list",
        ),
        (f"{DEEPSEEK_CALL_BEGIN}f{DEEPSEEK_SEPARATOR}{{}}", 'the call of "f" is not closed'),
        (
            f"{DEEPSEEK_CALL_BEGIN}f{DEEPSEEK_SEPARATOR}{{}} and {DEEPSEEK_CALL_END}",
            'the call of "f" is not closed',
        ),
        (
            f"{DEEPSEEK_CALL_BEGIN}{DEEPSEEK_SEPARATOR}{{}}{DEEPSEEK_CALL_END}",
            "must begin with a name and the separator",
        ),
        (
            f"{DEEPSEEK_CALL_BEGIN}f{{}}{DEEPSEEK_CALL_END}",
            "must begin with a name and the separator token",
        ),
        (
            FENCED.replace("\n```" + DEEPSEEK_CALL_END, DEEPSEEK_CALL_END),
            'the call of "f" is not closed',
        ),
        (FENCED.replace("```json", ""), 'the arguments of "function" are not valid JSON'),
        (FENCED.replace("function", "tool"), 'the arguments of "tool" are not valid JSON'),
        (f"{DEEPSEEK_CALLS_BEGIN}none", "the tool calls are opened, but no call follows"),
        (DEEPSEEK_CALL_END, "a tool call is closed that was not opened"),
        (DEEPSEEK_CALLS_END, "a tool call is closed that was not opened"),
    ],
)
def test_a_bad_call_is_one_problem_and_spares_its_sibling(bad: str, why: str):
    parsed = parse_deepseek(bad + SHORT)
    assert parsed.calls == (F,)
    assert len(parsed.problems) == 1
    assert why in parsed.problems[0]
    assert parsed.content == bad
