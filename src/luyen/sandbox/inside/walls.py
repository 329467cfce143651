"""Everything that holds a program, put up in its own process before its first line."""

import os
import resource
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from luyen.sandbox.inside import landlock, seccomp
from luyen.sandbox.inside.kernel import PR_SET_PDEATHSIG, control, drop_capabilities

OPEN_FILES = 256
THREADS = 64
"""How many threads there may be beside the processes, which the guard counts."""
_SYSTEM = ("/usr", "/lib", "/lib64", "/bin", "/sbin", "/etc", "/opt", "/proc", "/dev", "/sys")
"""What programs may read beside the interpreter and its packages."""
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/tty")


def build(limits: dict[str, Any], *, work: str, apart: bool, socket_free: bool) -> list[str]:
    """Put up every wall there is; their names. `apart`: in namespaces of its own."""
    control(PR_SET_PDEATHSIG, 9)
    with suppress(OSError):  # when memory runs out, this process goes first
        Path("/proc/self/oom_score_adj").write_text("1000")
    set_rlimits(limits, apart=apart)
    names = ["rlimits"]
    drop_capabilities()
    writable = [work, *_DEVICES, *(["/dev/shm"] if apart else [])]
    if landlock.restrict(readable=_readable(), writable=writable):
        names.append("landlock")
    if seccomp.refuse(network=limits["network"]):
        names.append("seccomp")
    elif not socket_free and not limits["network"]:
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


def _readable() -> list[str]:
    own = [sys.prefix, sys.base_prefix, sys.exec_prefix, *sys.path]
    return [*_SYSTEM, *(os.path.realpath(path) for path in own if path)]


def refuse_sockets(event: str, _: tuple[Any, ...]) -> None:
    """Refuse sockets to Python code. Native code does not ask: this is a fence, not a wall."""
    if event.startswith("socket."):
        raise PermissionError("the sandbox has no network")
