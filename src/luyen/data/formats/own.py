"""The forms that Luyen writes: one per kind of row, read back to the same rows.

In a table (parquet) free-form values become JSON text, since a column has one type.
"""

import importlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from luyen.base.errors import UserError
from luyen.base.files import plain, writing
from luyen.base.leftovers import in_progress, sweep_beside, temporary_beside
from luyen.base.records import Message, Prompt
from luyen.base.suggest import did_you_mean
from luyen.data.formats.cells import EXTRA, KWARGS, TOOLS
from luyen.data.formats.records import (
    AnyRow,
    ConversationRow,
    LabelledRow,
    PreferenceRow,
    SteppedRow,
    TextRow,
)
from luyen.data.shapes import is_list, is_object

Lost: TypeAlias = Counter[str]
"""What could not be written -> how often."""
AS_TEXT = "value that JSON does not know, written as text"
_FREE = (TOOLS, KWARGS, EXTRA, "reward_model")


def own_form(row: AnyRow) -> dict[str, Any]:
    """The row as an object with our column names.

    Example:
        >>> own_form(TextRow(text="abc", extra_info={"page": 3}))
        {'text': 'abc', 'extra_info': {'page': 3}}
    """
    if isinstance(row, Prompt):
        return _prompt(row)
    match row:
        case TextRow():
            fields: dict[str, Any] = {"text": row.text}
        case ConversationRow():
            pairs = zip(row.messages, row.weights, strict=True)
            fields = {"messages": [_weighted(message, weight) for message, weight in pairs]}
        case PreferenceRow():
            fields = {
                "prompt": _plain(row.prompt),
                "chosen": _plain(row.chosen),
                "rejected": _plain(row.rejected),
                **({} if row.margin is None else {"margin": row.margin}),
            }
        case LabelledRow():
            fields = {"prompt": _plain(row.prompt), "completion": _plain(row.completion)}
            fields["label"] = row.label
        case SteppedRow():
            fields = {"prompt": _plain(row.prompt), "completions": list(row.steps)}
            fields["labels"] = list(row.labels)
    if not isinstance(row, TextRow):
        fields |= {TOOLS: [dict(tool) for tool in row.tools]} if row.tools else {}
        fields |= {KWARGS: dict(row.template_kwargs)} if row.template_kwargs else {}
    return fields | ({EXTRA: dict(row.extra_info)} if row.extra_info else {})


def write_rows(path: Path, rows: Iterable[AnyRow], lost: Lost) -> int:
    """Write the rows to a new file, whole or not at all; how many there were."""
    writer = WRITERS.get(path.suffix.lower())
    if writer is None:
        why = f"rows are not written to files that end in `{path.suffix}`"
        raise UserError("OUT", str(path), why, did_you_mean(path.suffix, WRITERS))
    if path.exists():
        raise UserError("OUT", str(path), "it exists", "name a new file")
    if not path.parent.is_dir():
        raise UserError("OUT", str(path), "its folder does not exist", f"make {path.parent}")
    sweep_beside(path)
    unfinished = temporary_beside(path)
    try:
        with writing(path, field="OUT"), in_progress(unfinished):
            count = writer(unfinished, rows, lost)
            unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
    return count


def _write_jsonl(path: Path, rows: Iterable[AnyRow], lost: Lost) -> int:
    count = 0
    with path.open("w", encoding="utf-8") as lines:
        for row in rows:
            lines.write(_json(own_form(row), lost) + "\n")
            count += 1
    return count


def _write_parquet(path: Path, rows: Iterable[AnyRow], lost: Lost) -> int:
    pyarrow: Any = importlib.import_module("pyarrow")  # untyped, and slow to load
    parquet: Any = importlib.import_module("pyarrow.parquet")
    table = [_in_columns(own_form(row), lost) for row in rows]
    names = dict.fromkeys(name for fields in table for name in fields)
    table = [{name: fields.get(name) for name in names} for fields in table]  # the first row rules
    try:
        made = pyarrow.Table.from_pylist(table)
    except (ValueError, TypeError) as error:  # what pyarrow raises about types
        why = f"the rows do not fit one table: {error}"
        raise UserError("OUT", str(path), why, "write a .jsonl file") from error
    parquet.write_table(made, path)
    return len(table)


WRITERS: dict[str, Callable[[Path, Iterable[AnyRow], Lost], int]] = {
    ".jsonl": _write_jsonl,
    ".parquet": _write_parquet,
}
"""Ending of a file's name -> how rows are written to it."""


def _in_columns(fields: dict[str, Any], lost: Lost) -> dict[str, Any]:
    """The fields with JSON text where two rows may disagree about types."""
    found: dict[str, Any] = {}
    for name, value in fields.items():
        if name in _FREE:
            found[name] = _json(value, lost)
        elif is_list(value) and value and is_object(value[0]):
            found[name] = [_calls_as_text(message, lost) for message in value]
        else:
            found[name] = value
    return found


def _calls_as_text(message: Mapping[str, Any], lost: Lost) -> dict[str, Any]:
    if "tool_calls" not in message:
        return dict(message)
    calls = [
        {**c, "function": {**c["function"], "arguments": _json(c["function"]["arguments"], lost)}}
        for c in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}


def _json(value: Any, lost: Lost) -> str:
    def as_text(odd: Any) -> str:
        lost[AS_TEXT] += 1
        return str(odd)

    return json.dumps(plain(value), ensure_ascii=False, allow_nan=False, default=as_text)


def _prompt(row: Prompt) -> dict[str, Any]:
    fields: dict[str, Any] = {"prompt": _plain(row.messages)}
    fields |= {"data_source": row.data_source} if row.data_source else {}
    truth = row.ground_truth
    fields |= {"reward_model": {"ground_truth": truth}} if truth is not None else {}
    fields |= {TOOLS: [dict(tool) for tool in row.tools]} if row.tools else {}
    return fields | ({EXTRA: dict(row.extra_info)} if row.extra_info else {})


def _plain(messages: Iterable[Message]) -> list[dict[str, Any]]:
    return [dict(message) for message in messages]


def _weighted(message: Message, weight: float) -> dict[str, Any]:
    usual = 1.0 if message["role"] == "assistant" else 0.0
    return dict(message) if weight == usual else {**message, "weight": weight}
