"""Which files an address without a scheme stands for, before any of them is opened."""

import os
from pathlib import Path

from luyen.base.errors import UserError
from luyen.base.paths import exists, expanded, is_directory
from luyen.base.reading import require_file
from luyen.base.suggest import did_you_mean
from luyen.config.task_url import FIELD

ENDINGS = (".parquet", ".json", ".jsonl")
TABLE = ".csv"
"""Read where rows are learned from as they are, and by `luyen data`."""
SAVED_ONE, SAVED_SEVERAL = "state.json", "dataset_dict.json"
"""What `save_to_disk` leaves in a directory."""


def row_files(address: str, *, tables: bool = False) -> list[Path]:
    """The files in which the rows are, in order; a dataset that was saved is one directory.

    A UserError where there is none, or one that is no file, is empty, or has another ending. With
    `tables`, CSV files count, in a directory where there are no others.
    """
    path = expanded(address)
    if not exists(address):
        raise UserError(FIELD, address, "no such file on this machine", "mend the path")
    if not is_directory(address):
        return [_readable(path, (*ENDINGS, TABLE) if tables else ENDINGS)]
    try:
        names = sorted(os.listdir(path))
    except OSError as error:
        raise UserError(FIELD, address, f"cannot be read: {error}", "mend it") from error
    if SAVED_SEVERAL in names:
        splits = [name for name in names if (path / name / SAVED_ONE).is_file()]
        fix = " or ".join(str(path / split) for split in splits)
        raise UserError(FIELD, address, "the directory holds several splits", f"name one: {fix}")
    if SAVED_ONE in names:
        return [path]
    found = [name for name in names if name.lower().endswith(ENDINGS)]
    if tables and not found:
        found = [name for name in names if name.lower().endswith(TABLE)]
    if not found:
        why = "the directory holds neither a saved dataset nor files of rows"
        raise UserError(FIELD, str(path), why, f"add files ending in {', '.join(ENDINGS)}")
    return [_readable(path / name, (*ENDINGS, TABLE)) for name in found]


def _readable(path: Path, endings: tuple[str, ...]) -> Path:
    if path.suffix.lower() not in endings:
        why = f"no reader for files that end in `{path.suffix}`"
        raise UserError(FIELD, str(path), why, did_you_mean(path.suffix, endings))
    try:
        size = require_file(path).stat().st_size
    except OSError as error:
        raise UserError(FIELD, str(path), f"cannot be read: {error}", "mend the path") from error
    if not size:
        raise UserError(FIELD, str(path), "there are no rows in it", "mend it, or drop it")
    return path
