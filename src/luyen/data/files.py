"""Raw rows with their numbers from parquet, JSON and JSONL files."""

import importlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from luyen.base.errors import UserError
from luyen.config.task_url import FIELD
from luyen.data.shapes import is_list, raw_json, without_none

Numbered: TypeAlias = Iterator[tuple[int, Any]]
"""Row numbers, from 1, with raw rows."""
_BATCH = 1024
"""Rows of a parquet file that are unpacked at a time."""


def read_file(path: Path) -> Numbered:
    """The rows of a file, by its ending; the number of a JSONL row is its line.

    The file is one that `row_files` found. A UserError names what in it is no row.
    """
    try:
        yield from READERS[path.suffix.lower()](path)
    except (OSError, UnicodeDecodeError) as error:
        why = f"cannot be read: {str(error).strip().splitlines()[0]}"
        raise UserError(FIELD, str(path), why, "mend the file") from error


def _read_parquet(path: Path) -> Numbered:
    arrow: Any = importlib.import_module("pyarrow")  # untyped, and slow to load
    parquet: Any = importlib.import_module("pyarrow.parquet")
    number = 0
    try:
        file = parquet.ParquetFile(path)
        refuse_repeats(file.schema_arrow.names, path)
        for batch in file.iter_batches(batch_size=_BATCH):
            for row in batch.to_pylist():
                number += 1
                yield number, without_none(row)
    except (ValueError, arrow.ArrowException, RecursionError, MemoryError) as error:
        after = f" after row {number}" if number else ""
        why = f"not a parquet file{after}: {str(error).splitlines()[0] if str(error) else error!r}"
        raise UserError(FIELD, str(path), why, "mend the file or its ending") from error


def refuse_repeats(columns: Sequence[str], path: Path) -> None:
    """A UserError where two columns have one name: one of them would be lost."""
    twice = next((name for name, times in Counter(columns).items() if times > 1), None)
    if twice is not None:
        why = f"the column `{twice}` is there twice"
        raise UserError(FIELD, str(path), why, "drop or rename one of them")


def _read_json(path: Path) -> Numbered:
    try:
        rows = raw_json(path.read_text(encoding="utf-8-sig"))
    except UnicodeDecodeError:
        raise
    except ValueError as error:
        fix = "mend the file; one object per line is a .jsonl file"
        raise UserError(FIELD, str(path), f"not valid JSON: {error}", fix) from error
    if not is_list(rows):
        why = "a JSON file of rows holds one list"
        raise UserError(FIELD, str(path), why, "write [{...}, {...}]")
    yield from enumerate(rows, 1)


def _read_jsonl(path: Path) -> Numbered:
    with path.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = raw_json(line)
            except ValueError as error:
                why = f"line {number} is not valid JSON: {error}"
                raise UserError(FIELD, str(path), why, "mend the line") from error
            yield number, row


READERS: dict[str, Callable[[Path], Numbered]] = {
    ".parquet": _read_parquet,
    ".json": _read_json,
    ".jsonl": _read_jsonl,
}
"""Ending of a file's name -> how it is read."""
