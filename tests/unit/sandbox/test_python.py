"""What comes back from programs that behave, and from those that do not."""

import asyncio
import signal

import pytest

from luyen.base.errors import UserError
from luyen.sandbox.launch import Limits
from luyen.sandbox.python import ProgramResult, run_python
from tests.unit.sandbox.programs import run


def test_output_value_and_exit_code_come_back():
    ran = run("import sys\nprint('out')\nprint('err', file=sys.stderr)\n[6 * 7, 'x']")
    assert (ran.stdout, ran.stderr, ran.value) == ("out\n", "err\n", "[42, 'x']")
    assert (ran.exit_code, ran.finished, ran.killed_for, ran.timed_out) == (0, True, None, False)
    assert ran.seconds > 0


@pytest.mark.parametrize(
    ("code", "value", "exit_code", "finished"),
    [
        ("x = 1", None, 0, True),
        ("None", None, 0, True),
        ("", None, 0, True),
        ("5\nx = 1", None, 0, True),
        ("raise SystemExit(3)", None, 3, False),
        ("import sys; sys.exit()", None, 0, False),
        ("import os; os._exit(0)", None, 0, False),
        ("1 / 0", None, 1, False),
        ("if", None, 1, False),
        ("x = '\0'", None, 1, False),
        ("'\ud800'", "'?'", 0, True),
        ("__name__", "'__main__'", 0, True),
        ("import __main__; __main__.__file__", "'main.py'", 0, True),
        ("class A:\n    def __repr__(self): raise ValueError\nA()", None, 1, False),
    ],
)
def test_a_program_ends_as_in_any_interpreter(code, value, exit_code, finished):
    ran = run(code)
    assert (ran.value, ran.exit_code, ran.finished) == (value, exit_code, finished)


def test_a_traceback_shows_the_program_and_nothing_of_the_guard():
    ran = run("def f():\n    return [][1]\n\nf()")
    assert ran.stderr.splitlines()[1].strip() == 'File "main.py", line 4, in <module>'
    assert ran.stderr.splitlines()[-1] == "IndexError: list index out of range"
    assert "return [][1]" in ran.stderr
    assert "guard.py" not in ran.stderr


def test_it_reads_its_input_and_its_files():
    files: dict[str, str | bytes] = {"deep/er/mod.py": "x = 5", "raw": b"\xff\x00"}
    code = "from deep.er.mod import x\nprint(input(), input(), x, open('raw', 'rb').read())"
    assert run(code, stdin="a\nb", files=files).stdout == "a b 5 b'\\xff\\x00'\n"
    assert run("input()").stderr.endswith("EOFError: EOF when reading a line\n")


@pytest.mark.parametrize("name", ["/etc/x", "../x", "a/../../x", ""])
def test_a_file_outside_the_directory_is_refused(name):
    with pytest.raises(UserError, match="working directory"):
        run("", files={name: "x"})


def test_installed_packages_can_be_imported():
    assert run("import numpy\nint(numpy.arange(4).sum())").value == "6"


def test_an_endless_loop_runs_into_the_limit_of_the_cpu():
    ran = run("while True: pass", cpu_s=1, wall_s=60)
    assert (ran.killed_for, ran.timed_out, ran.finished) == ("cpu", True, False)


@pytest.mark.parametrize(
    "code",
    [
        "import time\ntime.sleep(60)",
        "import time, signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(60)",
        "import threading, time\nthreading.Thread(target=time.sleep, args=(60,)).start()",
        "import subprocess\nsubprocess.run(['sleep', '60'])",
    ],
)
def test_a_program_that_waits_runs_into_the_limit_of_the_clock(code):
    ran = run(f"print('begun', flush=True)\n{code}", wall_s=0.5)
    assert (ran.killed_for, ran.timed_out, ran.stdout) == ("time", True, "begun\n")
    assert ran.exit_code == -signal.SIGKILL


def test_a_memory_hog_gets_a_memory_error():
    ran = run("x = bytearray(2**30)", memory_bytes=2**28)
    assert ran.exit_code == 1
    assert ran.stderr.splitlines()[-1] == "MemoryError"


def test_a_program_that_kills_itself_is_told_from_one_that_is_killed():
    ran = run("import os\nos.kill(os.getpid(), 9)")
    assert (ran.exit_code, ran.killed_for, ran.timed_out) == (-9, None, False)


def test_output_beyond_the_limit_is_cut_with_a_note():
    ran = run("print('x' * 3000)\n'y' * 3000", output_bytes=1000)
    assert ran.stdout == "x" * 1000 + "\n[2001 more bytes were cut]"
    assert ran.value == "'" + "y" * 999 + "... [2002 more characters were cut]"
    assert ran.exit_code == 0


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_endless_output_is_ended(stream):
    ran = run(f"import sys\nwhile True: sys.{stream}.write('x' * 10**6)", wall_s=60, cpu_s=60)
    assert ran.killed_for == "output"
    assert len(getattr(ran, stream)) < 2**18 + 100


def test_a_hundred_megabytes_do_not_reach_the_parent():
    ran = run("print('x' * 10**8)")
    assert ran.killed_for == "output"
    assert len(ran.stdout) < 2**18 + 100


def test_bytes_that_are_no_text_are_replaced():
    code = (
        "import sys\nsys.stdout.buffer.write(b'a\\xff\\xc3(z')\nsys.stderr.buffer.write(b'\\x80')"
    )
    ran = run(code)
    assert (ran.stdout, ran.stderr) == ("a\ufffd\ufffd(z", "\ufffd")
    assert run("print('\\ud800')").stdout == "\\ud800\n"


def test_fifty_at_once_do_not_disturb_each_other():
    async def all_of_them() -> list[ProgramResult]:
        programs = (f"open('x', 'w').write('{i}')\nint(open('x').read()) ** 2" for i in range(50))
        limits = Limits(wall_s=60)
        return await asyncio.gather(*(run_python(code, limits=limits) for code in programs))

    assert [ran.value for ran in asyncio.run(all_of_them())] == [str(i * i) for i in range(50)]


def test_limits_that_leave_nothing_are_refused():
    with pytest.raises(UserError, match=r"limits\.cpu_s = 0"):
        Limits(cpu_s=0)
