"""Which unfinished folders nobody will ever finish: the process in their name is gone."""

import os
import re
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from luyen.base.files import TEMPORARY

_WRITER = re.compile(re.escape(TEMPORARY) + r".*-(\d+)-[0-9a-f]+")
_mine: set[Path] = set()
"""What this process is writing now. Its id alone proves nothing: ids come back after a restart."""


@contextmanager
def in_progress(path: Path) -> Generator[None]:
    """While entered, the path is being written by this process."""
    _mine.add(path)
    try:
        yield
    finally:
        _mine.discard(path)


def is_abandoned(path: Path) -> bool:
    """Whether the writer of an unfinished file or folder of this machine is gone."""
    found = _WRITER.fullmatch(path.name)
    if found is None:
        return True
    writer = int(found.group(1))
    return path not in _mine if writer == os.getpid() else not _is_running(writer)


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True
