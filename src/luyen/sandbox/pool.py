"""A pool of processes that make calls: a hang costs one timeout, a crash one error."""

import asyncio
import multiprocessing
import os
import pickle
import subprocess
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from time import monotonic, perf_counter, sleep
from typing import final

from luyen.base.boundary import boundary, last_line
from luyen.sandbox.calls import RESULT_BYTES, Call, Reply
from luyen.sandbox.child.usage import kill_process_tree
from luyen.sandbox.worker import MARK_BYTES, READY

# One worker process, as its parent sees it.

START_S = 120.0
"""How long a process may take to start and to load a function; importing can be slow."""
_LOOK_S = 0.005
"""Pause between two looks at a process that is about to end."""
_ENVELOPE = 4096
"""What an error may add to a result of the allowed size."""


@final
class ForeignMessage(Exception):
    """A process said what does not belong to the call: nothing it says can be trusted."""


@final
class Worker:
    """One process and the pipe to it."""

    def __init__(self, *, result_bytes: int) -> None:
        self._most = result_bytes + _ENVELOPE
        self._pipe, theirs = multiprocessing.Pipe()
        path = os.pathsep.join(entry for entry in sys.path if entry)
        arguments = [str(theirs.fileno()), str(os.getpid()), str(result_bytes)]
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "luyen.sandbox.worker", *arguments],
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

    def ask(self, request: bytes, *, timeout_s: float) -> Reply | None:
        """The reply to a call; None when the time is up.

        EOFError or OSError: the process died. ForeignMessage: it must be ended.
        """
        mark = os.urandom(MARK_BYTES)
        self._pipe.send_bytes(mark + request)
        said = self._said(mark, START_S)
        if said == READY:
            said = self._said(mark, timeout_s)
        return None if said is None else _unpacked(said)

    def _said(self, mark: bytes, timeout_s: float) -> bytes | None:
        if not self._pipe.poll(timeout_s):
            return None
        said = self._pipe.recv_bytes(self._most)
        if not said.startswith(mark):
            raise ForeignMessage
        return said[MARK_BYTES:]

    def kill(self) -> None:
        """Kill the process and all it started; a caller that awaits a reply sees the pipe close."""
        if self._process.returncode is not None:  # reaped: the pid may have been reused
            return
        kill_process_tree(self.pid)

    def end(self, *, grace_s: float = 0.0) -> int:
        """Kill the process and what it left behind; its exit code. No caller may await a reply.

        A process that has closed its pipe is about to exit; `grace_s` lets it, so that its own exit
        code is returned.
        """
        deadline = monotonic() + grace_s
        while not self._has_ended() and monotonic() < deadline:
            sleep(_LOOK_S)
        self.kill()
        code = self._process.wait()
        self._pipe.close()
        return code

    def _has_ended(self) -> bool:
        """Whether it is dead. It is not reaped, so that its process group keeps its number."""
        if "waitid" not in dir(os):  # Windows, and macOS with older versions of Python
            return self._process.poll() is not None
        flags = os.WEXITED | os.WNOWAIT | os.WNOHANG
        return os.waitid(os.P_PID, self.pid, flags) is not None


def _unpacked(data: bytes) -> Reply:
    """A reply out of bytes; a value that cannot be made again here is an error."""
    faults: list[BaseException] = []
    with boundary(faults):
        reply: Reply = pickle.loads(data)
        return reply
    return Reply(error=f"the result cannot be read here: {last_line(faults[0])}")


CLOSED = "the pool of processes is closed"
EXIT_TIMEOUT_S = 2.0
"""How long a process that hung up may take to end by itself."""


@final
class _Ticket:
    """One call in progress, until its caller cancels it."""

    def __init__(self) -> None:
        self.is_cancelled = False


