"""Attacks on the sandbox, run by `luyen selftest --sandbox` and by the tests.

Each is a program that tries to do what a promise forbids, and says so where it succeeded; whether
it left a trace outside is looked at here. `luyen.sandbox.launch.ISOLATION` lists the promises.
"""

import os
import resource
import socket
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import final

from luyen.sandbox.launch import Limits
from luyen.sandbox.python import run_python

SECRET = "a-secret-of-the-user"
_LIMITS = Limits(memory_bytes=2**28, wall_s=20.0, cpu_s=10, processes=8)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Attack:
    """A program that tries one thing.

    Example:
        >>> Attack(name="list", promise="files", code="breach(1)").promise
        'files'
    """

    name: str
    """What it tries."""
    promise: str
    """The promise that forbids it."""
    code: str
    """The program; `breach(text)` says that it succeeded, `attempt(f, ...)` calls a function."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What lies outside for programs to attack.

    Example:
        >>> with target() as outside:
        ...     outside.traces()
        []
    """

    file: Path
    """A file of the user, with `SECRET` in it."""
    datagrams: socket.socket
    """A bound Unix socket that takes datagrams."""
    server: socket.socket
    """A TCP server of this machine."""

    def traces(self) -> list[str]:
        """What programs changed outside."""
        found: list[str] = []
        if not self.file.exists() or self.file.read_text() != SECRET:
            return ["the file was changed"]
        status = self.file.stat()
        if stat.S_IMODE(status.st_mode) != 0o600 or status.st_mtime != 1000.0:
            found.append("the mode or the time of the file was changed")
        if resource.getrlimit(resource.RLIMIT_NICE)[0] == 1:
            found.append("a limit of this process was changed")
        for server in (self.datagrams, self.server):
            try:
                server.recv(100) if server is self.datagrams else server.accept()
            except OSError:
                continue
            found.append("something arrived at a socket")
        return found


@contextmanager
def target() -> Iterator[Target]:
    """A target in a folder of its own, gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="luyen-target-") as folder:
        file = Path(folder) / "secret"
        file.write_text(SECRET)
        file.chmod(0o600)
        os.utime(file, (1000.0, 1000.0))
        with (
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as datagrams,
            socket.socket() as server,
        ):
            datagrams.bind(f"{folder}/datagrams")
            server.bind(("127.0.0.1", 0))
            server.listen()
            for one in (datagrams, server):
                one.setblocking(False)
            yield Target(file=file, datagrams=datagrams, server=server)


async def breaches(attack: Attack, outside: Target) -> list[str]:
    """What an attack achieved; empty if it was contained."""
    facts = {
        "FILE": str(outside.file),
        "DATAGRAMS": outside.datagrams.getsockname(),
        "PORT": outside.server.getsockname()[1],
        "OWNER": os.getpid(),
    }
    code = "\n".join(f"{name} = {value!r}" for name, value in facts.items())
    ran = await run_python(f"{code}\n{_PRELUDE}\n{attack.code}", limits=_LIMITS)
    said = [line for line in ran.stdout.splitlines() if line.startswith("BREACH")]
    if not ran.finished and ran.killed_for is None:
        said.append(f"the attack did not come to its end: {ran.stderr[-300:]}")
    return said + outside.traces()


_PRELUDE = """
import ctypes, errno, os, platform, resource, signal, socket, sys
libc = ctypes.CDLL(None, use_errno=True)
COLUMN = {"x86_64": 0, "aarch64": 1}.get(platform.machine(), 0)
NUMBERS = {
    "memfd_create": (319, 279), "shmget": (29, 194), "shmat": (30, 196), "keyctl": (250, 219),
    "add_key": (248, 217), "ptrace": (101, 117), "process_vm_readv": (310, 270),
    "io_uring_setup": (425, 425), "setns": (308, 268), "unshare": (272, 97), "mount": (165, 40),
    "chroot": (161, 51), "pivot_root": (155, 41), "bpf": (321, 280), "userfaultfd": (323, 282),
    "perf_event_open": (298, 241), "open_by_handle_at": (304, 265), "fsopen": (430, 430),
    "mq_open": (240, 180), "msgget": (68, 186), "pidfd_getfd": (438, 438),
    "sched_setaffinity": (203, 122), "setpriority": (141, 140), "clone3": (435, 435),
    "kexec_load": (246, 104), "init_module": (175, 105), "swapon": (167, 224),
    "reboot": (169, 142), "settimeofday": (164, 170), "acct": (163, 89), "personality": (135, 92),
    "sched_setscheduler": (144, 119), "ioprio_set": (251, 30), "move_pages": (279, 239),
}
def call(name, *given):
    given = [ctypes.c_long(g) if isinstance(g, int) else g for g in given]
    return libc.syscall(ctypes.c_long(NUMBERS[name][COLUMN]), *given)
