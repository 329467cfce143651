"""Raw rows with their numbers from parquet, JSON and JSONL files."""

import importlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

from luyen.base.errors import UserError
from luyen.base.suggest import did_you_mean
from luyen.data.shapes import is_list, without_none
from luyen.data.task_url import FIELD

Numbered: TypeAlias = Iterator[tuple[int, Any]]
"""Row numbers, from 1, with raw rows."""


def read_file(path: Path) -> Numbered:
    """The rows of a file, by its ending; the number of a JSONL row is its line."""
    reader = READERS.get(path.suffix.lower())
    if reader is None:
        why = f"no reader for files that end in `{path.suffix}`"
        raise UserError(FIELD, str(path), why, did_you_mean(path.suffix, READERS))
    try:
        yield from reader(path)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(FIELD, str(path), f"cannot be read: {error}", "mend the file") from error


def _read_parquet(path: Path) -> Numbered:
    parquet: Any = importlib.import_module("pyarrow.parquet")  # untyped, and slow to load
    try:
        table = parquet.read_table(path)
    except ValueError as error:
        why = f"not a parquet file: {error}"
        raise UserError(FIELD, str(path), why, "mend the file or its ending") from error
    yield from enumerate(map(without_none, table.to_pylist()), 1)


def _read_json(path: Path) -> Numbered:
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        fix = "mend the file; one object per line is a .jsonl file"
        raise UserError(FIELD, str(path), f"not valid JSON: {error}", fix) from error
    if not is_list(rows):
        why = "a JSON file of rows holds one list"
        raise UserError(FIELD, str(path), why, "write [{...}, {...}]")
    yield from enumerate(rows, 1)


def _read_jsonl(path: Path) -> Numbered:
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                why = f"line {number} is not valid JSON: {error}"
                raise UserError(FIELD, str(path), why, "mend the line") from error
            yield number, row


READERS: dict[str, Callable[[Path], Numbered]] = {
    ".parquet": _read_parquet,
    ".json": _read_json,
    ".jsonl": _read_jsonl,
}
"""Ending of a file's name -> how it is read."""
