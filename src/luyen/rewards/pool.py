"""Scoring in other processes: a hang costs one timeout, a crash one fault, never the step."""

import asyncio
import os
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import final

from luyen.base.heartbeat import beat
from luyen.base.system import limit_data
from luyen.rewards.calls import ScoreCall, ScoreOutcome, function_of, perform
from luyen.sandbox import pool as processes
from luyen.sandbox.calls import Call as ProcessCall
from luyen.sandbox.calls import Reply
from luyen.sandbox.child.syscalls import PR_SET_CHILD_SUBREAPER, control
from luyen.sandbox.child.usage import descendants_of

# Entry points of a pool process: `load` prepares it and imports the function, `score_call` runs it.
#
# Scoring code may fork, flood its output or eat memory. None of that reaches the next call: a
# copy that a call forked never answers, output goes through a pipe that lets only its beginning
# pass, and a process that ran out of memory or left too many child processes behind ends, and
# is replaced.

OUT_OF_MEMORY = 97
TOO_MANY_PROCESSES = 98
"""Exit codes that say why the process ended itself."""
MOST_PROCESSES = 16
"""How many a call may leave behind, as one that keeps a server of its own does."""
MOST_OUTPUT = 2**20
"""Bytes that the scoring code of one process may print in its life; the rest is dropped."""
_ENOUGH = b"\n[more output of judging code was dropped]\n"


def load(call: ScoreCall, memory_bytes: int | None) -> None:
    """Import what a call needs; whatever that raises is the fault of the call."""
    limit_process(memory_bytes)
    function_of(call.name, call.source, call.rule)


def score_call(call: ScoreCall, memory_bytes: int | None) -> ScoreOutcome:  # noqa: ARG001
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
    """How many processes this one has started that still live; the dead are reaped when many."""
    found = descendants_of(owner)
    dead = [pid for pid in found if _is_dead(pid)]
    for pid in dead if len(dead) > MOST_PROCESSES else ():
        with suppress(ChildProcessError):  # another parent reaps it
            os.waitpid(pid, os.WNOHANG)
    return len(found) - len(dead)


def _is_dead(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return True
    return state in ("Z", "X")


@cache
def limit_process(memory_bytes: int | None) -> None:
    """Limit what this process may hold and print, and adopt what its children leave behind."""
    control(PR_SET_CHILD_SUBREAPER, 1)
    if memory_bytes is not None:
        # Memory that can be written, not addresses: accelerators reserve these by the terabyte.
        limit_data(memory_bytes)
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


@final
class ScoringPool:
    """Makes calls in at most `size` processes, started when first needed.

    Close it at the end; processes also end when the pool is forgotten and when this process ends.
    """

    def __init__(self, *, size: int, timeout_s: float, memory_bytes: int | None = None) -> None:
        """`memory_bytes`: what one process may hold; None: all there is."""
        self._timeout_s = timeout_s
        self._memory_bytes = memory_bytes
        self._processes = processes.ProcessPool(size, timeout_s)

    @property
    def pids(self) -> list[int]:
        """Ids of its processes."""
        return self._processes.pids

    async def run(self, calls: Sequence[ScoreCall]) -> list[ScoreOutcome]:
        """What came of each call, in order, however they finish."""
        return await asyncio.gather(*(self._one(call) for call in calls))

    async def _one(self, call: ScoreCall) -> ScoreOutcome:
        request = ProcessCall(
            where="luyen.rewards.pool",
            name="score_call",
            prepare="load",
            args=(call, self._memory_bytes),
        )
        reply = await self._processes.run(request)
        beat()
        if reply.timed_out:
            error = f"no score within {self._timeout_s:g} s (reward.timeout_s)"
            return ScoreOutcome(error=error, seconds=reply.seconds)
        if reply.error is not None:
            known = (None, OUT_OF_MEMORY, TOO_MANY_PROCESSES)
            is_dead = reply.exit_code not in known
            return ScoreOutcome(error=self._why(reply), is_dead=is_dead, seconds=reply.seconds)
        return reply.value

    def _why(self, reply: Reply) -> str:
        if reply.exit_code == OUT_OF_MEMORY:
            most = f"{(self._memory_bytes or 0) / 2**20:g} MiB (reward.memory_mb)"
            return f"out of memory: judging took more than {most}"
        if reply.exit_code == TOO_MANY_PROCESSES:
            return f"judging left more than {MOST_PROCESSES} processes behind"
        return reply.error or ""

    def close(self) -> None:
        """End every process and every thread. Closing twice is allowed."""
        self._processes.close()
