"""A view of the machine with no other process, no network and no file system to write to."""

import os
import struct
from contextlib import suppress
from pathlib import Path

from luyen.sandbox.inside.kernel import ask, system_call

_NEW_MOUNT, _NEW_IPC, _NEW_USER = 0x20000, 0x8000000, 0x10000000
_NEW_PID, _NEW_NET = 0x20000000, 0x40000000
_NOSUID, _NODEV, _NOEXEC, _REC, _PRIVATE = 2, 4, 8, 1 << 14, 1 << 18
_MOUNT_SETATTR, _HERE, _RECURSIVE, _READ_ONLY = 442, -100, 0x8000, 1
_FILES = 4096
"""Most files of a run."""


def enter(*, network: bool) -> bool:
    """Leave the namespaces of the parent; the next child is the first process of a new one."""
    uid, gid = os.getuid(), os.getgid()
    flags = _NEW_USER | _NEW_MOUNT | _NEW_IPC | _NEW_PID | (0 if network else _NEW_NET)
    if not ask("unshare", flags):
        return False
    with suppress(OSError):  # without a mapping the names of users are lost, nothing else
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
        Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")
    return True


def furnish(work: str, *, size: int) -> list[str]:
    """In the first process: own /proc, own scratch memory for files, all else read-only."""
    ask("mount", None, b"/", None, _REC | _PRIVATE, None)
    ask("mount", b"proc", b"/proc", b"proc", _NOSUID | _NODEV | _NOEXEC, None)
    options = f"size={size},nr_inodes={_FILES},mode=700".encode()
    own = [
        place
        for place in (work.encode(), b"/dev/shm")
        if ask("mount", b"tmpfs", place, b"tmpfs", _NOSUID | _NODEV, options)
    ]
    if work.encode() not in own:
        return []
    if not _set_attributes(b"/", _RECURSIVE, on=_READ_ONLY):
        return ["scratch"]
    for place in own:
        _set_attributes(place, 0, off=_READ_ONLY)
    return ["scratch", "read-only"]


def _set_attributes(place: bytes, flags: int, *, on: int = 0, off: int = 0) -> bool:
    attributes = struct.pack("QQQQ", on, off, 0, 0)
    return system_call(_MOUNT_SETATTR, _HERE, place, flags, attributes, len(attributes)) == 0
