"""A pool of processes: values, errors, hangs, deaths, cancellation, and nothing left behind."""

import asyncio
import pickle
import subprocess
import sys
import threading
from pathlib import Path
from time import monotonic, sleep

import pytest

from luyen.sandbox.calls import Call, Reply, seconds_left
from luyen.sandbox.pool import ProcessPool, _Ticket

CODE = """
import asyncio, os, signal, subprocess, sys, time
from luyen.sandbox.calls import seconds_left

prepared = []

class Deep:
    @staticmethod
    def er(): return "deeper"

class Odd: pass

def add(a, *, b): return a + b
async def slowly(a): await asyncio.sleep(0.01); return a
def fail(): raise ValueError("two\\nlines")
def hang(): time.sleep(60)
def hang_with_child(path):
    child = subprocess.Popen(["sleep", "60"])
    open(path, "w").write(str(child.pid))
    time.sleep(60)
def die(): os.kill(os.getpid(), signal.SIGKILL)
def leave(): sys.exit(3)
def big(n): return b"x" * n
def odd(): return lambda: 1
def own(): return Odd()
def left(): return seconds_left()
def pid(): return os.getpid()
def get_ready(a): time.sleep(1.5); prepared.append(a)
def is_ready(a): return prepared

def say(message):
    from multiprocessing.connection import Connection
    Connection(os.dup(int(sys.argv[1]))).send_bytes(message)
def chatty(a, message): say(message); return a
def late(a, message):
    import threading
    threading.Timer(0.2, say, [message]).start()
    return a
class Bomb:
    def __reduce__(self): return (int, ("no number",))
def bomb(): return Bomb()
"""


