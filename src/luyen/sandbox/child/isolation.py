"""Everything that confines a program: rlimits, Landlock, namespaces, and the files it may see."""

import os
import platform
import resource
import stat
import struct
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from luyen.sandbox.child import syscalls
from luyen.sandbox.child.syscalls import (
    PR_SET_NO_NEW_PRIVS,
    PR_SET_PDEATHSIG,
    ask,
    control,
    drop_capabilities,
    system_call,
)

# Landlock: which files may be read and written, enforced by the kernel without privileges.

_CREATE, _ADD, _RESTRICT = 444, 445, 446
_ASK_VERSION, _BENEATH = 1, 1
_EXECUTE, _WRITE, _READ, _LIST = 1, 2, 4, 8
_TRUNCATE, _IOCTL = 1 << 14, 1 << 15
_SCOPES = 3
"""No abstract socket and no signal to a process outside."""
KNOWS_TRUNCATE, KNOWS_SIGNALS = 3, 6
"""Versions from which on files cannot be emptied, and processes outside not signalled."""


def restrict_files(*, readable: Iterable[str], writable: Iterable[str]) -> int:
    """Refuse this process every file that is not beneath these; the version in force, 0: none."""
    version = system_call(_CREATE, None, 0, _ASK_VERSION)
    if version < 1:
        return 0
    handled = _file_rights(version)
    attributes = struct.pack("QQQ", handled, 0, _SCOPES if version >= KNOWS_SIGNALS else 0)
    size = 24 if version >= KNOWS_SIGNALS else 8
    ruleset = system_call(_CREATE, attributes, size, 0)
    if ruleset < 0:
        return 0
    for path in readable:
        _allow(ruleset, path, (_EXECUTE | _READ | _LIST) & handled)
    for path in writable:
        _allow(ruleset, path, handled & ~_IOCTL)
    control(PR_SET_NO_NEW_PRIVS, 1)
    done = system_call(_RESTRICT, ruleset, 0) == 0
    os.close(ruleset)
    return version if done else 0


def _file_rights(version: int) -> int:
    """The rights on files that this version of the kernel can refuse."""
    rights = (1 << 13) - 1
    rights |= (1 << 13) if version >= 2 else 0  # moving files between directories
    rights |= _TRUNCATE if version >= KNOWS_TRUNCATE else 0
    return rights | (_IOCTL if version >= 5 else 0)


def _allow(ruleset: int, path: str, rights: int) -> None:
    try:
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:  # not on this machine, so there is nothing to allow
        return
    if not stat.S_ISDIR(os.fstat(place).st_mode):
        rights &= _EXECUTE | _WRITE | _READ | _TRUNCATE
    system_call(_ADD, ruleset, _BENEATH, struct.pack("=Qi", rights, place), 0)
    os.close(place)


# Files of the machine that a program may see: the interpreter, its packages, the system's.

DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
"""The only visible devices. A disk must not be among them: its blocks hold every file."""
_SYSTEM = ("/usr", "/lib", "/lib32", "/lib64", "/libx32", "/bin", "/sbin", "/sys/devices/system")
_SETTINGS = (
    "ld.so.cache ld.so.conf ld.so.conf.d alternatives localtime timezone os-release passwd group "
    "nsswitch.conf host.conf hosts resolv.conf gai.conf protocols services mime.types "
    "ssl/certs ssl/openssl.cnf ca-certificates pki/tls/certs fonts"
)
"""What of /etc libraries look for; keys and hashes of passwords lie there too."""
_ABOUT = (
    "self thread-self cpuinfo meminfo stat uptime loadavg version filesystems mounts "
    "sys/kernel/osrelease sys/kernel/random sys/vm/overcommit_memory"
)
"""What of /proc may be read where it shows the processes of everybody."""


def readable(*, own_processes: bool) -> list[str]:
    """Paths that a program may read; `own_processes`: /proc shows no process but its own."""
    own = [sys.prefix, sys.base_prefix, sys.exec_prefix, *sys.path]
    found = [*_SYSTEM, *(f"/etc/{name}" for name in _SETTINGS.split())]
    found += ["/proc"] if own_processes else [f"/proc/{name}" for name in _ABOUT.split()]
    found += [path for path in own if os.path.isabs(path)]
    found += [os.path.realpath(path) for path in own if os.path.isabs(path)]
    return [path for path in dict.fromkeys(found) if path != "/" and os.path.exists(path)]


