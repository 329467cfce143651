"""System calls: those that Python lacks, and the seccomp filter that refuses all but a list.

The filter is written here rather than by libseccomp, because a program waits for the guard to
start, and because slim containers lack the library: they would lose this layer.
"""

import ctypes
import errno
import os
import platform
import struct
import sys
from typing import TypeAlias

# System calls that Python does not offer. Each returns whether the kernel agreed.

_IS_LINUX = sys.platform == "linux"
_LIBC = ctypes.CDLL(None if os.name == "posix" else "msvcrt", use_errno=True)

PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_SECCOMP = 22
PR_CAPBSET_DROP = 24
PR_SET_CHILD_SUBREAPER = 36
PR_SET_NO_NEW_PRIVS = 38
_CAPABILITY_VERSION = 0x20080522
_KEYCTL, _JOIN_SESSION_KEYRING = {"x86_64": 250, "aarch64": 219}, 1


def ask(name: str, *arguments: int | bytes | None) -> bool:
    """Call a function of the C library; whether it returned 0."""
    return _IS_LINUX and _LIBC[name](*map(_wide, arguments)) == 0


def system_call(number: int, *arguments: int | bytes | None) -> int:
    """Make a system call; its result, negative when it is refused or there is none."""
    if not _IS_LINUX:
        return -1
    return int(_LIBC.syscall(*map(_wide, (number, *arguments))))


def control(option: int, argument: int) -> bool:
    """Set one property of this process."""
    return ask("prctl", option, argument, 0, 0, 0)


def leave_keyrings() -> None:
    """Give this process an empty session keyring: that of the login holds keys of the user."""
    number = _KEYCTL.get(platform.machine())
    if number is not None:
        system_call(number, _JOIN_SESSION_KEYRING, None)


def drop_capabilities() -> None:
    """Give up what root may do beyond its own files, for this process and all it starts."""
    number = 0
    while control(PR_CAPBSET_DROP, number):
        number += 1
    header = _CAPABILITY_VERSION.to_bytes(4, sys.byteorder) + bytes(4)
    ask("capset", header, bytes(24))


def _wide(argument: int | bytes | None) -> object:
    """Integers as wide as a register: the C side would read rubbish above the lower half."""
    return ctypes.c_long(argument) if isinstance(argument, int) else argument


# The allowed system calls, by name; every other one is refused.
#
# Each entry is a name and its number on x86-64 and on 64-bit ARM; a dash means that the machine
# lacks it. A test compares the numbers with those of libseccomp where that library is
# installed.

_COLUMNS = {"x86_64": 1, "aarch64": 2}

