"""Rows that a Python program has: lists of dicts, Arrow and pandas tables, Hugging Face datasets.

They are written once as a file, and read, checked and fingerprinted like any other file: a run that
resumes, or is read later, has its rows.
"""

import hashlib
import importlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

from luyen.base.boundary import boundary, last_line
from luyen.base.errors import UserError
from luyen.base.files import in_progress, sync, temporary_path, write_whole, writing
from luyen.data.raw_values import without_none

_SPLITS = {"train": ("train",), "validation": ("validation", "test", "eval")}
_PART = 10_000
"""Rows of a dataset that are written at a time."""
_FIX = "give dicts of plain values, an Arrow or pandas table, a datasets.Dataset, or names of files"


def is_dataset_dict(value: Any) -> bool:
    """Whether an object is a `datasets.DatasetDict`: splits by name, and a mapping besides.

    Example:
        >>> is_dataset_dict({"train": []})
        False
    """
    return _kind(value) == "datasets.DatasetDict"


def splits(value: Any) -> tuple[Any, Any]:
    """Training and validation rows of a `DatasetDict`; None where it has no such split."""
    named = cast(Mapping[str, Any], value)
    found = {
        kind: next((named[n] for n in names if n in named), None) for kind, names in _SPLITS.items()
    }
    if found["train"] is None:
        why = "it has no split `train`"
        raise UserError(
            "data", sorted(named), why, "give the rows of one split: data=dataset[NAME]"
        )
    return found["train"], found["validation"]


def are_addresses(value: Any) -> bool:
    """Whether a value names files or sources of rows, as the configuration does.

    Example:
        >>> are_addresses("rows.jsonl"), are_addresses([{"prompt": "a"}])
        (True, False)
    """
    if isinstance(value, str | Path):
        return True
    is_list = isinstance(value, list | tuple) and bool(cast(list[Any], value))
    return is_list and all(isinstance(one, str | Path) for one in cast(list[Any], value))


def write_rows(value: Any, folder: Path, stem: str, *, field: str = "data") -> Path:
    """Write rows as `STEM-DIGEST.parquet` or, for rows that are dicts, `.jsonl`.

    Rows are not changed: tables are written as parquet, dicts as JSON, line by line. A UserError
    names the row that cannot be written.
    """
    if _kind(value) == "datasets.Dataset":
        return _write_dataset(value, folder, stem, field)
    table = _table(value, field)
    content, ending = (
        (_parquet(table), "parquet")
        if table is not None
        else (
            _lines(value, field),
            "jsonl",
        )
    )
    digest = hashlib.blake2b(content, digest_size=6).hexdigest()
    path = (folder / f"{stem}-{digest}.{ending}").absolute()
    if not path.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(path, content)
    return path


def _kind(value: Any) -> str:
    kind = cast(type[Any], type(value))
    return f"{kind.__module__.partition('.')[0]}.{kind.__name__}"


def _table(value: Any, field: str) -> Any:
    """The value as an Arrow table; None where it is none of the tables we know."""
    arrow: Any = importlib.import_module("pyarrow")
    kind = _kind(value)
    if kind == "pandas.DataFrame":
        return _from_pandas(value, field)
    if kind == "pyarrow.RecordBatch":
        return arrow.Table.from_batches([value])
    return value if kind == "pyarrow.Table" else None


def _from_pandas(frame: Any, field: str) -> Any:
    arrow: Any = importlib.import_module("pyarrow")
    try:
        return arrow.Table.from_pandas(frame, preserve_index=False)
    except (arrow.ArrowException, ValueError, TypeError) as error:
        why = f"a column cannot be written: {str(error).splitlines()[0]}"
        raise UserError(field, "DataFrame", why, "give its columns plain values") from error


def _write_dataset(dataset: Any, folder: Path, stem: str, field: str) -> Path:
    """A dataset as parquet, part by part: it may be larger than memory."""
    parquet: Any = importlib.import_module("pyarrow.parquet")
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = temporary_path(folder / f"{stem}.parquet")
    with writing(folder), in_progress(unfinished):
        try:
            writer: Any = None
            for part in dataset.with_format("arrow").iter(batch_size=_PART):
                plain = part.replace_schema_metadata(None)
                writer = writer or parquet.ParquetWriter(unfinished, plain.schema)
                writer.write_table(plain)
            if writer is None:
                raise UserError(field, "[]", "there are no rows in it", "give at least one row")
            writer.close()
            sync(unfinished)
            with unfinished.open("rb") as file:
                digest = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=6))
            path = (folder / f"{stem}-{digest.hexdigest()}.parquet").absolute()
            if not path.is_file():
                unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)
    return path


def _parquet(table: Any) -> bytes:
    arrow: Any = importlib.import_module("pyarrow")
    parquet: Any = importlib.import_module("pyarrow.parquet")
    sink = arrow.BufferOutputStream()
    # Without the schema's own notes: pandas and datasets leave theirs, which are no rows.
    parquet.write_table(table.replace_schema_metadata(None), sink)
    return bytes(sink.getvalue())


def _lines(value: Any, field: str) -> bytes:
    if isinstance(value, Mapping) or not isinstance(value, Iterable):
        raise UserError(field, _kind(value), "it is no list of rows", _FIX)
    lines: list[str] = []
    faults: list[BaseException] = []
    with boundary(faults):  # rows are objects of the user, and so are their methods
        for number, row in enumerate(cast(Iterable[Any], value), 1):
            lines.append(_line(row, f"row {number}", field))
    if faults and isinstance(faults[0], UserError):
        raise faults[0]
    if faults:
        why = f"it raised after {len(lines)} rows: {last_line(faults[0])}"
        raise UserError(field, _kind(value), why, _FIX) from faults[0]
    if not lines:
        raise UserError(field, "[]", "there are no rows in it", "give at least one row")
    return ("\n".join(lines) + "\n").encode()


def _line(row: Any, at: str, field: str) -> str:
    """A row as a line of JSON; a UserError that names it where it is no row."""
    if not isinstance(row, Mapping):
        why = f"{at} is of type {type(row).__name__}, and a row is a dict"
        raise UserError(field, _kind(row), why, _FIX)
    plain = dict(cast(Mapping[Any, Any], row))
    try:
        _refuse_odd_keys(plain)
        line = json.dumps(without_none(plain), ensure_ascii=False, allow_nan=False)
        line.encode()
    except (TypeError, ValueError, RecursionError) as error:
        why = f"{at} cannot be written as JSON: {error}"
        raise UserError(field, [str(key) for key in plain][:9], why, _FIX) from error
    return line


def _refuse_odd_keys(value: Any) -> None:
    """A TypeError for a key that is no text: JSON would make text of it."""
    if isinstance(value, dict):
        for key, inner in cast(dict[Any, Any], value).items():
            if not isinstance(key, str):
                raise TypeError(f"the key {key!r} is no text")
            _refuse_odd_keys(inner)
    elif isinstance(value, list | tuple):
        for inner in cast(list[Any], value):
            _refuse_odd_keys(inner)
