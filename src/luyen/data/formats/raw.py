"""Raw rows with their places: every source that training reads, and CSV files besides."""

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from luyen.base.errors import UserError
from luyen.config.row_files import TABLE, row_files
from luyen.config.task_url import FIELD
from luyen.data.files import refuse_repeats
from luyen.data.rows import RowAt
from luyen.data.sources import raw_rows

FILE = "FILE"
"""What errors about the whole file call it."""


def placed_rows(address: str) -> Iterator[tuple[RowAt, Any]]:
    """Place and content of every row behind an address, one after the other."""
    try:
        for file, number, row in _numbered(address):
            yield RowAt(file=file, number=number), row
    except UserError as error:
        if error.field != FIELD:
            raise
        raise UserError(FILE, error.value, error.why, error.fix) from error


def place(at: RowAt, address: str) -> str:
    """Where a row stands, for a reader who knows the address that was asked for.

    Example:
        >>> place(RowAt(file="a.jsonl", number=3), "a.jsonl")
        'row 3'
        >>> place(RowAt(file="rows/a.jsonl", number=3), "rows")
        'a.jsonl row 3'
    """
    return f"row {at.number}" if at.file == address else f"{Path(at.file).name} row {at.number}"


def _numbered(address: str) -> Iterator[tuple[str, int, Any]]:
    files = [] if "://" in address else row_files(address, tables=True)
    if not files or files[0].suffix.lower() != TABLE:
        yield from raw_rows(address)
    for table in files:
        if table.suffix.lower() == TABLE:
            yield from _read_csv(table, address if len(files) == 1 else str(table))


def _read_csv(path: Path, name: str) -> Iterator[tuple[str, int, Any]]:
    """Rows of text under the names of the first line; the number is the line a row ends on."""
    csv.field_size_limit(2**31 - 1)
    try:
        with path.open(encoding="utf-8-sig", newline="") as lines:
            table = csv.DictReader(lines, restkey="", strict=True)
            refuse_repeats(table.fieldnames or (), path)
            for row in table:
                if "" in row or None in row.values():
                    why = f"line {table.line_num} has another number of cells than the first line"
                    raise UserError(FIELD, name, why, "quote cells that hold a comma or a newline")
                yield name, table.line_num, {k: v for k, v in row.items() if v != ""}
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(FIELD, name, f"cannot be read: {error}", "mend the file") from error
