"""Files of samples: every rollout of an evaluation with its prompt, answer and scores."""

import importlib
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from luyen.base.errors import UserError
from luyen.base.files import json_line, plain, read_lines, write_whole

_NESTED = ("prompt", "messages", "ground_truth", "score", "decoding")
"""Columns that Parquet holds as JSON text: their shape differs from row to row."""


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write the rows whole: JSON lines, or Parquet where the name ends so."""
    if path.suffix == ".parquet":
        _write_parquet(path, rows)
    else:
        write_whole(path, "".join(json_line(row) for row in rows))


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a file that `write_rows` wrote."""
    if not path.is_file():
        fix = "give files that `luyen eval --samples-out` wrote"
        raise UserError("samples", str(path), "no such file", fix)
    return _read_parquet(path) if path.suffix == ".parquet" else read_lines(path)


def _write_parquet(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    flat = [
        {n: json.dumps(plain(v), ensure_ascii=False) if n in _NESTED else v for n, v in row.items()}
        for row in rows
    ]
    pyarrow: Any = importlib.import_module("pyarrow")  # untyped, and slow to load
    parquet: Any = importlib.import_module("pyarrow.parquet")
    buffer = io.BytesIO()
    parquet.write_table(pyarrow.Table.from_pylist(flat), buffer, compression="zstd")
    write_whole(path, buffer.getvalue())


def _read_parquet(path: Path) -> list[dict[str, Any]]:
    parquet: Any = importlib.import_module("pyarrow.parquet")
    try:
        rows: list[dict[str, Any]] = parquet.read_table(path).to_pylist()
        return [
            {n: json.loads(v) if n in _NESTED and v is not None else v for n, v in row.items()}
            for row in rows
        ]
    except (ValueError, OSError) as error:
        why = f"it is damaged: {error}"
        raise UserError("samples", str(path), why, "write it again") from error
