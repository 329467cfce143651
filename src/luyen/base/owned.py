"""Files of a run directory that are written in place: opened where they are, and nowhere else.

A folder that others can write to may hold a link under the name of such a file. What is added to
it, or cut from it, would then land in a file of the user anywhere; and a pipe would wait for ever.
"""

import errno
import os
import stat
from io import FileIO
from pathlib import Path

_LINK = "it is a link, and what is written there would land in another place"
_ELSEWHERE = "checkpoints"
_SECOND = "it is a file that has another name elsewhere (a hard link), which would change with it"


def open_owned(path: Path | str, flags: int, mode: int = 0o644) -> int:
    """A handle of a regular file, made where there is none if the flags say so.

    An OSError for a link and for anything else that is no file; nothing is waited for. One that
    is to be written must have no second name.

    Example:
        >>> open_owned("/dev/null", os.O_WRONLY)
        Traceback (most recent call last):
        OSError: it is no file
    """
    safe = flags & ~os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        handle = os.open(path, safe, mode)
    except OSError as error:
        raise OSError(_LINK) if error.errno == errno.ELOOP else error from None
    facts = os.fstat(handle)
    is_written = bool(flags & (os.O_WRONLY | os.O_RDWR))
    if not stat.S_ISREG(facts.st_mode) or (is_written and facts.st_nlink > 1):
        os.close(handle)
        raise OSError(_SECOND if stat.S_ISREG(facts.st_mode) else "it is no file")
    if flags & os.O_TRUNC:
        os.ftruncate(handle, 0)
    return handle


def refuse_linked_folders(folder: Path) -> None:
    """An OSError where a folder of a run directory is a link, but for `checkpoints`.

    Files are made, replaced and removed in it by names that files of the user may have too. In
    `checkpoints` only folders `step_*` are, and people keep those on another disk.
    """
    if not folder.is_dir():
        return
    for path in folder.iterdir():
        if path.name != _ELSEWHERE and path.is_symlink() and path.is_dir():
            raise OSError(f"`{path.name}` is a link to a folder in another place")


def open_lines(path: Path) -> FileIO:
    """The file, to add lines to its end, each in one write."""
    return FileIO(path, "ab", opener=open_owned)
