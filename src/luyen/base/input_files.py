"""Files that a user names: paths expanded, size bounded, JSON and YAML parsed or a ValueError.

Whatever is wrong, with the name, the kind or the content, is an OSError that says so.
"""

import json
import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, cast

import yaml

from luyen.base.system import flags

MOST_BYTES = 8 * 2**20
"""Size of the largest text that is read as a configuration, a list of tools or a plugin."""
MOST_RECORDS = 2**30
"""Size of the largest file of a run that is read whole: a million steps have less metrics."""
_BLOCK = 2**20
"""Bytes that are read of a file that says it is smaller, as those of /proc do."""
_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def require_file(path: Path) -> Path:
    """The path, if a regular file is there. Nothing is opened: opening a pipe would block.

    Example:
        >>> require_file(Path("/dev/null"))
        Traceback (most recent call last):
        OSError: it is a device, not a file
    """
    try:
        mode = path.stat().st_mode
    except ValueError as error:  # a NUL, or half of a surrogate pair, in the name
        raise OSError(f"no file can have this name: {error}") from error
    if not stat.S_ISREG(mode):
        kind = _KINDS.get(stat.S_IFMT(mode), "something else")
        raise OSError(f"it is {kind}, not a file")
    return path


def read_text(path: Path, *, most_bytes: int = MOST_BYTES) -> str:
    """The UTF-8 text of a regular file of at most `most_bytes` bytes, without a byte-order mark."""
    data = read_bytes(path, most_bytes=most_bytes)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise OSError(f"line {line} is not UTF-8: {error.reason}") from error


def read_bytes(path: Path, *, most_bytes: int = MOST_RECORDS) -> bytes:
    """The content of an untrusted regular file of at most `most_bytes` bytes.

    Example:
        >>> read_bytes(Path("/dev/zero"))
        Traceback (most recent call last):
        OSError: it is a device, not a file
    """
    data = _read(require_file(path), most_bytes)
    if len(data) > most_bytes:
        raise OSError(f"it is larger than the {most_bytes:,} bytes that are read")
    return data


def _read(path: Path, most: int) -> bytes:
    # Between the look and the opening another kind of file may have come: it must not block either.
    handle = os.open(path, os.O_RDONLY | flags("O_NONBLOCK", "O_CLOEXEC", "O_BINARY"))
    with os.fdopen(handle, "rb") as file:
        seen = os.fstat(handle)
        if not stat.S_ISREG(seen.st_mode):
            raise OSError("it is no longer a file")
        if seen.st_size > most:  # as large as it says: a hole costs its writer nothing
            raise OSError(f"it is larger than the {most:,} bytes that are read")
        # Do not request more than there can be: `read` allocates all of it first.
        return file.read(min(max(seen.st_size, _BLOCK), most) + 1)


# Parsing of untrusted JSON and YAML: a value, or a ValueError.
#
# A recursive parser overflows the stack on deep nesting, and YAML's C parser crashes the process.
# Input that is nested deeper than any file of ours is therefore refused.

DEEPEST = 200
"""Levels of nesting that are read; the records of a run have less than twenty."""
_DEEP = "it is nested too deeply"


def parse_json(text: bytes | str) -> Any:
    """The value of a JSON text; a ValueError when it is none, or is nested too deeply.

    Example:
        >>> parse_json('{"a": [1]}')
        {'a': [1]}
    """
    try:
        found: Any = json.loads(text)
    except RecursionError as error:
        raise ValueError(_DEEP) from error
    if _brackets(text) > DEEPEST and _is_deep(found):
        raise ValueError(_DEEP)
    return found


def parse_yaml(text: str) -> Any:
    """The value of a YAML text as a run writes it; a ValueError when it is none.

    Aliases are refused: a few of them stand for more than any machine can hold.

    Example:
        >>> parse_yaml("trainer: {seed: 1}")
        {'trainer': {'seed': 1}}
    """
    try:
        fault = _fault_of(text)
        if fault is None:
            return yaml.load(text, Loader=yaml.CSafeLoader)
    except yaml.YAMLError as error:
        raise ValueError(f"it is no YAML: {error}") from error
    raise ValueError(fault)


def _fault_of(text: str) -> str | None:
    """Why a YAML text is not to be loaded, found without building anything of it."""
    depth = 0
    events: Iterator[object] = cast(Any, yaml).parse(text, Loader=yaml.CSafeLoader)
    for event in events:
        if isinstance(event, yaml.AliasEvent):
            return "it holds an alias, which no run writes"
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if depth > DEEPEST:
            return _DEEP
    return None


def _brackets(text: bytes | str) -> int:
    """At least as many as there are levels."""
    if isinstance(text, bytes):
        return text.count(b"[") + text.count(b"{")
    return text.count("[") + text.count("{")


def _is_deep(value: Any) -> bool:
    level: list[Any] = [value]
    for _ in range(DEEPEST):
        level = [inner for outer in level for inner in _inside(outer)]
        if not level:
            return False
    return True


def _inside(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return cast(dict[str, Any], value).values()
    return cast(list[Any], value) if isinstance(value, list) else ()


# Paths as users write them: `~` is expanded, and impossible names are allowed.


def expanded(path: str) -> Path:
    """The path with `~` resolved; left as it is where there is no such user.

    Example:
        >>> expanded("~no-such-user/rows.jsonl").name
        'rows.jsonl'
    """
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)


def is_directory(path: str) -> bool:
    """Whether a directory of this name is there; a name that cannot exist is not."""
    try:
        return expanded(path).is_dir()
    except (OSError, ValueError):
        return False


def exists(path: str) -> bool:
    """Whether anything of this name is there; a name that cannot exist is not."""
    try:
        return expanded(path).exists()
    except (OSError, ValueError):
        return False


def is_file(path: str) -> bool:
    """Whether a regular file of this name is there; a name that cannot exist is not."""
    try:
        return expanded(path).is_file()
    except (OSError, ValueError):
        return False
