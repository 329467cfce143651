"""What Linux, macOS and Windows offer differently, in one place.

The rest of the package asks here instead of importing `resource` or `fcntl`, or naming a signal or
a flag that not every system has. Where a system lacks a thing, a limit is not set and a lock is not
taken; nothing fails for it. Sandbox, Ray and servers of rollout engines are for Linux, and ask the
system themselves.
"""

import errno
import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None
try:
    import resource
except ImportError:  # Windows
    resource = None

_STATUS = Path("/proc/self/status")
_PEAK = re.compile(r"VmHWM:\s+(\d+) kB")
_ASSUMED_BYTES = 8 * 1024**3
"""Main memory of a machine that does not say."""


def _offers(module: Any, name: str) -> bool:
    return name in dir(module)


def memory_bytes() -> int:
    """Main memory; 8 GiB where the system does not say.

    Example:
        >>> memory_bytes() >= 2**30
        True
    """
    if not _offers(os, "sysconf"):
        return _ASSUMED_BYTES
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (OSError, ValueError):  # the system has no such number
        return _ASSUMED_BYTES


def cores() -> int:
    """Cores that this process may use, or those of the machine where that is not known.

    Example:
        >>> cores() >= 1
        True
    """
    if _offers(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def peak_bytes() -> int:
    """Peak bytes of main memory so far, shared pages included; 0 where the system does not say.

    Example:
        >>> peak_bytes() > 1_000_000
        True
    """
    # ru_maxrss is inherited from the parent; VmHWM is of this process only.
    found = _PEAK.search(_STATUS.read_text()) if _STATUS.is_file() else None
    if found is not None:
        return int(found[1]) * 1024
    if resource is None:
        return 0
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def address_limit() -> int | None:
    """Bytes of addresses that this process may take; None without a limit."""
    if resource is None:
        return None
    most, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if most == resource.RLIM_INFINITY or most < 0 else most


def limit_data(most: int) -> None:
    """Limit the memory that this process may write to; a stricter limit in force stays."""
    if resource is None:
        return
    try:
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    except (ValueError, OSError):
        return


def lock(handle: int, *, is_shared: bool = False, waits: bool = False) -> None:
    """Lock an open file; BlockingIOError where another process has it.

    Another OSError where there are no locks.
    """
    if fcntl is None:
        raise OSError(errno.ENOLCK, "this system has no locks that Luyen knows")
    kind = fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX
    fcntl.flock(handle, kind if waits else kind | fcntl.LOCK_NB)


def unlock(handle: int) -> None:
    """Release the lock of an open file; nothing happens on a system without locks."""
    if fcntl is not None:
        fcntl.flock(handle, fcntl.LOCK_UN)


def signals(*names: str) -> tuple[signal.Signals, ...]:
    """Those of the signals that this system has.

    Example:
        >>> signals("SIGINT", "SIGNOSUCH")
        (<Signals.SIGINT: 2>,)
    """
    return tuple(vars(signal)[name] for name in names if _offers(signal, name))


def unblock_signals() -> None:
    """Let all signals through to this thread, where the system can hold them back."""
    if _offers(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_SETMASK, ())


def in_forked_children(function: Callable[[], None]) -> None:
    """Call a function in every child that this process forks, where it can."""
    if _offers(os, "register_at_fork"):
        os.register_at_fork(after_in_child=function)


def user() -> int | None:
    """Id of the user in force; None where files have no owner of that kind."""
    return os.geteuid() if _offers(os, "geteuid") else None


def flags(*names: str) -> int:
    """Flags of `os.open`, added up; one that this system lacks adds nothing.

    Example:
        >>> flags("O_NOSUCH")
        0
    """
    return sum(int(vars(os)[name]) for name in names if _offers(os, name))


def read_at(handle: int, most: int, place: int) -> bytes:
    """Bytes of an open file from a place on; where `os.pread` is missing, its position moves."""
    if _offers(os, "pread"):
        return os.pread(handle, most, place)
    os.lseek(handle, place, os.SEEK_SET)
    return os.read(handle, most)


def write_at_start(handle: int, data: bytes) -> None:
    """Write bytes at the beginning of an open file."""
    os.lseek(handle, 0, os.SEEK_SET)
    os.write(handle, data)


def is_process(number: int) -> bool:
    """Whether this machine has a process of that id; True where it cannot be asked harmlessly."""
    if os.name == "nt":  # there `os.kill` ends a process, whatever the signal
        return True
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True


# Reset of inherited signal state at the start of a process.
#
# Blocked and ignored signals are inherited. With SIGCHLD ignored the kernel keeps no exit codes:
# Python then reads 0 for a child that failed. With SIGTERM blocked a run cannot be ended.

NEEDED = signals("SIGCHLD", "SIGALRM", "SIGXCPU", "SIGPROF", "SIGVTALRM")
"""What limits and exit codes depend on. SIGHUP stays ignored: that is what `nohup` is for."""


def reset_signals() -> None:
    """Unblock all signals, and restore the default handlers of needed ones that are ignored."""
    unblock_signals()
    for number in NEEDED:
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
