"""Calls of the `openai` client, as its own environment makes them; prints what came back."""

import json
import sys

from openai import OpenAI

TOOL = {
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
}
FORM = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["n"],
    "additionalProperties": False,
}


def main(sums_url: str, caller_url: str) -> None:
    """Every kind of call once."""
    found: dict[str, object] = {}
    ask = [{"role": "user", "content": "12+34="}]
    with OpenAI(base_url=sums_url, api_key="none", max_retries=0) as client:
        chat = client.chat.completions
        found["models"] = [model.id for model in client.models.list()]
        reply = chat.create(
            model="sums", messages=ask, temperature=0, logprobs=True, top_logprobs=2
        )
        found["chat"] = reply.choices[0].message.content
        found["logprobs"] = [len(one.top_logprobs) for one in reply.choices[0].logprobs.content]
        pieces = chat.create(model="sums", messages=ask, temperature=0, stream=True)
        found["stream"] = "".join(piece.choices[0].delta.content or "" for piece in pieces)
        several = chat.create(model="sums", messages=ask, n=5, seed=1)
        found["n"] = len(several.choices)
        text = client.completions.create(
            model="sums", prompt="1+2=", max_tokens=4, echo=True, seed=1
        )
        found["completion"] = text.choices[0].text
        pieces = client.completions.create(
            model="sums", prompt="1+2=", max_tokens=4, seed=1, stream=True
        )
        found["completion_stream"] = "".join(piece.choices[0].text for piece in pieces)
    with OpenAI(base_url=caller_url, api_key="none", max_retries=0) as client:
        chat = client.chat.completions
        question = [{"role": "user", "content": "19*93="}]
        reply = chat.create(model="caller", messages=question, tools=[TOOL], temperature=0)
        [call] = reply.choices[0].message.tool_calls
        found["tool"] = [call.function.name, json.loads(call.function.arguments)]
        answered = [
            *question,
            reply.choices[0].message,
            {"role": "tool", "tool_call_id": call.id, "content": "1767"},
        ]
        last = chat.create(model="caller", messages=answered, tools=[TOOL], temperature=0)
        found["after_tool"] = last.choices[0].message.content
        form = {"type": "json_schema", "json_schema": {"name": "n", "schema": FORM}}
        reply = chat.create(model="caller", messages=question, response_format=form, seed=1)
        found["schema"] = json.loads(reply.choices[0].message.content)
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
