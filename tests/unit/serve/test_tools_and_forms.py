"""Tool calls and JSON answers through the real client, on the built-in model that calls tools."""

import json
from collections.abc import Iterator

import jsonschema
import openai
import pytest
from openai import OpenAI

from tests.serving import Running, running

MODEL = "builtin://tools"
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "calculator",
            "parameters": {
                "type": "object",
                "properties": {"expression": {"type": "string", "maxLength": 12}},
                "required": ["expression"],
                "additionalProperties": False,
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "lookup",
            "parameters": {
                "type": "object",
                "properties": {"item": {"enum": ["a", "b"]}},
                "required": ["item"],
                "additionalProperties": False,
            },
        },
    },
]
ASK = [{"role": "user", "content": "19*93="}]
SCHEMA = {
    "type": "object",
    "properties": {
        "n": {"type": "integer", "maximum": 99, "minimum": 0},
        "is_odd": {"type": "boolean"},
    },
    "required": ["n", "is_odd"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(MODEL) as found:
        yield found


@pytest.fixture
def client(server: Running) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as found:
        yield found


def test_a_conversation_with_a_tool(client: OpenAI):
    first = client.chat.completions.create(
        model=MODEL, messages=ASK, tools=TOOLS[:1], temperature=0
    ).choices[0]
    assert first.finish_reason == "tool_calls"
    [call] = first.message.tool_calls or []
    assert call.function.name == "calculator"
    assert list(json.loads(call.function.arguments)) == ["expression"]
    result = {"role": "tool", "tool_call_id": call.id, "content": "1767"}
    messages = [*ASK, first.message.model_dump(), result]
    last = client.chat.completions.create(
        model=MODEL, messages=messages, tools=TOOLS[:1], temperature=0
    ).choices[0]
    assert last.finish_reason == "stop"
    assert last.message.content
    assert last.message.tool_calls is None


def test_a_stream_of_a_call_says_what_the_whole_reply_says(client: OpenAI):
    fields = {"model": MODEL, "messages": ASK, "tools": TOOLS[:1], "temperature": 0, "seed": 1}
    whole = client.chat.completions.create(**fields).choices[0]
    calls, reason = [], None
    for chunk in client.chat.completions.create(stream=True, **fields):
        calls += chunk.choices[0].delta.tool_calls or []
        reason = chunk.choices[0].finish_reason or reason
    assert [(c.id, c.function.name, c.function.arguments) for c in calls] == [
        (c.id, c.function.name, c.function.arguments) for c in whole.message.tool_calls
    ]
    assert reason == "tool_calls"


@pytest.mark.parametrize("seed", range(3))
def test_a_required_call_is_a_call(client: OpenAI, seed: int):
    choice = client.chat.completions.create(
        model=MODEL, messages=ASK, tools=TOOLS, tool_choice="required", seed=seed, temperature=2.0
    ).choices[0]
    [call] = choice.message.tool_calls or []
    schema = next(
        t["function"]["parameters"] for t in TOOLS if t["function"]["name"] == call.function.name
    )
    jsonschema.validate(json.loads(call.function.arguments), schema)


def test_a_named_tool_is_called(client: OpenAI):
    named = {"type": "function", "function": {"name": "lookup"}}
    choice = client.chat.completions.create(
        model=MODEL, messages=ASK, tools=TOOLS, tool_choice=named, seed=1
    ).choices[0]
    [call] = choice.message.tool_calls or []
    assert call.function.name == "lookup"
    assert json.loads(call.function.arguments)["item"] in ("a", "b")


def test_no_tool_is_called_where_none_may_be(client: OpenAI, server: Running):
    choice = client.chat.completions.create(
        model=MODEL, messages=ASK, tools=TOOLS, tool_choice="none", temperature=0
    )
    plain = client.chat.completions.create(model=MODEL, messages=ASK, temperature=0)
    assert choice.choices[0].message == plain.choices[0].message
    assert choice.usage == plain.usage


@pytest.mark.parametrize("seed", range(2))
def test_answers_fit_their_schema(client: OpenAI, seed: int):
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    fields = {"model": MODEL, "messages": ASK, "seed": seed, "response_format": form}
    whole = client.chat.completions.create(**fields).choices[0]
    assert whole.finish_reason == "stop"
    jsonschema.validate(json.loads(whole.message.content or ""), SCHEMA)
    chunks = client.chat.completions.create(stream=True, **fields)
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == whole.message.content


def test_any_object_is_an_object_or_was_cut_off(client: OpenAI):
    form = {"type": "json_object"}
    reply = client.chat.completions.create(
        model=MODEL, messages=ASK, seed=1, n=4, max_tokens=200, response_format=form
    )
    for choice in reply.choices:
        assert (choice.message.content or "").lstrip().startswith("{")
        if choice.finish_reason == "stop":
            assert isinstance(json.loads(choice.message.content or ""), dict)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "sometimes"}, "tool_choice"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "nix"}}},
            "tool_choice.function.name",
        ),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools"),
        (
            {
                "tools": [
                    {"type": "function", "function": {"name": "f", "parameters": {"type": 7}}}
                ],
                "tool_choice": "required",
            },
            "tools[0].parameters.type",
        ),
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": 7}}}},
            "response_format.json_schema.schema.type",
        ),
        ({"response_format": {"type": "json_object"}, "tools": TOOLS}, "response_format"),
    ],
)
def test_what_cannot_be_demanded_is_refused_by_name(client: OpenAI, fields: object, param: str):
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model=MODEL, messages=ASK, **fields)
    assert refused.value.param == param