def breach(text):
    print("BREACH:", text, flush=True)
def attempt(function, *given, **named):
    try:
        found = function(*given, **named)
    except (OSError, ValueError, MemoryError):
        return None
    breach(f"{getattr(function, '__name__', function)} {given} succeeded")
    return found
"""


def _attack(name: str, promise: str, code: str) -> Attack:
    return Attack(name=name, promise=promise, code=code)


ATTACKS = (
    _attack("read a file of the user", "files", "attempt(lambda: open(FILE).read())"),
    _attack("read it through /proc", "files", """
for place in ("self", "1", str(os.getppid()), str(OWNER)):
    for way in ("root", "cwd/../../../../../.."):
        attempt(lambda: open(f"/proc/{place}/{way}{FILE}").read())
"""),
    _attack("write, remove or move it", "files", """
for mode in ("w", "a", "r+"): attempt(lambda: open(FILE, mode))
for function in (os.unlink, lambda p: os.truncate(p, 0), lambda p: os.rename(p, "moved"),
                 lambda p: os.link(p, "linked"), lambda p: os.open(p, os.O_TRUNC)):
    attempt(function, FILE)
"""),
    _attack("change its mode, owner, times or attributes", "files", """
attempt(os.chmod, FILE, 0o777)
attempt(os.chown, FILE, os.getuid(), os.getgid())
attempt(os.utime, FILE, (5, 5))
attempt(os.setxattr, FILE, "user.mark", b"x")
"""),
    _attack("change the interpreter and the system", "files", """
for place in {sys.prefix, "/usr", "/usr/bin/env", "/etc/passwd", os.__file__, "/"}:
    attempt(os.chmod, place, os.stat(place).st_mode if os.path.exists(place) else 0o755)
    attempt(os.utime, place)
    attempt(lambda: open(place if os.path.isfile(place) else f"{place}/made", "a"))
"""),
    _attack("read passwords and keys of the system", "files", """
for place in ("/etc/shadow", "/etc/gshadow", "/etc/sudoers", "/root/.ssh", "/proc/kcore", "/boot"):
    attempt(lambda: os.listdir(place) if os.path.isdir(place) else open(place, "rb").read(1))
"""),
    _attack("open devices", "files", """
harmless = {"null", "zero", "full", "random", "urandom"}
known = ["kvm", "fuse", "console", "tty", "mem", "vda", "sda", "nvme0n1", "loop0", "loop-control"]
try: known += os.listdir("/dev")
except OSError: pass
for name in set(known) - harmless - {"shm", "fd", "stdin", "stdout", "stderr"}:
    if not os.path.isdir(f"/dev/{name}"): attempt(os.open, f"/dev/{name}", os.O_RDONLY)
import stat
attempt(os.mknod, "disk", 0o600 | stat.S_IFBLK, os.makedev(7, 0))
"""),
    _attack("leave the root or mount", "files", """
for name, given in (("chroot", (b".",)), ("unshare", (0x10020000,)), ("setns", (0, 0)),
        ("mount", (b"tmpfs", b".", b"tmpfs", 0, None)), ("pivot_root", (b".", b".")),
        ("fsopen", (b"tmpfs", 0)), ("open_by_handle_at", (0, None, 0))):
    if call(name, *given) >= 0: breach(name)
"""),
    _attack("connect to this machine", "network", """
attempt(socket.create_connection, ("127.0.0.1", PORT), 2)
"""),
    _attack("make a socket of any family", "network", """
for family in range(46):
    for kind in (1, 2, 3, 5):
        attempt(socket.socket, family, kind)
"""),
    _attack("send a datagram through a pair", "network", """
def send():
    a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    a.sendto(b"out", DATAGRAMS)
attempt(send)
def stream():
    a, b = socket.socketpair()
    a.sendmsg([b"out"], [], 0, DATAGRAMS)
attempt(stream)
"""),
    _attack("make sockets through io_uring", "network", """
if call("io_uring_setup", 4, ctypes.create_string_buffer(120)) >= 0: breach("io_uring")
"""),
    _attack("signal, limit or slow down the trainer", "processes", """
