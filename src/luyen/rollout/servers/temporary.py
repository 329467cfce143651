"""Folders of servers outside of a run directory, and the size of their logs."""

import atexit
import os
import re
import shutil
import tempfile
from pathlib import Path

from luyen.base.files import is_running

_PREFIX = "luyen-server-"
_NAME = re.compile(rf"{_PREFIX}(\d+)-\w+")
MOST_LOG_BYTES = 64 << 20
"""A longer log is cut to its end."""
_KEPT_LOG_BYTES = 4 << 20


def temporary_folder() -> Path:
    """A private folder that is removed when this process ends.

    Those that processes of this user left behind, because they were killed, are removed first.
    """
    sweep(Path(tempfile.gettempdir()))
    folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-"))
    atexit.register(_remove, folder, os.getpid())
    return folder


def _remove(folder: Path, owner: int) -> None:
    if os.getpid() == owner:  # and not in a process that was forked from it
        shutil.rmtree(folder, ignore_errors=True)


def sweep(parent: Path) -> None:
    """Remove this user's folders below `parent` whose process has ended."""
    for path in parent.glob(f"{_PREFIX}*"):
        named = _NAME.fullmatch(path.name)
        if named is None or is_running(int(named[1])):
            continue
        try:
            is_own = path.lstat().st_uid == os.geteuid()
        except FileNotFoundError:  # another process removes it too
            continue
        if is_own and path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)


def bound_log(path: Path, *, most: int = MOST_LOG_BYTES, kept: int = _KEPT_LOG_BYTES) -> None:
    """Cut a log that is longer than `most` bytes to its last `kept` ones.

    The process that writes it appends, so that its next line stands after what is kept; a line
    that it writes in this moment may be lost.
    """
    if not path.is_file() or path.stat().st_size <= most:
        return
    with path.open("r+b") as log:
        log.seek(-kept, os.SEEK_END)
        tail = log.read()
        log.truncate(0)
        log.seek(0)
        log.write(b"(what came before was cut)\n" + tail)
