"""One raw row read column by column, message lists of other projects included; errors name it."""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal, TypeAlias, final

from luyen.base.errors import did_you_mean
from luyen.base.records import Message
from luyen.data.formats.detect import Format, Tags
from luyen.data.messages import ROLES, check_conversation, check_tools
from luyen.data.raw_values import is_list, is_object, parsed_json
from luyen.data.rows import RowAt, check_plain, decoded

# Message lists of foreign formats, converted to ours: roles, tool calls, weights.
#
# Two layouts are read: `role`/`content`, with our role names, and `from`/`value`, with many names
# per role and calls as JSON text.

CALL = "function_call"
SPEAKERS = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "bot", "model"), "assistant"),
    **dict.fromkeys(("observation", "tool", "function_response"), "tool"),
    "system": "system",
    CALL: CALL,
}
"""Speaker in a `from` field -> our role; a call becomes an assistant message."""
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
        why = f"the message has no role: it has {', '.join(raw) or 'no field'}"
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


StringPrompts: TypeAlias = Literal["refuse", "user"]
"""Whether plain text where messages are meant is refused, or becomes one message."""
TOOLS, KWARGS, EXTRA = "tools", "chat_template_kwargs", "extra_info"
_MEDIA = ("image", "images", "video", "videos", "audio", "audios")
_TRUE, _FALSE = ("true", "1", "yes"), ("false", "0", "no")


@final
class Cells:
    """A row of a file under the format of the file."""

    def __init__(self, row: Any, at: RowAt, format: Format, strings: StringPrompts) -> None:
        """Refuses what is no row, what is no text, and rows with pictures or sound."""
        if not is_object(row):
            raise at.error("row", row, "a row is an object with named fields", "write {...}")
        self._row = row
        self.at = at
        self.format = format
        self._strings: StringPrompts = strings
        self.num_texts = 0
        """Plain texts that became messages."""
        check_plain(row, at)
        for name in _MEDIA:
            if row.get(name):
                raise at.error(name, row[name], "Luyen trains text models", "drop the rows with it")

    def has(self, name: str) -> bool:
        """Whether the column is there and filled."""
        return self._row.get(self.format.column(name)) is not None

    def value(self, name: str) -> Any:
        """What the column holds, as it is."""
        if not self.has(name):
            why = f"the row has no such column; it has {', '.join(self._row) or 'none'}"
            raise self.error(name, None, why, "add it, or drop the row")
        return self._row[self.format.column(name)]

    def error(self, name: str, value: Any, why: str, fix: str) -> Exception:
        """An error about a column of this row, under the file's own name for it."""
        return self.at.error(self.format.column(name), value, why, fix)

    def text(self, name: str) -> str:
        """A column of text."""
        value = self.value(name)
        if not isinstance(value, str):
            raise self.error(name, value, "this column holds text", "write a string")
        return value

    def optional_text(self, name: str) -> str:
        """A column of text that may be absent."""
        return self.text(name) if self.has(name) else ""

    def messages(self, name: str) -> tuple[list[Message], tuple[float, ...]]:
        """A column of messages, possibly as JSON text, with the weight of each."""
        column = self.format.column(name)
        value = decoded(self.value(name), column, self.at)
        found, own = read_messages(value, column, self.at, self.format.tags)
        return found, learned(found, own, column, self.at)

    def said(self, name: str, role: str) -> list[Message]:
        """Messages, one message, or plain text, which is then said by `role`."""
        value = self.value(name)
        column = self.format.column(name)
        if isinstance(value, str):
            if self._strings == "refuse":
                why = "plain text would have to skip the chat template"
                fix = (
                    f'write [{{"role": "{role}", "content": ...}}], or set '
                    "data.string_prompts=user to make each text one message"
                )
                raise self.error(name, value, why, fix)
            self.num_texts += 1
            return [{"role": role, "content": value}]
        messages = [value] if is_object(value) else value
        return read_messages(messages, column, self.at, self.format.tags)[0]

    def truth(self, name: str) -> bool:
        """A column of yes and no."""
        value = self.value(name)
        if isinstance(value, bool):
            return value
        if str(value).lower() in (*_TRUE, *_FALSE):
            return str(value).lower() in _TRUE
        raise self.error(name, value, "a label is true or false", "write true or false")

    def number(self, name: str) -> float | None:
        """A column with a number that may be absent."""
        value = self._row.get(self.format.column(name))
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(name, value, "this column holds a number", "write a number")
        if not math.isfinite(value):
            raise self.error(name, value, "the number is not finite", "write a number")
        return float(value)

    def each(self, name: str) -> list[Any]:
        """A column that holds a list, possibly as JSON text."""
        column = self.format.column(name)
        value = decoded(self.value(name), column, self.at)
        if not is_list(value):
            raise self.error(name, value, "this column holds a list", "write [...]")
        return value

    def shared(self) -> dict[str, Any]:
        """The columns that every format may add: tools, template arguments, extra columns."""
        column = self.format.column(TOOLS)
        tools = decoded(self._row.get(column) or None, column, self.at)
        return {
            "tools": tuple(check_tools(tools, self.at.error)),
            "template_kwargs": self._object(KWARGS),
            "extra_info": self.extra_info(),
        }

    def extra_info(self) -> dict[str, Any]:
        """The columns that the format does not read; those of `extra_info` itself win."""
        form = self.format.form
        names: Sequence[str] = (*form.needs, *form.may, TOOLS, KWARGS, EXTRA)
        taken = {self.format.column(name) for name in names}
        extra = {k: v for k, v in self._row.items() if k not in taken and v is not None}
        return extra | self._object(EXTRA)

    def _object(self, name: str) -> dict[str, Any]:
        value = decoded(self._row.get(name) or None, name, self.at)
        if value is None:
            return {}
        if not is_object(value):
            why = "an object with named fields is expected"
            raise self.at.error(name, value, why, "write {...}")
        return value

    def raw(self) -> Mapping[str, Any]:
        """The row as the file has it."""
        return self._row

    @property
    def strings(self) -> StringPrompts:
        """What happens to plain text."""
        return self._strings
