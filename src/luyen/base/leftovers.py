"""Names of unfinished files and folders, and which of them nobody will ever finish.

A name says which process of which machine writes it: what a live one writes is left alone.
"""

import os
import platform
import re
import secrets
import shutil
import time
import zlib
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

TEMPORARY = ".tmp-"
"""How the name of an unfinished file or directory begins."""
_WRITER = re.compile(re.escape(TEMPORARY) + r".+-(\d+)-([0-9a-f]{8}|[0-9a-f]{16})")
_STACKS = re.compile(r"locked-(\d+)\.txt")
"""Where a watchdog would write stacks: empty unless it did, and removed when the run ends."""
_LONGEST = 200
"""Bytes of the final name that go into the unfinished one: file systems take 255 in all."""
_ELSEWHERE_S = 24 * 3600.0
"""Nobody can ask for a process of another machine: what it last touched then is abandoned."""
_mine: set[Path] = set()
"""What this process is writing now. Its id alone proves nothing: ids come back after a restart."""


def temporary_beside(path: Path) -> Path:
    """A name for work in progress, in the same folder, that no other writer has."""
    name = path.name.encode("utf-8", "surrogateescape")[:_LONGEST].decode("utf-8", "ignore")
    own = f"{_machine()}{secrets.token_hex(4)}"
    return path.with_name(f"{TEMPORARY}{name}-{os.getpid()}-{own}")


@contextmanager
def in_progress(path: Path) -> Generator[None]:
    """While entered, the path is being written by this process."""
    _mine.add(path)
    try:
        yield
    finally:
        _mine.discard(path)


def is_abandoned(path: Path) -> bool:
    """Whether it is an unfinished file or folder of ours whose writer is gone."""
    found = _WRITER.fullmatch(path.name)
    if found is None:
        return False
    writer, own = int(found.group(1)), found.group(2)
    if len(own) == 16 and not own.startswith(_machine()):
        return _is_old(path)
    return path not in _mine if writer == os.getpid() else not is_running(writer)


def sweep(folder: Path) -> None:
    """Remove what killed writers left in a run directory and in the folders directly below it."""
    for place in (folder, *_folders(folder)):
        for path in _entries(place):
            if is_abandoned(path) or _is_unused(path):
                remove(path)


def sweep_beside(path: Path) -> None:
    """Remove what killed writers of this file or folder left beside it."""
    for other in _entries(path.parent):
        if other.name.startswith(f"{TEMPORARY}{path.name}-") and is_abandoned(other):
            remove(other)


def remove(path: Path) -> None:
    """Remove a file or a whole folder, as far as possible."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
        return
    try:
        path.unlink(missing_ok=True)
    except OSError:
        return  # another time


def is_running(process: int) -> bool:
    """Whether a process of this machine has that id."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True


def _machine() -> str:
    """Eight digits for what gives process ids their meaning: a host, or a container on it."""
    try:
        space = os.readlink("/proc/self/ns/pid")
    except OSError:
        space = ""
    return f"{zlib.crc32(f'{platform.node()} {space}'.encode()):08x}"


def _is_old(path: Path) -> bool:
    try:
        return time.time() - path.stat(follow_symlinks=False).st_mtime > _ELSEWHERE_S
    except OSError:
        return False


def _is_unused(path: Path) -> bool:
    """Whether it is the empty file of a watchdog whose process was killed."""
    found = _STACKS.fullmatch(path.name)
    if found is None or is_running(int(found.group(1))):
        return False
    try:
        return path.stat(follow_symlinks=False).st_size == 0
    except OSError:
        return False


def _folders(folder: Path) -> list[Path]:
    return [path for path in _entries(folder) if path.is_dir() and not path.is_symlink()]


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []
