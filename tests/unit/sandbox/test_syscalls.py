"""The table of system calls: its numbers, and the filter that is made of it."""

import ctypes
import ctypes.util

import pytest

from luyen.sandbox.child import syscalls
from tests.unit.sandbox.programs import run

MACHINES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}


@pytest.mark.parametrize("machine", MACHINES)
def test_numbers_are_those_of_libseccomp(machine):
    name = ctypes.util.find_library("seccomp")
    if name is None:
        pytest.skip("libseccomp is not installed")
    library = ctypes.CDLL(name)
    architecture = ctypes.c_uint32(MACHINES[machine])
    found = {
        call: library.seccomp_syscall_resolve_name_arch(architecture, call.encode())
        for call in syscalls.every_number(machine)
    }
    unknown = {call for call, number in found.items() if number == -1}  # younger than the library
    assert {c: n for c, n in found.items() if c not in unknown} == {
        c: n for c, n in syscalls.every_number(machine).items() if c not in unknown
    }
    assert len(unknown) < 10
    assert len(found) > 180


@pytest.mark.parametrize("machine", MACHINES)
def test_what_reaches_beyond_the_program_is_not_in_the_table(machine):
    dangerous = (
        "ptrace process_vm_readv process_vm_writev io_uring_setup memfd_create shmget shmat msgget "
        "semget mq_open keyctl add_key request_key mount umount2 pivot_root chroot unshare setns "
        "bpf perf_event_open userfaultfd open_by_handle_at init_module kexec_load reboot swapon "
        "setuid setgid setgroups capset chown fchownat setxattr removexattr syslog move_pages"
    )
    assert not set(dangerous.split()) & set(syscalls.every_number(machine))


ORDINARY = {
    "threads": "import threading\nt = threading.Thread(target=print)\nt.start()\nt.join()\n5",
    "subprocess": """
import subprocess, sys
subprocess.run([sys.executable, '-c', 'pass'], check=True)
5
""",
    "multiprocessing": """
import multiprocessing as m
m.set_start_method('fork')
p = m.Process(target=print)
p.start()
p.join()
5 + p.exitcode
""",
    "thread pool": """
from concurrent.futures import ThreadPoolExecutor
pool = ThreadPoolExecutor(2)
sum(pool.map(int, '23'))
""",
    "asyncio": """
import asyncio
async def f():
    await asyncio.sleep(0.01)
    return 5
asyncio.run(f())
""",
    "files": """
import os, shutil, tempfile
open('a', 'w').write('x')
shutil.copyfile('a', 'b')
os.rename('b', 'c')
os.makedirs('d/e')
shutil.rmtree('d')
with tempfile.TemporaryFile() as f: f.write(b'x')
len(open('c').read()) + 4
""",
    "sqlite": """
import sqlite3
c = sqlite3.connect('x.db')
c.execute('create table t(a)')
c.execute('insert into t values (5)')
c.commit()
c.execute('select a from t').fetchone()[0]
""",
    "libraries": "import random, datetime, re, json, math, collections, heapq, zoneinfo\n5",
    "numpy": "import numpy as np\nint(np.linalg.inv(np.eye(50) / 5).max())",
    "signals": """
import signal
signal.alarm(5)
signal.setitimer(signal.ITIMER_REAL, 3)
signal.alarm(0)
5
""",
    "pipes": "import os\nos.mkfifo('p')\nr, w = os.pipe()\nos.write(w, b'5')\nint(os.read(r, 1))",
    "maps": "import mmap\nm = mmap.mmap(-1, 4096)\nm[:1] = b'5'\nint(m[:1])",
    "limits": "import resource\nresource.setrlimit(resource.RLIMIT_CPU, (1, 1))\n5",
    "children": """
import os, signal
pid = os.fork()
if pid == 0: signal.pause()
os.kill(pid, 9)
os.waitpid(pid, 0)
5
""",
}


@pytest.mark.parametrize("code", ORDINARY.values(), ids=ORDINARY)
def test_ordinary_programs_do_not_notice(code):
    ran = run(code, wall_s=60, cpu_s=30)
    assert ran.value == "5", ran.stderr