OPEN_FILES = 256
THREADS = 64
"""Limit of threads, in addition to the limit of processes that the guard enforces."""


def confine(limits: dict[str, Any], *, work: str, measures: list[str]) -> list[str]:
    """Apply every available isolation layer; the names of those in force, `measures` first."""
    control(PR_SET_PDEATHSIG, 9)
    apart, own_root = "namespaces" in measures, "root" in measures
    set_rlimits(limits, apart=apart)
    names = [*measures, "rlimits"]
    drop_capabilities()
    counted = "cgroup" in measures
    # Pages of /dev/zero can be shared: without a cgroup they are not counted.
    devices = [device for device in DEVICES if counted or device != "/dev/zero"]
    visible = [*readable(own_processes=apart), *devices]
    shared = ["/dev/shm"] if own_root else []
    writable = [work, *(one for one in devices if "random" not in one), *shared]
    version = restrict_files(readable=visible, writable=writable)
    names += ["landlock"] if version >= KNOWS_TRUNCATE else []
    confined = apart or version >= KNOWS_SIGNALS
    network: bool = limits["network"]
    if syscalls.filter_syscalls(
        network=network, own_files=own_root, any_signal=confined, counted=counted
    ):
        names.append("seccomp")
    elif not apart and not network:
        sys.addaudithook(refuse_sockets)
        names.append("audit hook")
    return names


def set_rlimits(limits: dict[str, Any], *, apart: bool) -> None:
    """The limits that the kernel counts for a process; none can be raised again."""
    cpu_s = limits["cpu_s"]
    _set(resource.RLIMIT_CORE, 0)
    _set(resource.RLIMIT_NOFILE, OPEN_FILES)
    _set(resource.RLIMIT_FSIZE, limits["file_bytes"])
    _set(resource.RLIMIT_AS, limits["memory_bytes"])
    if apart:  # elsewhere it would count every process of the user
        _set(resource.RLIMIT_NPROC, limits["processes"] + THREADS)
    most = resource.getrlimit(resource.RLIMIT_CPU)[1]
    if most == resource.RLIM_INFINITY or most > cpu_s:  # the signal names the reason; then the end
        resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 1))


def _set(which: int, value: int) -> None:
    most = resource.getrlimit(which)[1]
    value = value if most == resource.RLIM_INFINITY else min(value, most)
    resource.setrlimit(which, (value, value))


def refuse_sockets(event: str, _: tuple[Any, ...]) -> None:
    """Refuse sockets to Python code. Native code bypasses this hook: it is no isolation layer."""
    if event.startswith("socket."):
        raise PermissionError("the sandbox has no network")


# Namespaces: a view of the machine with no other process, no network, and few files.
#
# The root of that view is empty memory into which the readable paths are mounted read-only, so
# that a file that is not listed does not exist there.

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


def enter_namespaces(*, network: bool) -> bool:
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


def mount_root(work: str, *, readable: Iterable[str], size: int) -> bool:
    """In the first process: make a root of its own; whether the kernel allowed all of it.

    In it `work` is memory of `size` bytes that can be written. The rest is read-only.
    """
    ask("mount", None, b"/", None, _REC | _PRIVATE, None)
    if platform.machine() not in _PIVOT_ROOT or not _memory(work, size=2**20):
        return False
    with suppress(OSError):
        if _mount_readable(work, readable) and _pivot_to(work, size=size):
            return True
    ask("umount2", work.encode(), _DETACH)
    return False


def _memory(place: str, *, size: int) -> bool:
    options = f"size={size},nr_inodes={_FILES},mode=700".encode()
    return ask("mount", b"tmpfs", place.encode(), b"tmpfs", _NOSUID | _NODEV, options)


def _mount_readable(root: str, readable: Iterable[str]) -> bool:
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


def _pivot_to(root: str, *, size: int) -> bool:
    """Give the new root its memory for files, and make it the root of this process."""
    if not (_memory(root + root, size=size) and _memory(f"{root}/dev/shm", size=size)):
        return False
    os.chdir(root)
    if system_call(_PIVOT_ROOT[platform.machine()], b".", b".") != 0:
        return False
    ask("umount2", b".", _DETACH)
    os.chdir("/")
    return True
