"""What the processes of a program use, as /proc tells."""

import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

_PAGE = os.sysconf("SC_PAGE_SIZE")
_ENTRY = 4096
"""What the shortest file costs: as many files are allowed as where the kernel counts them."""
_LONGEST = 1024
"""Most characters of the path of a directory; each takes time to follow."""
_SOCKET = 2**19
"""Most bytes that wait in a socket, which no process owns up to."""


def descendants(most: int | None = None) -> list[int]:
    """All processes that stem from this one, orphans included, by the names /proc has for them.

    With `most`, some more than that are enough: a tree may grow as fast as it is walked.
    """
    found: list[int] = []
    with suppress(OSError):
        todo = [int(os.readlink("/proc/self"))]
        while todo and (most is None or len(found) <= most):
            children = _children(todo.pop())
            todo += children
            found += children
    return found


def _children(pid: int) -> list[int]:
    found: list[int] = []
    with suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            found += map(int, Path(f"/proc/{pid}/task/{task}/children").read_text().split())
    return found


def threads_of(pids: Iterable[int]) -> int:
    """How many threads processes have together."""
    found = 0
    for pid in pids:
        with suppress(OSError):
            found += len(os.listdir(f"/proc/{pid}/task"))
    return found


def memory_of(pids: Iterable[int], limit: int) -> int:
    """Bytes of memory that processes occupy together, with what their sockets can hold.

    Pages that they share are counted once, by a slower way, where counting them for each would be
    above the limit.
    """
    pids = list(pids)
    buffers = _SOCKET * len(_sockets(pids))
    quick = buffers + sum(_resident(pid) for pid in pids)
    return quick if quick <= limit else buffers + sum(_proportional(pid) for pid in pids)


def _sockets(pids: Iterable[int]) -> set[str]:
    found: set[str] = set()
    for path in _descriptors(pids):
        with suppress(OSError):
            found.add(os.readlink(path))
    return {name for name in found if name.startswith("socket:")}


def files_of(work: str, pids: Iterable[int], most: int) -> int:
    """Bytes of the files below a directory, and of those that processes removed and keep.

    A file takes some room however short it is. One that is only mapped is as long as it may be.
    Where the directory cannot be read to its end, the program has hidden files: then it is more
    than `most`.
    """
    found = 0
    todo = [work]
    while todo and found <= most:
        folder = todo.pop()
        if len(folder) > _LONGEST:
            return most + 1
        try:
            with os.scandir(folder) as entries:
                for entry in entries:
                    with suppress(FileNotFoundError):
                        status = entry.stat(follow_symlinks=False)
                        found += max(status.st_blocks * 512, _ENTRY)
                        if stat.S_ISDIR(status.st_mode):
                            todo.append(entry.path)
        except FileNotFoundError:  # removed meanwhile
            continue
        except OSError:  # a mode or a path that nobody can read
            return most + 1
    pids = list(pids)
    kept = dict(filter(None, map(_removed, _descriptors(pids))))
    mapped = {file for pid in pids for file in _mapped(pid, os.stat(work).st_dev)}
    return found + sum(kept.values()) + most * len(mapped - kept.keys())


def _descriptors(pids: Iterable[int]) -> Iterator[str]:
    for pid in pids:
        with suppress(OSError):
            yield from (f"/proc/{pid}/fd/{number}" for number in os.listdir(f"/proc/{pid}/fd"))


def _mapped(pid: int, device: int) -> Iterator[int]:
    """Numbers of removed files of a device that a process has mapped."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines():
            if line.endswith(" (deleted)"):
                _, _, _, place, inode = line.split()[:5]
                major, _, minor = place.partition(":")
                if os.makedev(int(major, 16), int(minor, 16)) == device:
                    yield int(inode)


def _removed(path: str) -> tuple[int, int] | None:
    """Number and bytes of a removed file that is open."""
    with suppress(OSError):
        status = os.stat(path)
        if stat.S_ISREG(status.st_mode) and status.st_nlink == 0:
            return status.st_ino, status.st_blocks * 512
    return None


def _resident(pid: int) -> int:
    with suppress(OSError, IndexError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE
    return 0


def _proportional(pid: int) -> int:
    """Resident bytes, where a page of n processes counts 1/n for each; a program may forbid it."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return _resident(pid)
