"""Files of a model, read with suspicion: plain files of a sane size that hold what they should."""

import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast, final

_JSON_BYTES = 1 << 27
"""Most bytes of a JSON file; the largest tokenizers have some 30 MB."""


@final
class UnsoundFile(Exception):
    """A file of a model that cannot be used, why, and what to do.

    Example:
        >>> UnsoundFile("config.json", "it is empty", "fetch the model again").words
        'config.json: it is empty'
    """

    def __init__(self, file: str, why: str, fix: str = "fetch the model again") -> None:
        super().__init__(file, why, fix)
        self.file = file
        self.why = why
        self.fix = fix

    @property
    def words(self) -> str:
        """File and reason, as errors and findings have it."""
        return f"{self.file}: {self.why}"


def all_faults(found: Iterator[UnsoundFile]) -> list[UnsoundFile]:
    """Faults that are yielded, and the one that ends the search."""
    faults: list[UnsoundFile] = []
    try:
        for fault in found:
            faults.append(fault)
    except UnsoundFile as fault:
        faults.append(fault)
    return faults


def size_of(folder: Path, name: str) -> int | None:
    """Bytes of a plain file, links followed; None where there is none, UnsoundFile for others.

    Opening a FIFO would wait for ever, and a device may have no end.
    """
    try:
        found = os.stat(folder / name)
    except FileNotFoundError:
        if (folder / name).is_symlink():
            raise UnsoundFile(name, "it is a link to a file that is not there") from None
        return None
    except (OSError, ValueError) as error:
        raise UnsoundFile(name, f"it cannot be read: {_said(error)}", "mend the folder") from error
    if not stat.S_ISREG(found.st_mode):
        raise UnsoundFile(name, f"it is {kind_of(found.st_mode)}, not a file", "put the file there")
    return found.st_size


def kind_of(mode: int) -> str:
    """What stands where a file or a folder is expected."""
    kinds = {
        stat.S_ISREG: "a file",
        stat.S_ISDIR: "a folder",
        stat.S_ISFIFO: "a FIFO",
        stat.S_ISSOCK: "a socket",
        stat.S_ISCHR: "a device",
        stat.S_ISBLK: "a device",
    }
    return next((words for test, words in kinds.items() if test(mode)), "of no known kind")


def read_text(folder: Path, name: str) -> str | None:
    """Text of a file; None where there is none."""
    size = size_of(folder, name)
    if size is None:
        return None
    if size > _JSON_BYTES:
        raise UnsoundFile(name, f"it has {size:,} bytes, and {_JSON_BYTES:,} are allowed")
    try:
        return (folder / name).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UnsoundFile(name, f"it is no UTF-8 text: byte {error.start}") from error
    except OSError as error:
        raise UnsoundFile(name, f"it cannot be read: {_said(error)}", "mend the folder") from error


def read_json(folder: Path, name: str) -> Any:
    """What a JSON file holds; None where there is no file."""
    text = read_text(folder, name)
    if text is None:
        return None
    if not text.strip():
        raise UnsoundFile(name, "it is empty")
    try:
        return json.loads(text)
    except RecursionError:
        raise UnsoundFile(name, "it is nested too deeply") from None
    except ValueError as error:
        raise UnsoundFile(name, f"it is no JSON: {error}") from error


def read_object(folder: Path, name: str) -> dict[str, Any] | None:
    """The same for a file that must hold a JSON object."""
    found = read_json(folder, name)
    if found is None and size_of(folder, name) is None:
        return None
    if not isinstance(found, dict):
        raise UnsoundFile(name, f"it holds {shown(found)} where a JSON object is expected")
    return cast(dict[str, Any], found)


def shown(value: Any) -> str:
    """A value of a file in an error, never long."""
    if isinstance(value, list):
        return "a list"
    if isinstance(value, dict):
        return "an object"
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:60]}..."


def _said(error: OSError | ValueError) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
