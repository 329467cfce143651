"""The system calls that a program may make, by name: all others are refused.

Each entry is a name and its number on x86-64 and on 64-bit ARM; a dash means that the machine lacks
it. A test compares the numbers with those of libseccomp where that library is installed.
"""

import platform

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
"""Allowed or refused by their arguments: `luyen.sandbox.inside.seccomp` says how."""


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