@final
class _Workers:
    """The processes of a pool, apart from it, so that they end when it is forgotten."""

    def __init__(self, *, result_bytes: int) -> None:
        self._lock = threading.Lock()
        self._result_bytes = result_bytes
        self._idle: list[Worker] = []
        self._busy: dict[Worker, _Ticket] = {}
        self.is_closed = False

    @property
    def pids(self) -> list[int]:
        """Ids of the processes that were not ended."""
        return sorted(worker.pid for worker in (*self._idle, *self._busy))

    def take(self, ticket: _Ticket) -> Worker | None:
        """An idle process or a new one; None once the pool is closed or the call is cancelled."""
        with self._lock:
            if self.is_closed or ticket.is_cancelled:
                return None
            is_idle = bool(self._idle)
            worker = self._idle.pop() if is_idle else Worker(result_bytes=self._result_bytes)
            self._busy[worker] = ticket
            return worker

    def give_back(self, worker: Worker) -> None:
        """Make a process that has replied available again, unless it was killed."""
        with self._lock:
            is_killed = self._busy.pop(worker).is_cancelled or self.is_closed
            if not is_killed:
                self._idle.append(worker)
        if is_killed:
            worker.end()

    def remove(self, worker: Worker, *, grace_s: float = 0.0) -> int:
        """End a process; its exit code."""
        with self._lock:
            del self._busy[worker]
        return worker.end(grace_s=grace_s)

    def cancel(self, ticket: _Ticket) -> None:
        """Kill the process that works on this ticket, if one still does; none will begin to."""
        with self._lock:
            ticket.is_cancelled = True
            for worker, current in self._busy.items():
                if current is ticket:
                    worker.kill()

    def end(self) -> None:
        """End every idle process; kill the busy ones, which their callers then end."""
        with self._lock:
            self.is_closed = True
            idle, self._idle = self._idle, []
            for worker in self._busy:
                worker.kill()
        for worker in idle:
            worker.end()


@final
class ProcessPool:
    """Runs calls in at most `size` processes, started on demand; further calls are queued.

    A process makes one call at a time. One that is late is killed with all it started; one that is
    killed or dies is replaced when next needed. Close the pool at the end; processes also end when
    it is forgotten and when this process ends.
    """

    def __init__(self, size: int, timeout_s: float, *, result_bytes: int = RESULT_BYTES) -> None:
        self._timeout_s = timeout_s
        self._workers = _Workers(result_bytes=result_bytes)
        self._threads = ThreadPoolExecutor(max_workers=size, thread_name_prefix="pool")
        self._finish = weakref.finalize(self, _Workers.end, self._workers)

    @property
    def pids(self) -> list[int]:
        """Ids of its processes."""
        return self._workers.pids

    async def run(self, call: Call, *, timeout_s: float | None = None) -> Reply:
        """What came of a call; it raises nothing of its own. Cancelled, it kills the process."""
        if self._workers.is_closed:
            return Reply(error=CLOSED)
        ticket = _Ticket()
        limit = self._timeout_s if timeout_s is None else timeout_s
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._threads, self._ask, call, limit, ticket)
        except asyncio.CancelledError:
            self._workers.cancel(ticket)
            raise

    def _ask(self, call: Call, timeout_s: float, ticket: _Ticket) -> Reply:
        try:
            request = pickle.dumps((call, timeout_s))
        except (pickle.PicklingError, TypeError, AttributeError, RecursionError) as fault:
            return Reply(error=f"the arguments cannot be sent: {fault}")
        worker = self._workers.take(ticket)
        if worker is None:
            return Reply(error=CLOSED)
        start = perf_counter()
        try:
            reply = worker.ask(request, timeout_s=timeout_s)
        except (EOFError, OSError):
            code = self._workers.remove(worker, grace_s=EXIT_TIMEOUT_S)
            error = f"the process that computed it ended (exit code {code})"
            return Reply(error=error, exit_code=code, seconds=perf_counter() - start)
        except ForeignMessage:
            self._workers.remove(worker)
            error = "the function wrote into the pipe of its process"
            return Reply(error=error, seconds=perf_counter() - start)
        if reply is None:
            self._workers.remove(worker)
            error = f"no answer within {timeout_s:g} s"
            return Reply(error=error, timed_out=True, seconds=perf_counter() - start)
        self._workers.give_back(worker)
        return reply

    def close(self) -> None:
        """End every process and every thread. Closing twice is allowed."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._finish()
        self._threads.shutdown(wait=True)