attempt(resource.prlimit, OWNER, resource.RLIMIT_NICE, (1, 1))
attempt(resource.prlimit, OWNER, resource.RLIMIT_CPU)
attempt(os.kill, OWNER, 0)
attempt(os.setpriority, os.PRIO_PROCESS, OWNER, 19)
attempt(os.sched_setaffinity, OWNER, {0})
if call("sched_setscheduler", OWNER, 5, ctypes.byref(ctypes.c_int(0))) >= 0: breach("scheduler")
if call("ioprio_set", 1, OWNER, 3 << 13) >= 0: breach("ioprio")
"""),
    _attack("limit or end the guard", "processes", """
for pid in {1, os.getppid()}:
    attempt(resource.prlimit, pid, resource.RLIMIT_FSIZE, (0, 0))
    attempt(resource.prlimit, pid, resource.RLIMIT_CPU)
    attempt(lambda: open(f"/proc/{pid}/mem", "rb").read(1))
    attempt(lambda: open(f"/proc/{pid}/environ", "rb").read())
    try: os.kill(pid, 9)
    except OSError: pass
"""),
    _attack("look into the trainer", "processes", """
for name in ("environ", "mem", "maps", "fd", "auxv", "io"):
    attempt(lambda: open(f"/proc/{OWNER}/{name}", "rb").read(1))
if call("ptrace", 16, OWNER, 0, 0) >= 0: breach("ptrace")
if call("process_vm_readv", OWNER, None, 0, None, 0, 0) >= 0: breach("process_vm_readv")
"""),
    _attack("let the kernel send a signal", "processes", """
import fcntl
r, w = os.pipe()
attempt(fcntl.fcntl, r, 8, OWNER)
attempt(fcntl.fcntl, r, 10, 9)
attempt(fcntl.fcntl, os.open(os.__file__, os.O_RDONLY), 1024, 0)
"""),
    _attack("use keyrings", "processes", """
for number in (-1, -2, -3, -4, -5):
    if call("keyctl", 6, number, None, 0) >= 0: breach(f"describe {number}")
if call("add_key", b"user", b"luyen", b"x", 1, -3) >= 0: breach("add_key")
"""),
    _attack("reach into the kernel", "processes", """
for name, given in (("bpf", (0, None, 0)), ("perf_event_open", (None, 0, -1, -1, 0)),
        ("userfaultfd", (1,)), ("kexec_load", (0, 0, None, 0)), ("init_module", (None, 0, b"")),
        ("swapon", (b".", 0)), ("settimeofday", (None, None)), ("acct", (None,)),
        ("personality", (0x0400000,)), ("move_pages", (0, 0, None, None, None, 0))):
    if call(name, *given) >= 0: breach(name)
    elif ctypes.get_errno() == errno.EFAULT: breach(name)
"""),
    _attack("keep memory in nameless files", "memory", """
block, kept = b"x" * 2**20, 0
while kept < 400:
    number = call("memfd_create", b"m", 0)
    if number < 0: break
    try:
        for _ in range(16): os.write(number, block); kept += 1
    except OSError: break
if kept >= 400: breach(f"{kept} MiB in memfds")
"""),
    _attack("fill the disk", "memory", """
kept, files = 0, []
try:
    for i in range(200):
        files.append(open(f"f{i}", "wb", 0))
        os.unlink(f"f{i}")
        for _ in range(15): files[-1].write(b"x" * 2**20); kept += 1
except OSError: pass
if kept > 400: breach(f"{kept} MiB of removed files")
"""),
    _attack("keep memory in segments", "memory", """
if call("shmget", 0, 2**24, 0o1600) >= 0: breach("a SysV segment")
if call("msgget", 0, 0o1600) >= 0: breach("a SysV queue")
if call("mq_open", b"luyen", 0o102, 0o600, None) >= 0: breach("a POSIX queue")
"""),
    _attack("keep memory in many processes", "memory", """
import time
for _ in range(6):
    if os.fork() == 0:
        kept = bytearray(100 * 2**20)
        for i in range(0, len(kept), 4096): kept[i] = 1
        time.sleep(1.5); os._exit(0)
try:
    codes = [os.waitstatus_to_exitcode(os.wait()[1]) for _ in range(6)]
except OSError: codes = [1]
if codes == [0] * 6: breach("600 MiB in six processes")
"""),
    _attack("survive when memory runs out", "memory", """
if int(open("/proc/self/oom_score_adj").read()) < 1000: breach("oom_score_adj")
def lower():
    with open("/proc/self/oom_score_adj", "w") as file: file.write("-1000")
attempt(lower)
"""),
)  # fmt: skip
"""Every attack, by promise."""
