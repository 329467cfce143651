"""Programs that attack, and what is left of them when their owner or their guard dies."""

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from time import monotonic, sleep

import pytest

from luyen.sandbox import launch, python
from luyen.sandbox.child.isolation import refuse_sockets
from luyen.sandbox.launch import SandboxFault, available
from luyen.sandbox.python import ProgramResult, run_python
from tests.unit.sandbox.programs import children, run

needs_namespaces = pytest.mark.skipif(
    "namespaces" not in available(), reason="no user namespaces on this machine"
)
needs_landlock = pytest.mark.skipif(
    not {"landlock", "root"} & set(available()), reason="neither Landlock nor namespaces"
)


BOMB = """
import os, time
for _ in range(10):  # a thousand processes: a wall that fails must not take the machine with it
    try: os.fork()
    except OSError: pass
time.sleep(30)
"""


def test_a_fork_bomb_is_ended():
    ran = run(BOMB, processes=8, wall_s=20)
    assert ran.killed_for == "processes"


def test_children_that_hide_in_sessions_of_their_own_die_with_the_program(tmp_path):
    code = f"""
import subprocess, sys
line = [sys.executable, '-c', 'import time; time.sleep(60)', 'luyen.sandbox.child.guard']
line.append('{os.getpid()}')
subprocess.Popen(line, start_new_session=True)
subprocess.Popen(line, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
print('left')
"""
    start = monotonic()
    assert run(code).stdout == "left\n"  # that they are gone is the fixture's to see
    assert monotonic() - start < 30


@needs_namespaces
def test_a_program_cannot_kill_what_guards_it():
    code = f"""
import os
import shutil
for pid in (1, os.getppid(), {os.getpid()}):
    try: os.kill(pid, 9)
    except OSError as error: print(type(error).__name__)
try: os.kill(-1, 15)
except OSError: pass
"""
    ran = run(code)
    assert ran.stdout.splitlines().count("ProcessLookupError") >= 1
    assert ran.killed_for is None


def test_the_environment_of_the_parent_is_not_visible(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hush")
    code = f"""
import os
import shutil
found = [dict(os.environ)]
for pid in (os.getppid(), {os.getpid()}):
    try: found.append(open(f'/proc/{{pid}}/environ').read())
    except OSError: pass
print(found)
"""
    assert "hush" not in run(code).stdout


@pytest.mark.parametrize("family", ["AF_INET", "AF_INET6", "AF_UNIX"])
def test_a_program_has_no_network(family, tmp_path):
    names = {"AF_INET": "127.0.0.1", "AF_INET6": "::1"}
    with socket.socket(getattr(socket, family)) as server:
        place = str(tmp_path / "s") if family == "AF_UNIX" else (names[family], 0)
        server.bind(place)
        server.listen()
        code = f"""
import socket
with socket.socket(socket.{family}) as s:
    s.connect({server.getsockname()!r})
print('through')
"""
        assert "through" not in run(code).stdout
        if family == "AF_INET":
            assert "through" in run(code, network=True).stdout


def test_a_pair_of_sockets_is_no_network():
    assert run("import asyncio\nasync def f(): return 5\nasyncio.run(f())").value == "5"


@needs_landlock
@pytest.mark.parametrize("code", ["open({0!r}, 'w')", "import os; os.unlink({0!r})"])
def test_nothing_outside_its_directory_is_written(code, tmp_path):
    target = tmp_path / "mine"
    target.write_text("precious")
    assert run(code.format(str(target))).exit_code == 1
    assert run(code.format(str(target))).stderr.splitlines()[-1].split(":")[0] in (
        "PermissionError",
        "OSError",
    )
    assert target.read_text() == "precious"
    assert run("open('own', 'w').write('abc')").value == "3"
    assert run("open('/dev/null', 'w').write('abc')").value == "3"


@pytest.mark.skipif("landlock" not in available(), reason="no Landlock")
def test_files_of_the_user_are_not_read(tmp_path):
    target = tmp_path / "mine"
    target.write_text("precious")
    ran = run(f"print(open({str(target)!r}).read())")
    assert "PermissionError" in ran.stderr or "FileNotFoundError" in ran.stderr
    assert "precious" not in ran.stdout


def test_a_file_beyond_the_limit_is_refused():
    ran = run("open('big', 'wb').write(b'x' * 10**7)", file_bytes=10**6)
    assert ran.exit_code == 1
    assert "OSError" in ran.stderr


@needs_namespaces
def test_many_files_share_the_limit():
    code = "for i in range(100): open(str(i), 'wb').write(b'x' * 10**5)"
    assert "No space left" in run(code, file_bytes=10**6).stderr


@needs_namespaces
def test_walls_cannot_be_taken_down_from_inside(tmp_path):
    target = tmp_path / "mine"
    target.write_text("precious")
    code = f"""
import ctypes, os
libc = ctypes.CDLL(None)
libc.umount2(b'/proc', 2)
libc.mount(None, b'/', None, 32 | 4096, None)
libc.unshare(0x10020000)
libc.mount(None, b'/', None, 32 | 4096, None)
open({str(target)!r}, 'w')
"""
    assert run(code).exit_code == 1
    assert target.read_text() == "precious"


def test_a_cancelled_run_leaves_nothing():
    async def cancelled() -> None:
        task = asyncio.ensure_future(run_python("import time; time.sleep(60)"))
        await asyncio.sleep(0.5)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())


