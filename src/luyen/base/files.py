"""Files that are whole or absent, and lines that survive the death of their writer.

A file is written beside its place and renamed onto it, so a reader sees the old content or the new
one. A line goes to its file in one `write`, so a killed process leaves whole lines; after a loss of
power the last line may be torn, and only the last.
"""

import errno
import json
import math
import os
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import Any, cast

from luyen.base.errors import UserError
from luyen.base.leftovers import in_progress, temporary_beside
from luyen.base.parsing import parse_json
from luyen.base.reading import read_bytes

_RESUME = "make room or mend the permissions, and resume; earlier checkpoints are intact"


def sync(path: Path) -> None:
    """Force a file, or the entries of a directory, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_whole(path: Path, content: bytes | str, *, is_private: bool = False) -> None:
    """Put the content at `path`; whoever looks sees all of it or what was there before.

    A private file is readable by its owner alone, from its first byte on.
    """
    data = content.encode() if isinstance(content, str) else content
    unfinished = temporary_beside(path)
    with writing(path), in_progress(unfinished):
        try:
            if is_private:
                unfinished.touch(0o600, exist_ok=False)
            unfinished.write_bytes(data)
            sync(unfinished)
            unfinished.replace(path)
            sync(path.parent)
        finally:
            unfinished.unlink(missing_ok=True)


@contextmanager
def writing(path: Path, *, field: str = "file", fix: str = _RESUME) -> Generator[None]:
    """Turn what the disk refuses inside into a UserError that names the file and the reason.

    Example:
        >>> try:
        ...     with writing(Path("metrics.jsonl")):
        ...         raise OSError(28, "No space left on device")
        ... except UserError as error:
        ...     print(error.value, error.why)
        metrics.jsonl it could not be written: No space left on device
    """
    try:
        yield
    except OSError as error:
        why = f"it could not be written: {error.strerror or error}"
        raise UserError(field, str(path), why, fix) from error


def append(file: FileIO, data: bytes) -> None:
    """Add data to an unbuffered file in one write; a UserError when the disk does not take it."""
    with writing(Path(str(file.name))):
        taken = file.write(data)
        if taken != len(data):  # the last room of a disk takes a part, and the next write fails
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def plain(value: Any) -> Any:
    """The value as standard JSON can hold it: a float that is not finite becomes its name.

    `float` reads the names back, so nothing is lost where a number is expected.

    Example:
        >>> plain({"loss": float("nan"), "steps": (1, 2)})
        {'loss': 'nan', 'steps': [1, 2]}
    """
    if isinstance(value, float) and not math.isfinite(value):
        return str(float(value))
    if isinstance(value, Mapping):
        pairs = cast(Mapping[Any, Any], value).items()
        return {str(name): plain(inner) for name, inner in pairs}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [plain(inner) for inner in cast(Sequence[Any], value)]
    return value


def json_line(value: Mapping[str, Any]) -> str:
    """One line of JSON with sorted keys: equal content gives equal bytes."""
    return _in_utf8(json.dumps(plain(value), sort_keys=True, ensure_ascii=False, allow_nan=False))


def json_page(value: Mapping[str, Any]) -> str:
    """Indented JSON for a file that people open."""
    return _in_utf8(json.dumps(plain(value), indent=2, ensure_ascii=False, allow_nan=False))


def _in_utf8(text: str) -> str:
    """The text and a newline; bytes of a path that are no UTF-8 become escapes, as JSON has it."""
    return text.encode(errors="backslashreplace").decode() + "\n"


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; a UserError when it is missing, unreadable or damaged."""
    try:
        found = parse_json(read_bytes(path))
    except FileNotFoundError as error:
        raise UserError("file", str(path), "it is missing", "restore it from a copy") from error
    except OSError as error:
        why = f"it cannot be read: {error.strerror or error}"
        raise UserError("file", str(path), why, "mend what is in the way") from error
    except ValueError as error:
        why = f"it is damaged: {error}"
        raise UserError("file", str(path), why, "restore it from a copy") from error
    if not isinstance(found, dict):
        why = "it holds no JSON object"
        raise UserError("file", str(path), why, "restore it from a copy")
    return cast(dict[str, Any], found)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSONL file; a torn last line is left out, any other damage is an error."""
    try:
        data = read_bytes(path)
    except FileNotFoundError:
        raise
    except OSError as error:
        why = f"it cannot be read: {error.strerror or error}"
        raise UserError("file", str(path), why, "mend what is in the way") from error
    whole = data.split(b"\n")[:-1]  # what follows the last newline is torn, or empty
    found: list[dict[str, Any]] = []
    for number, line in enumerate(whole, 1):
        entry = _entry(line)
        if entry is None:
            why = f"line {number} is damaged"
            raise UserError("file", str(path), why, "restore it from a copy, or remove the line")
        found.append(entry)
    return found


def _entry(line: bytes) -> dict[str, Any] | None:
    try:
        found = parse_json(line)
    except ValueError:
        return None
    return cast(dict[str, Any], found) if isinstance(found, dict) else None
