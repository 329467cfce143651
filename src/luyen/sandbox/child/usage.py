"""What the processes of a program use, counted by a control group or read from /proc."""

import mmap
import os
import signal
import stat
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from time import sleep
from typing import NamedTuple

_PAGE = mmap.PAGESIZE
_KILL = signal.SIGKILL if "SIGKILL" in dir(signal) else signal.SIGTERM
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
    quick = buffers + sum(_rss(pid) for pid in pids)
    return quick if quick <= limit else buffers + sum(_pss(pid) for pid in pids)


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
        except FileNotFoundError:  # removed during the scan
            continue
        except OSError:  # an unreadable mode or path
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


def _rss(pid: int) -> int:
    with suppress(OSError, IndexError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE
    return 0


def _pss(pid: int) -> int:
    """Resident bytes, where a page of n processes counts 1/n for each; a program may forbid it."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return _rss(pid)


# A control group for one program: the kernel counts the memory of all its processes together.
#
# It takes a hierarchy in which this user may create groups: root has one on most machines, other
# users where systemd delegates one to them, and most containers have none.

_PREFIX = "luyen-"
_TRIES = 50
_PAUSE_S = 0.01
"""A group can be removed as soon as the kernel has forgotten its last process."""


class ControlGroup(NamedTuple):
    """A group with limits, in one hierarchy or in two, and what the processes outside it need.

    A tuple, since the module of dataclasses would add a tenth to the start of every program.
    """

    name: str
    """The name of its directories."""
    parents: tuple[int, ...]
    """The directories around them, open: their paths are gone once a process has another root."""
    members: tuple[int, ...]
    """Open files; a process that writes 0 into them joins."""
    events: int
    """An open file that counts the processes killed for want of memory."""

    def join(self) -> None:
        """Move this process into the group, with all that it will start."""
        for file in self.members:
            os.write(file, b"0")

    def is_exhausted(self) -> bool:
        """Whether the kernel killed a process of the group for want of memory."""
        lines = os.pread(self.events, 4096, 0).decode().splitlines()
        counts = dict(line.split(maxsplit=1) for line in lines if " " in line)
        return int(counts.get("oom_kill", "0")) > 0

    def remove(self) -> None:
        """Remove the group once its processes are gone."""
        for parent in self.parents:
            for _ in range(_TRIES):
                try:
                    os.rmdir(self.name, dir_fd=parent)
                except FileNotFoundError:
                    break
                except OSError:
                    sleep(_PAUSE_S)
                else:
                    break


def make_cgroup(*, memory_bytes: int, processes: int) -> ControlGroup | None:
    """A group of this process's own, with limits; None where none can be made."""
    pids = {"pids.max": processes}
    for parent, version in _parents("memory"):
        if version == 2:
            limits = {"memory.max": memory_bytes, "memory.swap.max": 0, **pids}
            folder = _limited(parent, limits, needed="memory.max")
        else:
            most = ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes")
            folder = _limited(parent, dict.fromkeys(most, memory_bytes), needed=most[0])
        if folder is None:
            continue
        folders = [folder]
        if version == 1:  # where each controller has a hierarchy of its own
            limited = (_limited(p, pids, needed="pids.max") for p, v in _parents("pids") if v == 1)
            folders += [other for other in limited if other is not None][:1]
        return ControlGroup(
            name=folder.name,
            parents=tuple(_opened(one.parent, os.O_DIRECTORY) for one in folders),
            members=tuple(_opened(one / "cgroup.procs", os.O_WRONLY) for one in folders),
            events=_opened(folder / ("memory.events" if version == 2 else "memory.oom_control"), 0),
        )
    return None


def _opened(path: Path, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC)


def _limited(parent: Path, limits: dict[str, int], *, needed: str) -> Path | None:
    """A new group with those limits that its kernel knows; None where it cannot be made."""
    folder = parent / f"{_PREFIX}{os.getpid()}"
    try:
        _sweep(parent)
        folder.mkdir()
    except OSError:
        return None
    try:
        for name, value in limits.items():
            if name == needed or (folder / name).exists():
                (folder / name).write_text(str(value))
    except OSError:
        folder.rmdir()
        return None
    return folder


def _parents(controller: str) -> Iterator[tuple[Path, int]]:
    """Groups in which one could be made, with the version of their hierarchy."""
    mounts = _mounts(controller)
    for line in _lines("/proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        version = 2 if not controllers else 1
        if version == 1 and controller not in controllers.split(","):
            continue
        for mounted, root, place in mounts:
            if mounted != version or not f"{path}/".startswith(root.rstrip("/") + "/"):
                continue
            own = Path(place) / path[len(root.rstrip("/")) :].lstrip("/")
            if version == 1:
                yield own, 1
            else:
                yield from ((parent, 2) for parent in (own, own.parent) if _offers_memory(parent))


def _mounts(controller: str) -> list[tuple[int, str, str]]:
    """Version, root and place of every mounted hierarchy that may have a controller."""
    found: list[tuple[int, str, str]] = []
    for line in _lines("/proc/self/mountinfo"):
        before, _, after = line.partition(" - ")
        kind, _, options = after.split(" ", 2)
        fields = before.split()
        if kind == "cgroup2" or (kind == "cgroup" and controller in options.split(",")):
            found.append((2 if kind == "cgroup2" else 1, fields[3], fields[4]))
    return found


def _offers_memory(parent: Path) -> bool:
    control = parent / "cgroup.subtree_control"
    with suppress(OSError):
        if "memory" not in control.read_text().split():
            control.write_text("+memory")
        return "memory" in control.read_text().split()
    return False


def _sweep(parent: Path) -> None:
    """Remove the groups of guards that were killed."""
    for left in parent.glob(f"{_PREFIX}[0-9]*"):
        if not Path(f"/proc/{left.name[len(_PREFIX) :]}").exists():
            with suppress(OSError):
                left.rmdir()


def _lines(path: str) -> list[str]:
    with suppress(OSError):
        return Path(path).read_text().splitlines()
    return []


# Process trees: find all descendants of a process, and kill them together.

_ROUNDS = 8
"""Scans of the process tree, since processes may start during a scan."""


def descendants_of(pid: int) -> list[int]:
    """All processes that a process started, and those that these started, as far as /proc tells."""
    found: list[int] = [pid]
    for parent in found:  # it grows while it is walked
        with suppress(OSError):  # it has ended, or there is no /proc
            for task in Path(f"/proc/{parent}/task").iterdir():
                found += map(int, (task / "children").read_text().split())
    return found[1:]


def kill_process_tree(leader: int) -> None:
    """Kill all that the leader of a process group started, wherever it is by now, and the group."""
    killed: set[int] = set()
    for _ in range(_ROUNDS):
        strays = set(descendants_of(leader)) - killed  # some may have left the group
        for stray in strays:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(stray, _KILL)
        killed |= strays
        if not strays:
            break
    with suppress(ProcessLookupError, PermissionError):
        if "killpg" in dir(os):
            os.killpg(leader, _KILL)
        else:  # Windows has no groups
            os.kill(leader, _KILL)
