"""Calls in other processes: a hang costs one timeout, a crash one error, never the caller."""

import asyncio
import pickle
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter
from typing import final

from luyen.sandbox.calls import RESULT_BYTES, Call, Reply
from luyen.sandbox.process import Worker

CLOSED = "the pool of processes is closed"
PATIENCE_S = 2.0
"""How long a process that hung up may take to end by itself."""


@final
class _Ticket:
    """One call that somebody waits for, until they do no more."""

    def __init__(self) -> None:
        self.is_cancelled = False


@final
class _Crew:
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
        """An idle process or a new one; None once the crew was sent home, or nobody waits."""
        with self._lock:
            if self.is_closed or ticket.is_cancelled:
                return None
            is_idle = bool(self._idle)
            worker = self._idle.pop() if is_idle else Worker(result_bytes=self._result_bytes)
            self._busy[worker] = ticket
            return worker

    def give_back(self, worker: Worker) -> None:
        """Let others use a process that has answered, unless it was killed meanwhile."""
        with self._lock:
            is_killed = self._busy.pop(worker).is_cancelled or self.is_closed
            if not is_killed:
                self._idle.append(worker)
        if is_killed:
            worker.end()

    def remove(self, worker: Worker, *, patience_s: float = 0.0) -> int:
        """End a process; its exit code."""
        with self._lock:
            del self._busy[worker]
        return worker.end(patience_s=patience_s)

    def cancel(self, ticket: _Ticket) -> None:
        """Kill the process that works on this ticket, if one still does; none will begin to."""
        with self._lock:
            ticket.is_cancelled = True
            for worker, held in self._busy.items():
                if held is ticket:
                    worker.kill()

    def end(self) -> None:
        """End every idle process; kill the busy ones, which those who wait for them then end."""
        with self._lock:
            self.is_closed = True
            idle, self._idle = self._idle, []
            for worker in self._busy:
                worker.kill()
        for worker in idle:
            worker.end()


@final
class Pool:
    """Makes calls in at most `size` processes, started when first needed; others wait their turn.

    A process makes one call at a time. One that is late is killed with all it started; one that is
    killed or dies is replaced when next needed. Close the pool at the end; processes also end when
    it is forgotten and when this process ends.
    """

    def __init__(self, size: int, timeout_s: float, *, result_bytes: int = RESULT_BYTES) -> None:
        self._timeout_s = timeout_s
        self._crew = _Crew(result_bytes=result_bytes)
        self._threads = ThreadPoolExecutor(max_workers=size, thread_name_prefix="pool")
        self._finish = weakref.finalize(self, _Crew.end, self._crew)

    @property
    def pids(self) -> list[int]:
        """Ids of its processes."""
        return self._crew.pids

    async def run(self, call: Call, *, timeout_s: float | None = None) -> Reply:
        """What came of a call; it raises nothing of its own. Cancelled, it kills the process."""
        if self._crew.is_closed:
            return Reply(error=CLOSED)
        ticket = _Ticket()
        limit = self._timeout_s if timeout_s is None else timeout_s
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._threads, self._ask, call, limit, ticket)
        except asyncio.CancelledError:
            self._crew.cancel(ticket)
            raise

    def _ask(self, call: Call, timeout_s: float, ticket: _Ticket) -> Reply:
        try:
            request = pickle.dumps((call, timeout_s))
        except (pickle.PicklingError, TypeError, AttributeError, RecursionError) as fault:
            return Reply(error=f"the arguments cannot be sent: {fault}")
        worker = self._crew.take(ticket)
        if worker is None:
            return Reply(error=CLOSED)
        start = perf_counter()
        try:
            reply = worker.ask(request, timeout_s=timeout_s)
        except (EOFError, OSError):
            code = self._crew.remove(worker, patience_s=PATIENCE_S)
            error = f"the process that computed it ended (exit code {code})"
            return Reply(error=error, exit_code=code, seconds=perf_counter() - start)
        if reply is None:
            self._crew.remove(worker)
            error = f"no answer within {timeout_s:g} s"
            return Reply(error=error, timed_out=True, seconds=perf_counter() - start)
        self._crew.give_back(worker)
        return reply

    def close(self) -> None:
        """End every process and every thread. Closing twice is allowed."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._finish()
        self._threads.shutdown(wait=True)
