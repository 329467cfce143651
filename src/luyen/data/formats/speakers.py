"""Lists of messages in the manners of others, made ours: roles, calls, weights.

Two manners are read: `role`/`content`, in which the roles are ours, and `from`/`value`, in which
speakers have many names and calls are JSON text.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from luyen.base.records import Message
from luyen.base.suggest import did_you_mean
from luyen.data.formats.forms import Tags
from luyen.data.messages import ROLES, check_conversation
from luyen.data.rows import RowAt
from luyen.data.shapes import is_list, is_object, parsed_json

CALL = "function_call"
SPEAKERS = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "bot", "model"), "assistant"),
    **dict.fromkeys(("observation", "tool", "function_response"), "tool"),
    "system": "system",
    CALL: CALL,
}
"""Who speaks in a `from` -> our role; a call becomes a message of the assistant."""
WEIGHTS = ("weight", "train", "training")
"""Fields of a message that say whether it is learned."""
_SPANS = "train_detail"


def read_messages(
    value: Any, name: str, at: RowAt, tags: Tags
) -> tuple[list[Message], list[float | None]]:
    """The messages in our form, and for each what it says about its own weight, if anything."""
    if not is_list(value):
        return check_conversation(value, name, at.error), []
    ours = [_message(raw, f"{name}[{i}]", at, tags) for i, raw in enumerate(value)]
    weights = [_own_weight(raw, f"{name}[{i}]", at) for i, raw in enumerate(value)]
    return check_conversation(ours, name, at.error), weights


def learned(
    messages: Sequence[Message], own: Sequence[float | None], name: str, at: RowAt
) -> tuple[float, ...]:
    """The weight of every message: its own, or 1 for what the assistant says and 0 otherwise."""
    found: list[float] = []
    for i, (message, weight) in enumerate(zip(messages, own, strict=True)):
        is_ours = message["role"] == "assistant"
        if weight and not is_ours:
            why = f"only what the assistant says can be learned, and this is the {message['role']}"
            raise at.error(f"{name}[{i}].weight", weight, why, "drop the field, or write 0")
        found.append((1.0 if is_ours else 0.0) if weight is None else weight)
    return tuple(found)


def _message(raw: Any, name: str, at: RowAt, tags: Tags) -> Any:
    """One message with `role` and `content`; what is none is left to the check that follows."""
    if not is_object(raw):
        return raw
    role_field = next((f for f in tags.role if f in raw), None)
    text_field = next((f for f in tags.content if f in raw), None)
    if role_field is None:
        why = f"nobody says this: it has {', '.join(raw) or 'no field'}"
        raise at.error(name, raw, why, f"add `{tags.role[0]}`")
    taken = {role_field, text_field, *WEIGHTS}
    rest = {key: value for key, value in raw.items() if key not in taken}
    content = raw[text_field] if text_field is not None else None
    role = _role(raw[role_field], f"{name}.{role_field}", at, tags, is_ours=role_field == "role")
    if role == CALL:
        calls = _calls(content, f"{name}.{text_field}", at)
        return {"role": "assistant", "content": "", "tool_calls": calls, **rest}
    return {"role": role, "content": content, **rest}


def _role(value: Any, name: str, at: RowAt, tags: Tags, *, is_ours: bool) -> str:
    if value in tags.speakers:
        return tags.speakers[value]
    known: Collection[str] = ROLES if is_ours else SPEAKERS
    if is_ours and value in ROLES:
        return value
    if not is_ours and str(value).lower() in SPEAKERS:
        return SPEAKERS[str(value).lower()]
    raise at.error(
        name, value, "no such speaker", did_you_mean(str(value), {*known, *tags.speakers})
    )


def _calls(value: Any, name: str, at: RowAt) -> list[Any]:
    """The calls that a `function_call` writes as JSON: one object, or several in a list."""
    try:
        found = parsed_json(value) if isinstance(value, str) else value
    except ValueError as error:
        fix = 'write {"name": ..., "arguments": {...}}, or a list of such'
        raise at.error(name, value, f"a call is valid JSON: {error}", fix) from error
    return found if is_list(found) else [found]


def _own_weight(raw: Any, name: str, at: RowAt) -> float | None:
    fields: Mapping[str, Any] = raw if is_object(raw) else {}
    if fields.get(_SPANS):
        why = "parts of a message cannot be learned by themselves, only whole messages"
        raise at.error(f"{name}.{_SPANS}", fields[_SPANS], why, "use `weight` or `train`")
    said = next((key for key in WEIGHTS if fields.get(key) is not None), None)
    if said is None:
        return None
    value = fields[said]
    if not isinstance(value, bool | int | float) or not math.isfinite(value) or value < 0:
        why = "how much a message counts is true, false or a number from 0"
        raise at.error(f"{name}.{said}", value, why, "write 0 or 1")
    return float(value)
