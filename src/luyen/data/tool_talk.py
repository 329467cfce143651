"""Conversations with tools, made up: calls, what they give, and guesses in their place."""

from collections.abc import Iterator, Mapping
from typing import Any

from luyen.base.seeds import derive_key, mix, uniform


def schema(name: str, description: str, parameter: str) -> dict[str, Any]:
    """The schema of a tool that takes one text.

    Example:
        >>> schema("lookup", "Find a price.", "item")["function"]["parameters"]["required"]
        ['item']
    """
    parameters = {
        "type": "object",
        "properties": {parameter: {"type": "string"}},
        "required": [parameter],
    }
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


CALCULATOR = schema("calculator", "Evaluate arithmetic.", "expression")
"""Schema of the built-in calculator."""


def asked(text: str) -> dict[str, Any]:
    """What the user says."""
    return {"role": "user", "content": text}


def called(tool: Mapping[str, Any], argument: str, result: str) -> list[dict[str, Any]]:
    """A call of a tool that takes one text, what it gives, and the assistant saying that.

    Example:
        >>> [message["role"] for message in called(CALCULATOR, "6*7", "42")]
        ['assistant', 'tool', 'assistant']
    """
    function: Mapping[str, Any] = tool["function"]
    (parameter,) = function["parameters"]["required"]
    call = {"name": function["name"], "arguments": {parameter: argument}}
    return [
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": call}],
        },
        {"role": "tool", "content": result},
        answered(result),
    ]


def answered(text: str) -> dict[str, Any]:
    """What the assistant says."""
    return {"role": "assistant", "content": text}


def wrong_guess(truth: str, key: int) -> str:
    """Another number with as many digits.

    Example:
        >>> guess = wrong_guess("42", 1)
        >>> len(guess), guess == "42"
        (2, False)
    """
    if len(truth) == 1:
        return str((int(truth) + 1 + mix(key, 0) % 9) % 10)
    low = 10 ** (len(truth) - 1)
    shift = 1 + mix(key, 0) % (9 * low - 1)
    return str(low + (int(truth) - low + shift) % (9 * low))


def choices(key: int, calls: float, *address: int) -> Iterator[tuple[bool, int]]:
    """For one turn after the other: whether a tool is called, and a key for what is said instead.

    A share of `calls` of the turns call.
    """
    turn = 0
    while True:
        own = derive_key(key, "turn", *address, turn)
        yield uniform(own, 0) < calls, own
        turn += 1
