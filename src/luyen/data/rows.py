"""One raw row to one prompt. What is wrong is said with file, row and field."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, final

from luyen.base.errors import UserError
from luyen.base.records import Message, Prompt, make_prompt
from luyen.data.messages import check_conversation, check_tools
from luyen.data.shapes import is_object

MESSAGES = "messages"
_VERL = ("reward_model", "extra_info", "tools")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """Which column holds what.

    Example:
        >>> Columns(prompt="question", ground_truth="answer").data_source
        'data_source'
    """

    prompt: str = "prompt"
    """The prompt as messages; where a row lacks it, `messages` is taken."""
    data_source: str = "data_source"
    """What selects the reward."""
    ground_truth: str | None = None
    """The answer; None: `reward_model.ground_truth`, as verl writes it."""
    string_prompts: Literal["refuse", "user"] = "refuse"
    """Whether a prompt that is plain text is refused or becomes one user message."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RowAt:
    """Where a row stands; it writes the errors about it.

    Example:
        >>> print(RowAt(file="a.jsonl", number=3).error("prompt", 7, "no text", "mend it"))
        a.jsonl row 3: prompt = 7: no text. Fix: mend it
    """

    file: str
    """File or address."""
    number: int
    """Line of a JSONL file, otherwise the place in the file, from 1."""

    def __str__(self) -> str:
        return f"{self.file} row {self.number}"

    def error(self, field: str, value: Any, why: str, fix: str) -> UserError:
        """An error about a field of this row."""
        return UserError(f"{self}: {field}", _short(value), why, fix)


def read_row(row: Any, at: RowAt, columns: Columns) -> Prompt:
    """The prompt of a verl row, of a plain conversation, or of a tool-calling trace.

    Columns that are none of ours travel in `extra_info`; what the row's own `extra_info` says under
    the same name wins.

    Example:
        >>> row = {"prompt": [{"role": "user", "content": "1+1="}], "data_source": "sums",
        ...        "reward_model": {"ground_truth": "2"}, "ability": "math"}
        >>> prompt = read_row(row, RowAt(file="a.jsonl", number=1), Columns())
        >>> prompt.ground_truth, dict(prompt.extra_info)
        ('2', {'ability': 'math'})
    """
    if not is_object(row):
        raise at.error("row", row, "a row is an object with named fields", "write {...}")
    fields = row
    name = columns.prompt if fields.get(columns.prompt) is not None else MESSAGES
    if fields.get(name) is None:
        why = f"there is neither `{columns.prompt}` nor `{MESSAGES}`; it has {', '.join(fields)}"
        raise at.error(columns.prompt, None, why, "set data.prompt_key to the column")
    return make_prompt(
        _messages(fields[name], name, at, columns),
        tools=check_tools(decoded(fields.get("tools"), "tools", at), at.error),
        data_source=_data_source(fields, at, columns),
        ground_truth=_ground_truth(fields, at, columns),
        extra_info=_extra_info(fields, name, at, columns),
    )


def is_plain_text(row: Any, columns: Columns) -> bool:
    """Whether the row's prompt is a bare string, which skips the chat template elsewhere."""
    return is_object(row) and isinstance(row.get(columns.prompt), str)


def _messages(value: Any, name: str, at: RowAt, columns: Columns) -> list[Message]:
    if isinstance(value, str):
        if columns.string_prompts == "refuse":
            why = "a prompt is a list of messages; plain text would have to skip the chat template"
            fix = (
                'write [{"role": "user", "content": ...}], or set data.string_prompts=user '
                "to make each text one user message"
            )
            raise at.error(name, value, why, fix)
        value = [{"role": "user", "content": value}]
    return check_conversation(value, name, at.error)


def _data_source(fields: Mapping[str, Any], at: RowAt, columns: Columns) -> str:
    value = fields.get(columns.data_source)
    if value is None:
        return ""
    if not isinstance(value, str):
        why = "the source that selects a reward is a name"
        raise at.error(columns.data_source, value, why, "write a string")
    return value


def _ground_truth(fields: Mapping[str, Any], at: RowAt, columns: Columns) -> Any:
    if columns.ground_truth is not None:
        if columns.ground_truth not in fields:
            why = f"the row has no such column; it has {', '.join(fields)}"
            raise at.error(columns.ground_truth, None, why, "mend data.ground_truth_key")
        return fields[columns.ground_truth]
    return _mapping(fields, "reward_model", at).get("ground_truth")


def _extra_info(
    fields: Mapping[str, Any], name: str, at: RowAt, columns: Columns
) -> dict[str, Any]:
    taken = {name, columns.data_source, columns.ground_truth, *_VERL}
    others = {k: v for k, v in fields.items() if k not in taken and v is not None}
    return others | _mapping(fields, "extra_info", at)


def _mapping(fields: Mapping[str, Any], name: str, at: RowAt) -> dict[str, Any]:
    value = decoded(fields.get(name), name, at)
    if value is None:
        return {}
    if not is_object(value):
        raise at.error(name, value, "an object with named fields is expected", "write {...}")
    return value


def decoded(value: Any, name: str, at: RowAt) -> Any:
    """The value; text is read as JSON, since columnar files often store such columns so."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except json.JSONDecodeError as error:
        why = f"text in this column must be JSON: {error}"
        raise at.error(name, value, why, "store the value itself, or valid JSON") from error


def _short(value: Any) -> Any:
    text = str(value)
    return value if len(text) <= 80 else text[:77] + "..."
