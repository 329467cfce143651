"""Files that somebody else names or made, without waiting: a pipe, a device, a flood is refused.

Whatever is wrong, with the name, the kind or the content, is an OSError that says so.
"""

import os
import stat
from pathlib import Path

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
    """The UTF-8 text of a regular file of at most so many bytes, a byte-order mark left out."""
    data = read_bytes(path, most_bytes=most_bytes)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise OSError(f"line {line} is not UTF-8: {error.reason}") from error


def read_bytes(path: Path, *, most_bytes: int = MOST_RECORDS) -> bytes:
    """The content of a regular file of at most so many bytes, of a run of a stranger, say.

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
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(handle, "rb") as file:
        seen = os.fstat(handle)
        if not stat.S_ISREG(seen.st_mode):
            raise OSError("it is no longer a file")
        if seen.st_size > most:  # as large as it says: a hole costs its writer nothing
            raise OSError(f"it is larger than the {most:,} bytes that are read")
        # No more is asked for than there may be: a reader makes room for all of it first.
        return file.read(min(max(seen.st_size, _BLOCK), most) + 1)
