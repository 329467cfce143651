"""What every format must keep, for texts and calls that hypothesis makes up."""

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from luyen.rollout.build import tool_parsers
from luyen.rollout.parsers.protocol import ParsedTurn, WrittenCall
from tests.unit.rollout.parsers.writers import (
    THINKING,
    WRITINGS,
    Writing,
    calls,
    hostile,
    shape,
)

PARSERS = sorted(tool_parsers)
MANY = settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
CONTENT = st.text(alphabet="ab .,\né☃}", max_size=12).map(str.strip)
every_parser = pytest.mark.parametrize("name", PARSERS)
every_writing = pytest.mark.parametrize("writing", WRITINGS.values(), ids=WRITINGS)


def check_is_sound(parsed: ParsedTurn) -> None:
    for call in parsed.calls:
        assert call.name
        json.dumps(dict(call.arguments), allow_nan=False, ensure_ascii=False)
    for problem in parsed.problems:
        assert problem.strip()
        assert len(problem.splitlines()) == 1


@every_parser
@MANY
@given(text=hostile(*THINKING))
def test_any_text_gives_a_result_that_can_be_passed_on(name: str, text: str):
    parsed = tool_parsers.get(name)(text)
    check_is_sound(parsed)
    assert tool_parsers.get(name)(text) == parsed


@every_parser
@MANY
@given(text=st.text(alphabet='<|>[]{}":,=()/\\ \nabcdef', max_size=60))
def test_any_text_of_signs_gives_a_result(name: str, text: str):
    check_is_sound(tool_parsers.get(name)(text))


@pytest.mark.parametrize("name", [name for name in PARSERS if not name.startswith("gpt")])
@MANY
@given(text=hostile(*THINKING))
def test_a_text_without_calls_is_the_content_unchanged(name: str, text: str):
    parsed = tool_parsers.get(name)(text)
    assert parsed.calls or parsed.content == text


@pytest.mark.parametrize(
    ("name", "opening"),
    sorted({(w.parser, w.opening) for w in WRITINGS.values() if w.opening[0] in "<["}),
)
@MANY
@given(before=hostile(), after=hostile())
def test_no_attempt_is_dropped_in_silence(name: str, opening: str, before: str, after: str):
    parsed = tool_parsers.get(name)(before + opening + after)
    assert parsed.calls or parsed.problems


@every_writing
@MANY
@given(data=st.data(), content=CONTENT)
def test_what_was_written_is_read_back(writing: Writing, data: st.DataObject, content: str):
    wanted = data.draw(calls(text_values=writing.text_values))
    parsed = tool_parsers.get(writing.parser)(writing.write(content, wanted))
    assert shape(parsed) == shape(ParsedTurn(content="", calls=tuple(wanted)))
    assert parsed.problems == ()
    thinks = writing.write.__name__ == "llama3_bare" and content
    assert parsed.content == (f"<think>{content}</think>" if thinks else content)


@every_writing
@MANY
@given(data=st.data())
def test_a_call_that_is_cut_off_is_a_problem_and_no_call(writing: Writing, data: st.DataObject):
    # A value that holds an opening tag would be a second attempt once its own call is cut off.
    arguments = st.dictionaries(st.sampled_from("abc"), st.text("x\"'{}\n\\é", max_size=4))
    wanted = [WrittenCall(name="f", arguments=data.draw(arguments))]
    text = writing.write("Well.", wanted)
    first = text.index(writing.opening) + len(writing.opening)
    last = text.rindex(writing.complete) + len(writing.complete) - 1
    parsed = tool_parsers.get(writing.parser)(text[: data.draw(st.integers(first, last))])
    assert parsed.calls == ()
    assert len(parsed.problems) == 1
    check_is_sound(parsed)


@pytest.mark.parametrize(
    "writing",
    [w for name, w in WRITINGS.items() if not name.startswith("gpt") and name != "llama3_bare"],
    ids=lambda w: w.write.__name__,
)
@pytest.mark.parametrize("opened_by_prompt", [False, True])
@MANY
@given(data=st.data())
def test_calls_in_thinking_are_no_calls(
    writing: Writing, opened_by_prompt: bool, data: st.DataObject
):
    plain = st.dictionaries(st.sampled_from("abc"), st.sampled_from(["1", "x y"]), max_size=2)
    some = st.lists(st.builds(WrittenCall, name=st.just("f"), arguments=plain), min_size=1)
    thought, meant = data.draw(some), data.draw(some)
    thinking = writing.write("hm ", thought) + "</think>"
    thinking = thinking if opened_by_prompt else "<think>" + thinking
    parsed = tool_parsers.get(writing.parser)(writing.write(thinking + "\nSo:", meant))
    assert shape(parsed) == shape(ParsedTurn(content="", calls=tuple(meant)))
    assert parsed.problems == ()
    assert parsed.content == thinking + "\nSo:"


@pytest.mark.parametrize(
    "writing",
    [w for name, w in WRITINGS.items() if not name.startswith("gpt")],
    ids=lambda w: w.write.__name__,
)
def test_calls_in_thinking_that_never_ends_are_no_calls(writing: Writing):
    text = "<think>" + writing.write("", [WrittenCall(name="f", arguments={"x": "1"})])
    text = text.replace("<think><think>", "<think>")
    parsed = tool_parsers.get(writing.parser)(text)
    assert parsed == ParsedTurn(content=text, calls=())


@every_parser
def test_facts_are_what_a_run_needs(name: str):
    facts: dict[str, Any] = tool_parsers.facts(name)
    assert set(facts) == {"stop_tokens", "values"}
    assert facts["values"] == ("text" if name in ("qwen3_coder", "glm") else "json")
    assert all(isinstance(token, str) and token for token in facts["stop_tokens"])


def test_the_formats_are_these():
    known = ("deepseek", "glm", "gpt_oss", "hermes", "llama3", "mistral", "qwen3_coder")
    assert tuple(PARSERS) == known
    assert tool_parsers.facts("llama3")["stop_tokens"] == ("<|eot_id|>", "<|eom_id|>")
    assert "<|call|>" in tool_parsers.facts("gpt_oss")["stop_tokens"]
    assert "<|observation|>" in tool_parsers.facts("glm")["stop_tokens"]
