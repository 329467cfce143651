"""Hugging Face datasets: the only file that imports the `datasets` package."""

import importlib
from pathlib import Path
from typing import Any

from luyen.base.errors import UserError
from luyen.data.shapes import without_none
from luyen.data.task_url import FIELD, TaskUrl

_KEYS = ("split", "config", "revision")
_ONE, _SEVERAL = "state.json", "dataset_dict.json"


def hub_rows(url: TaskUrl) -> list[dict[str, Any]]:
    """Rows of `hf://org/name?split=train`, fetched or taken from the local cache."""
    url.refuse_unknown(_KEYS)
    datasets = _package(url.text)
    try:
        found = datasets.load_dataset(
            url.name,
            url.query.get("config"),
            split=url.query.get("split", "train"),
            revision=url.query.get("revision"),
        )
    except (OSError, ValueError) as error:
        why = f"cannot be loaded: {str(error).splitlines()[0]}"
        raise url.error(why, "mend the name, the split or the connection") from error
    return [without_none(row) for row in found]


def is_saved_dataset(directory: Path) -> bool:
    """Whether `save_to_disk` wrote the directory."""
    return any((directory / name).is_file() for name in (_ONE, _SEVERAL))


def saved_rows(directory: Path) -> list[dict[str, Any]]:
    """Rows of a directory that `save_to_disk` wrote; one of several splits must be named."""
    if (directory / _SEVERAL).is_file():
        splits = sorted(d.name for d in directory.iterdir() if (d / _ONE).is_file())
        fix = " or ".join(str(directory / split) for split in splits)
        why = "the directory holds several splits"
        raise UserError(FIELD, str(directory), why, f"name one: {fix}")
    found = _package(str(directory)).load_from_disk(str(directory))
    return [without_none(row) for row in found]


def _package(address: str) -> Any:
    try:
        return importlib.import_module("datasets")
    except ImportError as error:
        fix = 'install it: pip install "luyen[datasets]"'
        raise UserError(FIELD, address, "the datasets package is not installed", fix) from error