def is_alive(pid: int) -> bool:
    """Whether a process runs; the dead that nobody has buried do not count."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


@pytest.fixture
def call(tmp_path):
    file = tmp_path / "tools.py"
    file.write_text(CODE)

    def make(name: str, *args, prepare: str | None = None, **kwargs) -> Call:
        return Call(where=str(file), name=name, args=args, kwargs=kwargs, prepare=prepare)

    return make


def replies(*calls: Call, size: int = 1, timeout_s: float = 20.0, **settings) -> list[Reply]:
    async def all_of_them() -> list[Reply]:
        return await asyncio.gather(*(pool.run(call) for call in calls))

    pool = ProcessPool(size, timeout_s, **settings)
    try:
        return asyncio.run(all_of_them())
    finally:
        pids = pool.pids
        pool.close()
        assert not any(map(is_alive, pids))


def test_functions_of_modules_files_and_classes_are_called(call):
    found = replies(
        Call(where="math", name="hypot", args=(3.0, 4.0)),
        call("add", 1, b=2),
        call("slowly", "x"),
        call("Deep.er"),
    )
    assert [reply.value for reply in found] == [5.0, 3, "x", "deeper"]
    assert [reply.error for reply in found] == [None] * 4
    assert found[2].seconds >= 0.01


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("fail", "ValueError: two (tools.py:"),
        ("nothing_here", "AttributeError: module"),
        ("die", "the process that computed it ended (exit code -9)"),
        ("leave", "SystemExit: 3 (tools.py:"),
        ("odd", "the result cannot be sent: "),
    ],
)
def test_whatever_goes_wrong_is_an_error_and_the_next_call_works(call, name, error):
    found = replies(call("add", 1, b=2), call(name), call("add", 2, b=2))
    assert [reply.value for reply in found] == [3, None, 4]
    assert found[1].error is not None
    assert found[1].error.startswith(error)
    assert not found[1].timed_out


def test_places_that_are_not_there_are_errors(call):
    found = replies(
        Call(where="luyen_nowhere", name="f"),
        Call(where="/nowhere/at/all.py", name="f"),
        call("add", lambda: 1, b=1),
    )
    errors = [reply.error or "" for reply in found]
    assert "No module named 'luyen_nowhere'" in errors[0]
    assert "FileNotFoundError" in errors[1]
    assert "the arguments cannot be sent" in errors[2]


def test_a_result_beyond_the_limit_is_an_error(call):
    found = replies(call("big", 10**6), call("big", 10), result_bytes=10**5)
    assert found[0].error is not None
    assert "and 100000 are allowed" in found[0].error
    assert found[1].value == b"x" * 10


def test_a_value_of_a_class_that_is_unknown_here_is_an_error(call):
    found = replies(call("own"), call("add", 1, b=1))
    assert "cannot be read here" in (found[0].error or "")
    assert found[1].value == 2


@pytest.mark.parametrize("message", [pickle.dumps(Reply(value=99)), b"", b"ready", b"I\xff\n."])
def test_a_reply_never_belongs_to_another_call(call, message):
    """A function that writes into the pipe of its process had shifted all later replies by one."""
    found = replies(call("chatty", 1, message), *(call("add", i, b=0) for i in range(3)))
    assert "wrote into the pipe" in (found[0].error or "")
    assert [reply.value for reply in found[1:]] == [0, 1, 2]


def test_a_message_that_comes_later_is_not_the_next_reply(call):
    late = call("late", 1, pickle.dumps(Reply(value=99)))
    found = replies(late, call("slowly", 0.3), Call(where="time", name="sleep", args=(0.5,)))
    assert found[0].value == 1
    assert 99 not in [reply.value for reply in found]
    found = replies(late, call("add", 1, b=1))
    assert 99 not in [reply.value for reply in found]


def test_a_value_that_breaks_when_it_is_made_again_is_an_error(call):
    found = replies(call("bomb"), call("add", 1, b=1))
    assert "cannot be read here: ValueError" in (found[0].error or "")
    assert found[1].value == 2


def test_preparing_is_not_counted_as_time_of_the_call(call):
    [reply] = replies(call("is_ready", 7, prepare="get_ready"), timeout_s=1.0)
    assert reply.value == [7]
    assert reply.seconds < 1.0


def test_a_call_knows_how_long_it_may_take(call):
    [reply] = replies(call("left"), timeout_s=20.0)
    assert 0.0 < reply.value <= 20.0
    assert seconds_left() is None


def test_a_late_call_is_killed_with_its_children(call, tmp_path):
    note = tmp_path / "pid"
    [reply] = replies(call("hang_with_child", str(note)), timeout_s=1.0)
    assert reply.timed_out
    deadline = monotonic() + 5
    while is_alive(int(note.read_text())) and monotonic() < deadline:
        sleep(0.01)
    assert not is_alive(int(note.read_text()))


def test_a_late_call_is_an_error_and_the_next_one_works(call):
    async def both(pool: ProcessPool) -> tuple[Reply, Reply]:
        return await pool.run(call("hang"), timeout_s=0.2), await pool.run(call("add", 1, b=1))

    pool = ProcessPool(1, 60.0)
    late, next_one = asyncio.run(both(pool))
    pool.close()
    assert (late.error, late.timed_out) == ("no answer within 0.2 s", True)
    assert next_one.value == 2


def test_at_most_so_many_processes_are_started(call):
    found = replies(*[call("pid") for _ in range(12)], size=2)
    assert len({reply.value for reply in found}) <= 2


def test_a_cancelled_call_frees_its_process(call):
    async def cancelled(pool: ProcessPool) -> Reply:
        await pool.run(call("pid"))
        task = asyncio.ensure_future(pool.run(call("hang")))
        await asyncio.sleep(0.2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return await pool.run(call("add", 1, b=1))

    pool = ProcessPool(1, 60.0)
    start = monotonic()
    assert asyncio.run(cancelled(pool)).value == 2
    pool.close()
    assert monotonic() - start < 40


def test_a_closed_pool_answers_with_an_error(call):
    pool = ProcessPool(1, 1.0)
    pool.close()
    assert asyncio.run(pool.run(call("pid"))).error == "the pool of processes is closed"


def test_a_call_that_is_cancelled_before_it_has_a_process_never_begins(call, tmp_path, monkeypatch):
    """The thread has begun, and is about to take a process, when nobody waits any more."""
    note, has_begun, may_go_on = tmp_path / "pid", threading.Event(), threading.Event()
    dumps = pickle.dumps

    def slowly(value: object) -> bytes:
        has_begun.set()
        may_go_on.wait(10)
        return dumps(value)

    async def cancelled(pool: ProcessPool) -> Reply:
        task = asyncio.ensure_future(pool.run(call("hang_with_child", str(note))))
        await asyncio.to_thread(has_begun.wait, 10)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        monkeypatch.undo()
        may_go_on.set()
        return await pool.run(call("add", 1, b=1))

    monkeypatch.setattr("luyen.sandbox.pool.pickle.dumps", slowly)
    pool = ProcessPool(1, 20.0)
    start = monotonic()
    assert asyncio.run(cancelled(pool)).value == 2
    pool.close()
    assert monotonic() - start < 15
    assert not note.exists()


def test_a_process_that_was_killed_when_it_had_answered_is_not_used_again(call):
    async def both(pool: ProcessPool) -> list[Reply]:
        first = await pool.run(call("pid"))
        worker = pool._workers._idle[0]
        ticket = _Ticket()
        assert pool._workers.take(ticket) is worker
        pool._workers.cancel(ticket)
        pool._workers.give_back(worker)
        return [first, await pool.run(call("pid"))]

    pool = ProcessPool(1, 20.0)
    first, second = asyncio.run(both(pool))
    pool.close()
    assert second.error is None
    assert first.value != second.value


OWNER = """
import asyncio, sys
from luyen.sandbox.calls import Call
from luyen.sandbox.pool import ProcessPool

async def main():
    pool = ProcessPool(2, 3.0)
    await asyncio.gather(*(pool.run(Call(where=sys.argv[1], name=n, args=(sys.argv[2],)))
                           for n in ("litter", "spin")))

asyncio.run(main())
"""
LITTER = """
import os, re, subprocess, time

def note(path, *pids):
    with open(path, "a") as file:
        file.writelines(f"{pid}\\n" for pid in pids)
def litter(path):
    plain = subprocess.Popen(["sleep", "987"])
    apart = subprocess.Popen(["sleep", "987"], start_new_session=True)
    note(path, os.getpid(), plain.pid, apart.pid)
    time.sleep(60)
def spin(path):
    note(path, os.getpid())
    re.match("(a+)+b", "a" * 60)  # it never lets go of the interpreter
"""


def test_what_calls_started_ends_when_the_owner_is_killed(tmp_path):
    code, note = tmp_path / "litter.py", tmp_path / "pids"
    code.write_text(LITTER)
    owner = subprocess.Popen([sys.executable, "-c", OWNER, str(code), str(note)])
    deadline = monotonic() + 60
    while (not note.exists() or len(note.read_text().split()) < 4) and monotonic() < deadline:
        sleep(0.05)
    owner.kill()
    owner.wait()
    pids = [int(line) for line in note.read_text().split()]
    assert len(pids) == 4
    deadline = monotonic() + 60
    while any(map(is_alive, pids)) and monotonic() < deadline:
        sleep(0.1)
    assert [pid for pid in pids if is_alive(pid)] == []
