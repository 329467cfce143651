"""Rows: three forms are read, and what is wrong is said with file, row and field."""

import json
from typing import Any

import pytest

from luyen.base.errors import UserError
from luyen.base.records import Prompt
from luyen.data.messages import find_markers
from luyen.data.rows import Columns, RowAt, read_row
from tests.unit.data.templates import assistant, user

AT = RowAt(file="rows.jsonl", number=12)
CALL = {"name": "add", "arguments": {"a": 1}}


def read(row: Any, **columns: Any) -> Prompt:
    return read_row(row, AT, Columns(**columns))


def test_a_verl_row_keeps_what_the_reward_needs():
    found = read(
        {
            "data_source": "openai/gsm8k",
            "prompt": [user("1+1=")],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": "2"},
            "extra_info": {"index": 7, "ability": "sums"},
        }
    )
    assert found.messages == (user("1+1="),)
    assert (found.data_source, found.ground_truth) == ("openai/gsm8k", "2")
    assert found.extra_info == {"index": 7, "ability": "sums"}


def test_columns_that_are_not_ours_travel_along():
    found = read({"prompt": [user("a")], "level": 3, "empty": None})
    assert found.extra_info == {"level": 3}
    assert (found.data_source, found.ground_truth) == ("", None)


def test_a_plain_conversation_is_kept_whole():
    messages = [{"role": "system", "content": "s"}, user("a"), assistant("b"), user("c")]
    assert list(read({"messages": messages}).messages) == messages


def test_named_columns_are_read():
    found = read(
        {"question": "1+1=", "answer": "2", "kind": "sum"},
        prompt="question",
        ground_truth="answer",
        data_source="kind",
        string_prompts="user",
    )
    assert found.messages == (user("1+1="),)
    assert (found.data_source, found.ground_truth, dict(found.extra_info)) == ("sum", "2", {})


@pytest.mark.parametrize("wrapped", [True, False])
@pytest.mark.parametrize("as_text", [True, False])
def test_a_tool_calling_trace_is_made_uniform(wrapped: bool, as_text: bool):
    arguments = json.dumps({"a": 1}) if as_text else {"a": 1}
    call: dict[str, Any] = {"name": "add", "arguments": arguments}
    if wrapped:
        call = {"id": "c1", "type": "function", "function": call}
    tools = [{"type": "function", "function": {"name": "add", "description": None}}]
    found = read(
        {
            "messages": [
                user("a"),
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "content": "1", "tool_call_id": "c1", "name": None},
                {"role": "tool", "content": "2"},
                {"role": "assistant", "content": "b", "tool_calls": None},
            ],
            "tools": json.dumps(tools) if as_text else tools,
        }
    )
    expected = {"type": "function", "function": CALL} | ({"id": "c1"} if wrapped else {})
    assert found.messages[1] == {"role": "assistant", "content": "", "tool_calls": [expected]}
    assert found.messages[2] == {"role": "tool", "content": "1", "tool_call_id": "c1"}
    assert "tool_calls" not in found.messages[4]
    assert found.tools == ({"type": "function", "function": {"name": "add"}},)


def test_text_parts_are_joined():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert read({"prompt": [{"role": "user", "content": parts}]}).messages == (user("ab"),)


def call_row(calls: Any) -> dict[str, Any]:
    return {"messages": [user("a"), {"role": "assistant", "content": "", "tool_calls": calls}]}


@pytest.mark.parametrize(
    ("row", "field", "why"),
    [
        ([1], "row", "an object with named fields"),
        ({"query": "a"}, "prompt", "neither `prompt` nor `messages`; it has query"),
        ({"prompt": "1+1="}, "prompt", "would have to skip the chat template"),
        ({"prompt": []}, "prompt", "a list of messages"),
        ({"prompt": [3]}, "prompt[0]", "an object with named fields"),
        ({"prompt": [user("a"), {"role": "usr", "content": ""}]}, "prompt[1].role", "no such role"),
        ({"prompt": [{"content": ""}]}, "prompt[0].role", "no such role"),
        ({"prompt": [{"role": "user"}]}, "prompt[0].content", "is text"),
        ({"prompt": [{"role": "user", "content": 5}]}, "prompt[0].content", "is text"),
        (
            {"prompt": [{"role": "user", "content": [{"type": "image"}]}]},
            "prompt[0].content",
            "text models",
        ),
        ({"prompt": [{"role": "tool", "content": "1"}]}, "prompt[0].role", "follows the assistant"),
        (
            {"prompt": [{"role": "user", "content": "", "tool_calls": [CALL]}]},
            "prompt[0].tool_calls",
            "only the assistant",
        ),
        (call_row("add"), "messages[1].tool_calls", "calls are a list"),
        (call_row([{"id": 1}]), "messages[1].tool_calls[0]", "names its function"),
        (call_row([7]), "messages[1].tool_calls[0]", "names its function"),
        (
            call_row([{"name": "f", "arguments": "{"}]),
            "messages[1].tool_calls[0].function.arguments",
            "not valid JSON",
        ),
        (
            call_row([{"name": "f", "arguments": "[1]"}]),
            "messages[1].tool_calls[0].function.arguments",
            "are an object",
        ),
        ({"prompt": [user("a")], "tools": {}}, "tools", "a list of schemas"),
        ({"prompt": [user("a")], "tools": [{"type": "function"}]}, "tools[0]", "names its"),
        ({"prompt": [user("a")], "tools": "[{]"}, "tools", "must be JSON"),
        ({"prompt": [user("a")], "data_source": 3}, "data_source", "is a name"),
        ({"prompt": [user("a")], "extra_info": [1]}, "extra_info", "named fields"),
        ({"prompt": [user("a")], "reward_model": 1}, "reward_model", "named fields"),
    ],
)
def test_a_wrong_row_is_named_by_file_row_and_field(row: Any, field: str, why: str):
    with pytest.raises(UserError) as caught:
        read(row)
    assert caught.value.field == f"rows.jsonl row 12: {field}"
    assert why in caught.value.why
    assert caught.value.fix


def test_a_near_role_is_suggested_and_a_long_value_is_cut():
    with pytest.raises(UserError, match="did you mean `user`") as caught:
        read({"prompt": [{"role": "usr", "content": ""}]})
    assert caught.value.value == "usr"
    with pytest.raises(UserError) as caught:
        read({"prompt": "x" * 500})
    assert len(caught.value.value) == 80
    assert "data.string_prompts=user" in caught.value.fix


def test_a_missing_answer_column_is_an_error_and_not_an_empty_answer():
    with pytest.raises(UserError, match="no such column; it has prompt") as caught:
        read({"prompt": [user("a")]}, ground_truth="answer")
    assert caught.value.field == "rows.jsonl row 12: answer"


def test_markers_are_counted_with_the_first_row_that_has_them():
    texts = ["a", "[INST] b", "x <|mine|>", "[INST]<|im_end|>"]
    prompts = [read({"prompt": [user(text)]}) for text in texts]
    found = find_markers(prompts, [f"r{i}" for i in range(4)], ["<|mine|>"])
    assert {(m.marker, m.rows, m.first) for m in found} == {
        ("[INST]", 2, "r1"),
        ("<|mine|>", 1, "r2"),
        ("<|im_end|>", 1, "r3"),
    }
    assert "<|mine|> in 1 row, first in r2" in map(str, found)
    assert find_markers(prompts[:1], ["r0"], []) == ()
