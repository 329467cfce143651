"""A control group for one program: the kernel counts the memory of all its processes together.

It takes a hierarchy in which this user may make groups: root has one on most machines, others where
systemd delegates one to them, and most containers have none.
"""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from time import sleep
from typing import NamedTuple

_PREFIX = "luyen-"
_TRIES = 50
_PAUSE_S = 0.01
"""A group can be removed as soon as the kernel has forgotten its last process."""


class Group(NamedTuple):
    """A group with limits, in one hierarchy or in two, and what the processes beside it need of it.

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


def make(*, memory_bytes: int, processes: int) -> Group | None:
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
            others = (_limited(p, pids, needed="pids.max") for p, v in _parents("pids") if v == 1)
            folders += [other for other in others if other is not None][:1]
        return Group(
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
