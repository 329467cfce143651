"""Judging in other processes: a hang costs one timeout, a crash one fault, never the step."""

import asyncio
from collections.abc import Sequence
from typing import final

from luyen.base.heartbeat import beat
from luyen.rewards import worker
from luyen.rewards.calls import Call
from luyen.rewards.outcome import Outcome
from luyen.sandbox import pool as processes
from luyen.sandbox.calls import Call as ProcessCall
from luyen.sandbox.calls import Reply


@final
class Pool:
    """Makes calls in at most `size` processes, started when first needed.

    Close it at the end; processes also end when the pool is forgotten and when this process ends.
    """

    def __init__(self, *, size: int, timeout_s: float, memory_bytes: int | None = None) -> None:
        """`memory_bytes`: what one process may hold; None: all there is."""
        self._timeout_s = timeout_s
        self._memory_bytes = memory_bytes
        self._processes = processes.Pool(size, timeout_s)

    @property
    def pids(self) -> list[int]:
        """Ids of its processes."""
        return self._processes.pids

    async def run(self, calls: Sequence[Call]) -> list[Outcome]:
        """What came of each call, in order, however they finish."""
        return await asyncio.gather(*(self._one(call) for call in calls))

    async def _one(self, call: Call) -> Outcome:
        asked = ProcessCall(
            where="luyen.rewards.worker",
            name="judge",
            prepare="load",
            args=(call, self._memory_bytes),
        )
        reply = await self._processes.run(asked)
        beat()
        if reply.timed_out:
            error = f"no score within {self._timeout_s:g} s (reward.timeout_s)"
            return Outcome(error=error, seconds=reply.seconds)
        if reply.error is not None:
            known = (None, worker.OUT_OF_MEMORY, worker.TOO_MANY_PROCESSES)
            is_dead = reply.exit_code not in known
            return Outcome(error=self._why(reply), is_dead=is_dead, seconds=reply.seconds)
        return reply.value

    def _why(self, reply: Reply) -> str:
        if reply.exit_code == worker.OUT_OF_MEMORY:
            most = f"{(self._memory_bytes or 0) / 2**20:g} MiB (reward.memory_mb)"
            return f"out of memory: judging took more than {most}"
        if reply.exit_code == worker.TOO_MANY_PROCESSES:
            return f"judging left more than {worker.MOST_PROCESSES} processes behind"
        return reply.error or ""

    def close(self) -> None:
        """End every process and every thread. Closing twice is allowed."""
        self._processes.close()
