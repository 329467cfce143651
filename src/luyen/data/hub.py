"""Hugging Face datasets: the only file that imports the `datasets` package."""

import importlib
from pathlib import Path
from typing import Any

from luyen.base.errors import UserError
from luyen.config.task_sources import read_hub
from luyen.config.task_url import FIELD, TaskUrl
from luyen.data.shapes import without_none


def hub_rows(url: TaskUrl) -> list[dict[str, Any]]:
    """Rows of `hf://org/name?split=train`, fetched or taken from the local cache."""
    said = read_hub(url)
    datasets = _package(url.text)
    try:
        found = datasets.load_dataset(
            url.name,
            said.get("config"),
            split=said.get("split", "train"),
            revision=said.get("revision"),
        )
    except (OSError, ValueError) as error:
        why = f"cannot be loaded: {str(error).splitlines()[0]}"
        raise url.error(why, "mend the name, the split or the connection") from error
    return [without_none(row) for row in found]


def saved_rows(directory: Path) -> list[dict[str, Any]]:
    """Rows of a directory that `save_to_disk` wrote."""
    datasets = _package(str(directory))
    try:
        found = datasets.load_from_disk(str(directory))
        return [without_none(row) for row in found]
    except (OSError, ValueError, KeyError, TypeError) as error:
        why = f"cannot be read: {type(error).__name__}: {error}"
        raise UserError(FIELD, str(directory), why, "save it anew") from error


def _package(address: str) -> Any:
    try:
        return importlib.import_module("datasets")
    except ImportError as error:
        fix = 'install it: pip install "luyen[datasets]"'
        raise UserError(FIELD, address, "the datasets package is not installed", fix) from error
