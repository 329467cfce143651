"""What a process of the pool is asked to do: settle in, load the judging function, then judge.

Judging code may fork, flood its output or eat memory. None of that reaches the next call: a copy
that a call forked never answers, output goes through a pipe that lets only its beginning pass, and
a process that ran out of memory or left too many others behind ends, and is replaced.
"""

import os
import resource
import sys
import threading
from contextlib import suppress
from functools import cache
from pathlib import Path

from luyen.rewards.calls import Call, function_of, perform
from luyen.rewards.outcome import Outcome
from luyen.sandbox.descendants import stemming_from
from luyen.sandbox.inside.kernel import PR_SET_CHILD_SUBREAPER, control

OUT_OF_MEMORY = 97
TOO_MANY_PROCESSES = 98
"""Exit codes that say why the process ended itself."""
MOST_PROCESSES = 16
"""How many a call may leave behind, as one that keeps a server of its own does."""
MOST_OUTPUT = 2**20
"""Bytes that the judging code of one process may print in its life; the rest is dropped."""
_ENOUGH = b"\n[more output of judging code was dropped]\n"


def load(call: Call, memory_bytes: int | None) -> None:
    """Import what a call needs; whatever that raises is the fault of the call."""
    settle_in(memory_bytes)
    function_of(call.name, call.source, call.rule)


def judge(call: Call, memory_bytes: int | None) -> Outcome:  # noqa: ARG001
    """Make the call; it never raises."""
    owner = os.getpid()
    outcome = perform(call)
    if os.getpid() != owner:
        os._exit(0)
    if outcome.error is not None and outcome.error.startswith("MemoryError"):
        os._exit(OUT_OF_MEMORY)
    if left_behind(owner) > MOST_PROCESSES:
        os._exit(TOO_MANY_PROCESSES)
    return outcome


def left_behind(owner: int) -> int:
    """How many processes this one has started that still live; the dead are buried when many."""
    found = stemming_from(owner)
    dead = [pid for pid in found if _is_dead(pid)]
    for pid in dead if len(dead) > MOST_PROCESSES else ():
        with suppress(ChildProcessError):  # it is somebody else's to bury
            os.waitpid(pid, os.WNOHANG)
    return len(found) - len(dead)


def _is_dead(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return True
    return state in ("Z", "X")


@cache
def settle_in(memory_bytes: int | None) -> None:
    """Limit what this process may hold and print, and adopt what its children leave behind."""
    control(PR_SET_CHILD_SUBREAPER, 1)
    if memory_bytes is not None:
        # Memory that can be written, not addresses: accelerators reserve these by the terabyte.
        with suppress(ValueError, OSError):  # a stricter limit is in force already
            resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))
    limit_output(MOST_OUTPUT)


def limit_output(most: int) -> None:
    """Let only the beginning of what this process prints come through, on standard error."""
    source, sink = os.pipe()
    terminal = os.dup(2)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.dup2(sink, 1)
    os.dup2(sink, 2)
    os.close(sink)
    threading.Thread(target=_pass_on, args=(source, terminal, most), daemon=True).start()


def _pass_on(source: int, terminal: int, most: int) -> None:
    left = most
    while chunk := os.read(source, 2**16):
        if left <= 0:
            continue
        left -= len(chunk)
        with suppress(OSError):
            os.write(terminal, chunk if left > 0 else chunk + _ENOUGH)
