"""Namespaces: a view of the machine with no other process, no network, and few files.

The root of that view is empty memory into which the readable paths are mounted read-only, so that a
file which nobody listed does not exist there.
"""

import os
import platform
import struct
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from luyen.sandbox.inside.kernel import ask, system_call
from luyen.sandbox.inside.paths import DEVICES

_NEW_MOUNT, _NEW_IPC, _NEW_USER = 0x20000, 0x8000000, 0x10000000
_NEW_PID, _NEW_NET = 0x20000000, 0x40000000
_NOSUID, _NODEV, _NOEXEC, _BIND, _REC, _PRIVATE = 2, 4, 8, 1 << 12, 1 << 14, 1 << 18
_MOUNT_SETATTR, _HERE, _RECURSIVE, _READ_ONLY = 442, -100, 0x8000, 1
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_DETACH = 2
_FILES = 4096
"""Most files of a run."""
_LINKS = 40
"""Most symbolic links that lead to a path."""


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


def furnish(work: str, *, readable: Iterable[str], size: int) -> bool:
    """In the first process: make a root of its own; whether the kernel allowed all of it.

    In it `work` is memory of `size` bytes that can be written. The rest is read-only.
    """
    ask("mount", None, b"/", None, _REC | _PRIVATE, None)
    if platform.machine() not in _PIVOT_ROOT or not _memory(work, size=2**20):
        return False
    with suppress(OSError):
        if _build(work, readable) and _settle(work, size=size):
            return True
    ask("umount2", work.encode(), _DETACH)
    return False


def _memory(place: str, *, size: int) -> bool:
    options = f"size={size},nr_inodes={_FILES},mode=700".encode()
    return ask("mount", b"tmpfs", place.encode(), b"tmpfs", _NOSUID | _NODEV, options)


def _build(root: str, readable: Iterable[str]) -> bool:
    """Mount what may be read beneath `root`, and make the whole read-only."""
    for folder in ("/proc", "/dev/shm", root):
        os.makedirs(root + folder, exist_ok=True)
    visible: list[str] = []
    for path in sorted(readable, key=len):
        if path != "/proc":
            _show(root, path, visible)
    if not ask(
        "mount", b"proc", f"{root}/proc".encode(), b"proc", _NOSUID | _NODEV | _NOEXEC, None
    ):
        # A container that covers parts of /proc does not let a fresh one be mounted.
        ask("mount", b"/proc", f"{root}/proc".encode(), None, _BIND | _REC, None)
    for device in DEVICES:
        Path(root + device).touch()
        ask("mount", device.encode(), (root + device).encode(), None, _BIND, None)
    for name, target in (("fd", ""), ("stdin", "/0"), ("stdout", "/1"), ("stderr", "/2")):
        os.symlink(f"/proc/self/fd{target}", f"{root}/dev/{name}")
    attributes = struct.pack("QQQQ", _READ_ONLY | _NOSUID, 0, 0, 0)
    place = root.encode()
    return system_call(_MOUNT_SETATTR, _HERE, place, _RECURSIVE, attributes, len(attributes)) == 0


def _show(root: str, path: str, visible: list[str]) -> None:
    """Mount one path beneath `root`, with the symbolic links that lead to it."""
    for _ in range(_LINKS):
        if any(path == seen or path.startswith(f"{seen}/") for seen in visible):
            return
        link = _first_link(path)
        if link is None:
            break
        target = os.path.join(os.path.dirname(link), os.readlink(link))
        if not os.path.lexists(root + link):
            os.makedirs(os.path.dirname(root + link), exist_ok=True)
            os.symlink(os.readlink(link), root + link)
        path = os.path.normpath(target + path[len(link) :])
    if not os.path.exists(path):
        return
    os.makedirs(root + (path if os.path.isdir(path) else os.path.dirname(path)), exist_ok=True)
    if not os.path.isdir(path):
        Path(root + path).touch()
    if ask("mount", path.encode(), (root + path).encode(), None, _BIND | _REC, None):
        visible.append(path)


def _first_link(path: str) -> str | None:
    """The shortest beginning of a path that is a symbolic link."""
    parents = [str(parent) for parent in reversed(Path(path).parents)]
    return next((part for part in [*parents, path] if os.path.islink(part)), None)


def _settle(root: str, *, size: int) -> bool:
    """Give the new root its memory for files, and make it the root of this process."""
    if not (_memory(root + root, size=size) and _memory(f"{root}/dev/shm", size=size)):
        return False
    os.chdir(root)
    if system_call(_PIVOT_ROOT[platform.machine()], b".", b".") != 0:
        return False
    ask("umount2", b".", _DETACH)
    os.chdir("/")
    return True
