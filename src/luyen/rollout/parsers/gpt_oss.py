"""gpt-oss: the messages of the Harmony format.

    <|channel|>analysis<|message|>...<|end|>
    <|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{}<|call|>

The recipient may also stand before the channel. A message with a recipient is a call on any
channel; the text of all others, calls written in it included, is text.

Content is what the family's template takes as content: text without the marks of the messages. In a
turn that calls or tries to, that is thinking and preamble; otherwise it is the final message, and
thinking only where there is none.
"""

import re
from dataclasses import dataclass
from typing import final

from luyen.rollout.parsers.call_objects import Attempt, call_from_parts
from luyen.rollout.parsers.json_objects import quoted, read_json
from luyen.rollout.parsers.protocol import Parsed, tool_parsers
from luyen.rollout.parsers.scan import gathered

_MESSAGE_OR_START = re.compile(r"<\|message\|>|<\|start\|>")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"(?:^|[\s>])to=([^\s<]*)")
_MARK = re.compile(r"<\|(?:start|end|message|channel|constrain|return|call)\|>")
_BODY_END = re.compile(r"<\|(?:end|call|return)\|>|(?=<\|start\|>)")
_CALL_END = re.compile(r"\s*(?:<\|(?:end|call|return)\|>|(?=<\|start\|>)|\Z)")
_NO_TOOL = frozenset(("assistant", "user", "all", "system", "developer"))
_NAMESPACE = "functions."


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class _Message:
    """One message: what it says on which channel, or what it calls.

    Example:
        >>> _Message(channel="final", text="42", end=30).attempt is None
        True
    """

    channel: str
    """Name of the channel; empty when none is given."""
    text: str
    """What it says; empty for a call that could be read."""
    end: int
    """The position behind it."""
    attempt: Attempt | None = None
    """The call, or what is wrong with it; None for a message that is only text."""


@tool_parsers.register("gpt_oss", stop_tokens=("<|call|>", "<|return|>"), values="json")
def parse_gpt_oss(text: str) -> Parsed:
    """Calls in the Harmony format, from a text that begins behind `<|start|>assistant`.

    Example:
        >>> head = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
        >>> parse_gpt_oss(head + '{"x": 1}').calls[0].arguments
        {'x': 1}
        >>> parse_gpt_oss("<|channel|>final<|message|>42").content
        '42'
    """
    messages: list[_Message] = []
    at = 0
    while at < len(text):
        messages.append(_message(text, at))
        at = messages[-1].end
    attempts = [m.attempt for m in messages if m.attempt is not None]
    return gathered(_content(messages, has_attempts=bool(attempts)), attempts)


def _content(messages: list[_Message], *, has_attempts: bool) -> str:
    final_texts = [m.text for m in messages if m.channel == "final" and m.text]
    if final_texts and not has_attempts:
        return "\n".join(final_texts)
    return "\n".join(m.text for m in messages if m.text)


def _message(text: str, at: int) -> _Message:
    """The message whose header begins at a position."""
    head_end = _MESSAGE_OR_START.search(text, at)
    if head_end is None or head_end.group() == "<|start|>":
        return _without_body(text, at, head_end)
    head = text[at : head_end.start()]
    channel = _CHANNEL.search(head)
    name = channel.group(1) if channel else ""
    recipient = _RECIPIENT.search(head)
    if recipient is not None and recipient.group(1) not in _NO_TOOL:
        return _call(text, head_end.end(), name, recipient.group(1).removeprefix(_NAMESPACE))
    body_end = _BODY_END.search(text, head_end.end())
    stop, end = (body_end.start(), body_end.end()) if body_end else (len(text), len(text))
    problem = "a call must name its tool as to=functions.NAME" if _NAMESPACE in head else None
    body = text[head_end.end() : stop]
    return _Message(channel=name, text=body, end=end, attempt=problem)


def _without_body(text: str, at: int, start: re.Match[str] | None) -> _Message:
    """What stands where a header should, up to the start of the next message or the end."""
    stop, end = (start.start(), start.end()) if start else (len(text), len(text))
    lost = text[at:stop]
    problem = "the call has no <|message|>" if f"to={_NAMESPACE}" in lost else None
    # Behind <|start|> stands the role, which belongs to the next header.
    return _Message(channel="", text=_MARK.sub("", lost), end=end, attempt=problem)


def _call(text: str, at: int, channel: str, name: str) -> _Message:
    found = read_json(text, at)
    end = _CALL_END.match(text, found.end)
    problem: str
    if found.fault is not None:
        problem = f"the arguments of {quoted(name)} are not valid JSON: {found.fault}"
    elif end is None:
        problem = f"the call of {quoted(name)} must end behind its JSON object"
    else:
        attempt = call_from_parts(name, found.value)
        said = text[at : found.end] if isinstance(attempt, str) else ""
        return _Message(channel=channel, text=said, end=end.end(), attempt=attempt)
    body_end = _BODY_END.search(text, found.end)
    stop, after = (body_end.start(), body_end.end()) if body_end else (len(text), len(text))
    return _Message(channel=channel, text=text[at:stop], end=after, attempt=problem)