_ALLOWED = """
read 0 63, write 1 64, readv 19 65, writev 20 66, pread64 17 67, pwrite64 18 68, preadv 295 69,
pwritev 296 70, preadv2 327 286, pwritev2 328 287, lseek 8 62, close 3 57, close_range 436 436,
dup 32 23, dup2 33 -, dup3 292 24, pipe 22 -, pipe2 293 59, flock 73 32, fsync 74 82,
fdatasync 75 83, sync_file_range 277 84, sendfile 40 71, copy_file_range 326 285, splice 275 76,
tee 276 77, fadvise64 221 223, readahead 187 213, fallocate 285 47, ftruncate 77 46,
truncate 76 45, open 2 -, openat 257 56, creat 85 -, stat 4 -, fstat 5 80, lstat 6 -,
newfstatat 262 79, statx 332 291, access 21 -, faccessat 269 48, faccessat2 439 439,
readlink 89 -, readlinkat 267 78, getdents 78 -, getdents64 217 61, getcwd 79 17, chdir 80 49,
fchdir 81 50, mkdir 83 -, mkdirat 258 34, rmdir 84 -, rename 82 -, renameat 264 38,
renameat2 316 276, link 86 -, linkat 265 37, unlink 87 -, unlinkat 263 35, symlink 88 -,
symlinkat 266 36, umask 95 166, statfs 137 43, fstatfs 138 44,
epoll_create 213 -, epoll_create1 291 20, epoll_ctl 233 21, epoll_wait 232 -, epoll_pwait 281 22,
epoll_pwait2 441 441, poll 7 -, ppoll 271 73, select 23 -, pselect6 270 72, eventfd 284 -,
eventfd2 290 19, timerfd_create 283 85, timerfd_settime 286 86, timerfd_gettime 287 87,
signalfd 282 -, signalfd4 289 74, futex 202 98, futex_waitv 449 449, futex_wake 454 454,
futex_wait 455 455, futex_requeue 456 456,
brk 12 214, munmap 11 215, mprotect 10 226, mremap 25 216, madvise 28 233,
msync 26 227, mincore 27 232, membarrier 324 283, pkey_alloc 330 289, pkey_mprotect 329 288,
pkey_free 331 290, get_mempolicy 239 236, set_mempolicy 238 237, mbind 237 235,
fork 57 -, vfork 58 -, execve 59 221, exit 60 93, exit_group 231 94, wait4 61 260, waitid 247 95,
getpid 39 172, getppid 110 173, gettid 186 178, getpgid 121 155, getpgrp 111 -, getsid 124 156,
setsid 112 157, setpgid 109 154, getuid 102 174, geteuid 107 175, getgid 104 176, getegid 108 177,
getresuid 118 148, getresgid 120 150, getgroups 115 158, capget 125 90, set_tid_address 218 96,
set_robust_list 273 99, rseq 334 293, arch_prctl 158 -,
sched_yield 24 124, sched_getaffinity 204 123, sched_getparam 143 121, sched_getscheduler 145 120,
sched_get_priority_max 146 125, sched_get_priority_min 147 126, sched_rr_get_interval 148 127,
getpriority 140 141, getrlimit 97 163, setrlimit 160 164, getrusage 98 165, times 100 153,
sysinfo 99 179, uname 63 160, getcpu 309 168, getrandom 318 278, pidfd_open 434 434,
rt_sigaction 13 134, rt_sigprocmask 14 135, rt_sigreturn 15 139, rt_sigpending 127 136,
rt_sigsuspend 130 133, rt_sigtimedwait 128 137, sigaltstack 131 132, restart_syscall 219 128,
pause 34 -, alarm 37 -, setitimer 38 103, getitimer 36 102, timer_create 222 107,
timer_settime 223 110, timer_gettime 224 108, timer_getoverrun 225 109, timer_delete 226 111,
clock_gettime 228 113, clock_getres 229 114, clock_nanosleep 230 115, nanosleep 35 101,
gettimeofday 96 169, time 201 -,
recvfrom 45 207, recvmsg 47 212, shutdown 48 210, getsockname 51 204,
getpeername 52 205, getsockopt 55 209, setsockopt 54 208,
"""
"""Files (Landlock and mounts decide which), waiting, memory, processes, signals, time, and the ends
of a socket pair."""
_OWN_FILES = """
chmod 90 -, fchmod 91 52, fchmodat 268 53, fchmodat2 452 452, utime 132 -, utimes 235 -,
futimesat 261 -, utimensat 280 88,
getxattr 191 8, lgetxattr 192 9, fgetxattr 193 10, listxattr 194 11, llistxattr 195 12,
flistxattr 196 13,
"""
"""They change the mode and the times of any file of the user and read its attributes. Landlock does
not prevent it, so they are allowed only where the program has a root of its own."""
_NETWORK = """
connect 42 203, bind 49 200, listen 50 201, accept 43 202, accept4 288 242, sendmmsg 307 269,
recvmmsg 299 243,
"""
_FILTERED = """
clone 56 220, prlimit64 302 261, socketpair 53 199, sendto 44 206, ioctl 16 29, prctl 157 167,
kill 62 129, tkill 200 130, tgkill 234 131, pidfd_send_signal 424 424, sched_setaffinity 203 122,
setpriority 141 140, mknod 133 -, mknodat 259 33, socket 41 198, clone3 435 435, fcntl 72 25,
mmap 9 222, sendmsg 46 211,
"""
"""Allowed or refused by their arguments: `luyen.sandbox.child.syscalls` says how."""


def is_known_machine() -> bool:
    """Whether the numbers of this machine are in the table."""
    return platform.machine() in _COLUMNS


def allowed(*, own_files: bool, network: bool) -> list[int]:
    """Numbers that are allowed with any arguments."""
    text = _ALLOWED + (_OWN_FILES if own_files else "") + (_NETWORK if network else "")
    return list(numbers(text).values())


def filtered() -> dict[str, int]:
    """Name to number of the calls whose arguments decide."""
    return numbers(_FILTERED)


def numbers(text: str, machine: str | None = None) -> dict[str, int]:
    """Name to number of the calls of a table that a machine has.

    Example:
        >>> numbers("open 2 -, openat 257 56", "aarch64")
        {'openat': 56}
    """
    column = _COLUMNS[machine or platform.machine()]
    entries = (entry.split() for entry in text.split(",") if entry.strip())
    return {entry[0]: int(entry[column]) for entry in entries if entry[column] != "-"}


def every_number(machine: str) -> dict[str, int]:
    """Name to number of every call of the table, for one machine."""
    return numbers(_ALLOWED + _OWN_FILES + _NETWORK + _FILTERED, machine)


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


def filter_syscalls(*, network: bool, own_files: bool, any_signal: bool, counted: bool) -> bool:
    """Allow only the calls of the table from here on; False where this machine is not known.

    `own_files`: modes and times of files may be changed. `any_signal`: signals may be sent to any
    process, because something else keeps them inside. `counted`: the kernel counts their memory.
    """
    if not is_known_machine():
        return False
    rules = _rules(network=network, any_signal=any_signal, counted=counted)
    rules["sendmsg"] = [[]] if network or (own_files and counted) else []
    program = _program(allowed(own_files=own_files, network=network), rules)
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
    for name, number in filtered().items():
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
