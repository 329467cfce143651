"""Seccomp: the kernel refuses every system call that is not on the list.

The filter is written here rather than by libseccomp, because a program waits for the guard to
start, and because slim containers lack the library: they would lose this wall.
"""

import ctypes
import errno
import os
import platform
import struct
from typing import TypeAlias

from luyen.sandbox.inside import syscalls
from luyen.sandbox.inside.kernel import PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, ask, control

Condition: TypeAlias = tuple[int, int, int]
"""Index of a 32-bit half of an argument, a mask, and what the masked half must be."""
Alternatives: TypeAlias = list[list[Condition]]
"""The call is allowed where all conditions of one of these hold."""

_MODE_FILTER = 2
_LOAD, _AND, _JUMP_EQUAL, _JUMP_AT_LEAST, _RETURN = 0x20, 0x54, 0x15, 0x35, 0x06
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16
_ALLOW, _ERROR = 0x7FFF0000, 0x00050000
_REFUSED, _UNKNOWN = _ERROR | errno.EPERM, _ERROR | errno.ENOSYS
_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_NEWER = 472
"""Calls from here on are younger than this table: they do not exist, so that libraries fall back.
On x86-64 that refuses the x32 interface too, which offers the same calls under large numbers."""
_ALL = 0xFFFFFFFF
_NEW_NAMESPACES = 0x7E020080
"""Flags of `clone` that make namespaces: mount, cgroup, UTS, IPC, user, PID, network, time."""
_ANONYMOUS, _SHARING, _PRIVATE = 0x20, 0x3, 0x2
_FIFO, _FILE_TYPE = 0o010000, 0o170000
_UNIX, _INET, _INET6, _STREAM, _SOCKET_TYPE = 1, 2, 10, 1, 0xF
_IOCTL = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
"""TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX: questions and flags of a descriptor."""
_FCNTL = (0, 1, 2, 3, 4, 5, 6, 7, 9, 36, 37, 38, 1030, 1031, 1032, 1034)
"""Copies, flags, locks, sizes of pipes: no owner that gets signals, no lease, no notification."""
_PRCTL = (1, 2, 3, 15, 16, 38, 39, 41, 42, 0x53564D41)
"""PDEATHSIG, DUMPABLE (read), NAME, NO_NEW_PRIVS, THP_DISABLE, and names of memory areas."""


def refuse(*, network: bool, own_files: bool, any_signal: bool, counted: bool) -> bool:
    """Allow only the calls of the table from here on; False where this machine is not known.

    `own_files`: modes and times of files may be changed. `any_signal`: signals may be sent to any
    process, because something else keeps them inside. `counted`: the kernel counts their memory.
    """
    if not syscalls.is_known_machine():
        return False
    rules = _rules(network=network, any_signal=any_signal, counted=counted)
    rules["sendmsg"] = [[]] if network or (own_files and counted) else []
    program = _program(syscalls.allowed(own_files=own_files, network=network), rules)
    control(PR_SET_NO_NEW_PRIVS, 1)
    text = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("HxxxxxxQ", len(program) // 8, ctypes.addressof(text))
    return ask("prctl", PR_SET_SECCOMP, _MODE_FILTER, header, 0, 0)


def _rules(*, network: bool, any_signal: bool, counted: bool) -> dict[str, Alternatives]:
    """Name of a call to the arguments with which it is allowed."""
    own = os.getpid()
    receivers = (0, own, -own & _ALL)  # this process, and the group that it leads
    signals = [[]] if any_signal else [[_equals(0, pid)] for pid in receivers]
    stream = [_equals(0, _UNIX), (2, _SOCKET_TYPE, _STREAM)]
    families = [[_equals(0, family)] for family in (_INET, _INET6)] if network else []
    return {
        # Shared memory without a name can be full and yet in no process: the guard cannot count it.
        "mmap": [[]] if counted else [[(6, _ANONYMOUS, 0)], [(6, _SHARING, _PRIVATE)]],
        "clone": [[(0, _NEW_NAMESPACES, 0)]],
        "prlimit64": [[_equals(0, 0)]],  # its own limits, which it cannot raise
        "socketpair": [stream],  # a pair of datagram sockets could write to any socket by name
        "socket": families,
        "sendto": [[]] if network else [[_equals(4, 0), (9, _ALL, 0)]],  # to the other end
        "fcntl": [[_equals(1, command)] for command in _FCNTL],
        "ioctl": [[_equals(1, request)] for request in _IOCTL],
        "prctl": [[_equals(0, option)] for option in _PRCTL],
        "kill": signals,
        "tkill": [[]] if any_signal else [],
        "tgkill": signals,
        "pidfd_send_signal": [[]] if any_signal else [],
        "sched_setaffinity": [[_equals(0, 0)]],
        "setpriority": [[_equals(0, 0), _equals(1, 0)]],
        "mknod": [[(2, _FILE_TYPE, _FIFO)]],
        "mknodat": [[(4, _FILE_TYPE, _FIFO)]],
        "clone3": [],
    }


def _equals(argument: int, value: int) -> Condition:
    """The lower half of an argument, which is all that the kernel reads of an int."""
    return (2 * argument, _ALL, value)


def _program(allowed: list[int], rules: dict[str, Alternatives]) -> bytes:
    lines = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_JUMP_EQUAL, 1, 0, _ARCHITECTURES[platform.machine()]),
        (_RETURN, 0, 0, _REFUSED),
        (_LOAD, 0, 0, _NUMBER),
        (_JUMP_AT_LEAST, 0, 1, _NEWER),
        (_RETURN, 0, 0, _UNKNOWN),
    ]
    for number in allowed:
        lines += [(_JUMP_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ALLOW)]
    for name, number in syscalls.filtered().items():
        # glibc makes threads by `clone` where `clone3`, whose flags no filter sees, is not there.
        block = _filter(rules[name], _UNKNOWN if name == "clone3" else _REFUSED)
        lines += [(_JUMP_EQUAL, 0, len(block), number), *block]
    lines.append((_RETURN, 0, 0, _REFUSED))
    return b"".join(struct.pack("HBBI", *line) for line in lines)


def _filter(alternatives: Alternatives, otherwise: int) -> list[tuple[int, int, int, int]]:
    block: list[tuple[int, int, int, int]] = []
    for conditions in alternatives:
        left = 3 * len(conditions)
        for half, mask, value in conditions:
            left -= 3
            block += [
                (_LOAD, 0, 0, _ARGUMENTS + 4 * half),
                (_AND, 0, 0, mask),
                (_JUMP_EQUAL, 0, left + 1, value),
            ]
        block.append((_RETURN, 0, 0, _ALLOW))
    return [*block, (_RETURN, 0, 0, otherwise)]