async def _with_killed_guards(times: int) -> ProgramResult:
    """A program of a second, whose guard is killed so often."""
    killed = children()
    task = asyncio.ensure_future(run_python("import time; time.sleep(1)\n5"))
    for _ in range(times):
        while len(children() - killed) < 2:
            await asyncio.sleep(0.01)
        guard = min(children() - killed)
        killed |= children()
        os.kill(guard, signal.SIGKILL)
    return await task


def test_a_program_whose_guard_was_killed_once_is_run_again():
    assert asyncio.run(_with_killed_guards(1)).value == "5"


def test_a_program_whose_guard_never_reports_has_failed():
    ran = asyncio.run(_with_killed_guards(2))
    assert (ran.killed_for, ran.finished, ran.exit_code) == ("guard", False, -9)


def test_where_not_even_an_empty_program_runs_the_sandbox_is_at_fault(monkeypatch):
    monkeypatch.setattr(python, "command", lambda *_: [sys.executable, "-c", "raise SystemExit(1)"])
    monkeypatch.setattr(launch, "command", lambda *_: [sys.executable, "-c", "raise SystemExit(1)"])
    with pytest.raises(SandboxFault):
        asyncio.run(run_python("5"))
    launch.probe.cache_clear()


def test_a_program_does_not_outlive_its_killed_owner():
    owner = """
import asyncio
from luyen.sandbox.python import run_python
asyncio.run(run_python("import time; time.sleep(60)"))
"""
    environment = os.environ | {"TMPDIR": tempfile.gettempdir()}
    line = [sys.executable, "-c", owner]
    with subprocess.Popen(line, env=environment) as process:
        while len(children(process.pid)) < 2:
            sleep(0.01)
        process.kill()
    deadline = monotonic() + 10
    while children(process.pid) and monotonic() < deadline:
        sleep(0.01)
    assert children(process.pid) == set()
    for left in Path(tempfile.gettempdir()).glob("luyen-*"):
        assert list(left.iterdir()) == [] or "root" not in available()
        shutil.rmtree(left)


def test_where_the_kernel_does_not_help_python_code_is_refused_sockets():
    with pytest.raises(PermissionError, match="no network"):
        refuse_sockets("socket.connect", ())
    refuse_sockets("open", ())


WITHOUT = """
import asyncio
from luyen.sandbox.launch import Limits, available
from luyen.sandbox.python import run_python

child = "import subprocess\\nsubprocess.Popen(['sleep', '60.417'], start_new_session=True)\\n5"
flood = '''
import subprocess, sys
for _ in range(4): subprocess.Popen(['sleep', '50.417'], start_new_session=True)
while True: sys.stdout.write('x' * 10**6)
'''
limits = Limits(processes=8, wall_s=60.0, cpu_s=60)
ran = [asyncio.run(run_python(code, limits=limits)) for code in (bomb, child)]
floods = [asyncio.run(run_python(flood, limits=limits)).killed_for for _ in range(8)]
print("namespaces" in available(), ran[0].killed_for, ran[1].value, set(floods))
"""


@needs_namespaces
def test_without_namespaces_the_guard_itself_ends_what_is_left(tmp_path):
    if shutil.which("unshare") is None:
        pytest.skip("no `unshare` to take namespaces away with")
    script = tmp_path / "without.py"
    script.write_text(f"bomb = {BOMB!r}\n{WITHOUT}")
    forbid = "echo 0 > /proc/sys/user/max_user_namespaces"
    line = f'{forbid} && exec "{sys.executable}" "{script}"'
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    done = subprocess.run(
        ["unshare", "-Ur", "sh", "-c", line], capture_output=True, env=environment, check=False
    )
    assert done.stdout == b"False processes 5 {'output'}\n", done.stderr
    left = [line for line in _command_lines() if line.endswith(b"0.417\x00")]
    assert left == []


def _command_lines() -> list[bytes]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                found.append((entry / "cmdline").read_bytes())
    return found
