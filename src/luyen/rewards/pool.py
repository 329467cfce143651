"""Calls in other processes: a hang costs one timeout, a crash one fault, never the step."""

import asyncio
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter
from typing import Any, final

from luyen.rewards.calls import READY, Call
from luyen.rewards.outcome import Outcome

START_S = 120.0
"""How long a process may take to start and to load a function; importing can be slow."""


@final
class Worker:
    """One process and the pipe to it."""

    def __init__(self) -> None:
        self._pipe, theirs = multiprocessing.Pipe()
        path = os.pathsep.join(entry for entry in sys.path if entry)
        arguments = [str(theirs.fileno()), str(os.getpid())]
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "luyen.rewards.worker", *arguments],
            stdin=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(),),
            env=os.environ | {"PYTHONPATH": path},
            start_new_session=True,  # an interrupt of the terminal is ours to handle
        )
        theirs.close()

    @property
    def pid(self) -> int:
        """Id of the process."""
        return self._process.pid

    def ask(self, call: Call, *, timeout_s: float) -> Outcome | None:
        """What came of a call; None when the time is up. EOFError or OSError: the process died."""
        self._pipe.send(call)
        reply = self._reply(START_S)
        return self._reply(timeout_s) if reply == READY else reply

    def _reply(self, timeout_s: float) -> Any:
        return self._pipe.recv() if self._pipe.poll(timeout_s) else None

    def kill(self) -> None:
        """Kill the process and all it started; who waits for its answer sees the pipe close."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)

    def end(self) -> int:
        """Kill the process, when nobody waits for it; its exit code."""
        self.kill()
        code = self._process.wait()
        self._pipe.close()
        return code


@final
class _Crew:
    """The processes of a pool, apart from it, so that they end when it is forgotten."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[Worker] = []
        self._is_closed = False
        self.busy: set[Worker] = set()

    @property
    def pids(self) -> list[int]:
        """Ids of the processes that were not ended."""
        return sorted(worker.pid for worker in (*self._idle, *self.busy))

    def take(self) -> Worker | None:
        """An idle process or a new one; None once the crew was sent home."""
        with self._lock:
            if self._is_closed:
                return None
            worker = self._idle.pop() if self._idle else Worker()
            self.busy.add(worker)
            return worker

    def give_back(self, worker: Worker) -> None:
        """Let others use a process that has answered."""
        with self._lock:
            self.busy.discard(worker)
            self._idle.append(worker)

    def remove(self, worker: Worker) -> int:
        """End a process; its exit code."""
        with self._lock:
            self.busy.discard(worker)
        return worker.end()

    def end(self) -> None:
        """End every idle process; kill the busy ones, which those who wait for them then end."""
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
            for worker in self.busy:
                worker.kill()
        for worker in idle:
            worker.end()


@final
class Pool:
    """Makes calls in at most `size` processes, started when first needed.

    Close it at the end; processes also end when the pool is forgotten and when this process ends.
    """

    def __init__(self, *, size: int, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._crew = _Crew()
        self._threads = ThreadPoolExecutor(max_workers=size, thread_name_prefix="reward")
        self._finish = weakref.finalize(self, _Crew.end, self._crew)

    @property
    def pids(self) -> list[int]:
        """Ids of its processes."""
        return self._crew.pids

    async def run(self, calls: Sequence[Call]) -> list[Outcome]:
        """What came of each call, in order, however they finish."""
        loop = asyncio.get_running_loop()
        return await asyncio.gather(
            *(loop.run_in_executor(self._threads, self._ask, call) for call in calls)
        )

    def _ask(self, call: Call) -> Outcome:
        worker = self._crew.take()
        if worker is None:
            return Outcome(error="the pool of processes is closed")
        start = perf_counter()
        try:
            outcome = worker.ask(call, timeout_s=self._timeout_s)
        except (EOFError, OSError):
            code = self._crew.remove(worker)
            error = f"the process that computed it ended (exit code {code})"
            return Outcome(error=error, seconds=perf_counter() - start)
        if outcome is None:
            self._crew.remove(worker)
            error = f"no score within {self._timeout_s:g} s (reward.timeout_s)"
            return Outcome(error=error, seconds=perf_counter() - start)
        self._crew.give_back(worker)
        return outcome

    def close(self) -> None:
        """End every process and every thread. Closing twice is allowed."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._finish()
        self._threads.shutdown(wait=True)
