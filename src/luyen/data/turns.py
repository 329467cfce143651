"""Messages of a conversation in which tools are called, in a form that every chat template takes.

What the policy sampled and what a template makes of the same call can differ in spacing, in the
order of keys, in ids. A message therefore holds both: its parts, and the text as it was written.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from luyen.base.records import Message

WRITTEN = "written"
"""Key of the text as the policy wrote it, calls included, the end of turn left off.

No template sees the key: the renderer shows it one form or the other."""

_CHANNEL = re.compile(
    r"(?:<\|start\|>assistant)?<\|channel\|>(\w+)[^<]*<\|message\|>(.*?)(?=<\|end\|>|<\|start\|>|\Z)"
    r"(?:<\|end\|>)?",
    re.DOTALL,
)


def assistant_message(
    content: str,
    calls: Sequence[tuple[str, Mapping[str, Any]]],
    *,
    turn: int,
    written: str | None = None,
) -> Message:
    """What the assistant said in a turn: text without the calls, and name and arguments of each.

    `written` is the whole turn as it was sampled; templates get it as plain content where they
    take it, so that what was said is not said in other words.

    Example:
        >>> message = assistant_message("", [("add", {"a": 1})], turn=0)
        >>> message["tool_calls"][0]["id"], message["tool_calls"][0]["function"]["name"]
        ('c00000000', 'add')
    """
    message: dict[str, Any] = {"role": "assistant", **_channels(content, bool(calls))}
    if calls:
        message["tool_calls"] = [
            {
                "type": "function",
                "id": call_id(turn, i),
                "function": {"name": name, "arguments": dict(arguments)},
            }
            for i, (name, arguments) in enumerate(calls)
        ]
    if written is not None and written != message.get("content"):
        message[WRITTEN] = written
    return message


def tool_message(name: str, text: str, *, turn: int, index: int) -> Message:
    """What a tool answered to call number `index` of a turn.

    Example:
        >>> tool_message("add", "3", turn=1, index=0)["tool_call_id"]
        'c00010000'
    """
    return {"role": "tool", "name": name, "content": text, "tool_call_id": call_id(turn, index)}


def call_id(turn: int, index: int) -> str:
    """Nine letters and digits, the same in every run: some templates refuse anything else."""
    return f"c{turn % 10_000:04d}{index % 10_000:04d}"


def forms(messages: Sequence[Message]) -> list[list[Message]]:
    """The conversation with its turns as written, then with their parts; one where none differs."""
    in_parts: list[Message] = [
        {key: value for key, value in message.items() if key != WRITTEN} for message in messages
    ]
    as_written: list[Message] = [
        {"role": message["role"], "content": message[WRITTEN]} if WRITTEN in message else parts
        for message, parts in zip(messages, in_parts, strict=True)
    ]
    return [as_written, in_parts] if as_written != in_parts else [in_parts]


def _channels(content: str, has_calls: bool) -> dict[str, str]:
    """Text as it is; text in channels as `thinking` and `content`, which such templates demand.

    Beside calls they take one of the two: then all of it is thinking.
    """
    found = _CHANNEL.findall(content)
    if not found:
        return {"content": content}
    thoughts = [text for channel, text in found if channel == "analysis" or has_calls]
    said = [text for channel, text in found if channel != "analysis" and not has_calls]
    thinking = {"thinking": "\n".join(thoughts)} if thoughts else {}
    return {"content": "\n".join(said), **thinking}
