"""Everything that confines a program, put up in its own process before its first line."""

import resource
import sys
from typing import Any

from luyen.sandbox.inside import landlock, seccomp
from luyen.sandbox.inside.kernel import PR_SET_PDEATHSIG, control, drop_capabilities
from luyen.sandbox.inside.paths import DEVICES, readable

OPEN_FILES = 256
THREADS = 64
"""How many threads there may be beside the processes, which the guard counts."""


def build(limits: dict[str, Any], *, work: str, measures: list[str]) -> list[str]:
    """Put up every wall there is; the names of all that stand, those of `measures` first."""
    control(PR_SET_PDEATHSIG, 9)
    apart, own_root = "namespaces" in measures, "root" in measures
    set_rlimits(limits, apart=apart)
    names = [*measures, "rlimits"]
    drop_capabilities()
    counted = "cgroup" in measures
    # Pages of /dev/zero can be shared: where the kernel does not count them, nobody does.
    devices = [device for device in DEVICES if counted or device != "/dev/zero"]
    visible = [*readable(own_processes=apart), *devices]
    shared = ["/dev/shm"] if own_root else []
    writable = [work, *(one for one in devices if "random" not in one), *shared]
    version = landlock.restrict(readable=visible, writable=writable)
    names += ["landlock"] if version >= landlock.KNOWS_TRUNCATE else []
    confined = apart or version >= landlock.KNOWS_SIGNALS
    network: bool = limits["network"]
    if seccomp.refuse(network=network, own_files=own_root, any_signal=confined, counted=counted):
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
    """Refuse sockets to Python code. Native code does not ask: this is a fence, not a wall."""
    if event.startswith("socket."):
        raise PermissionError("the sandbox has no network")
