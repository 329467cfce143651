"""Judging in other processes: a hang costs one timeout, a crash one fault, never the step."""

import asyncio
from collections.abc import Sequence
from typing import final

from luyen.base.heartbeat import beat
from luyen.rewards.calls import Call
from luyen.rewards.outcome import Outcome
from luyen.sandbox import pool as processes
from luyen.sandbox.calls import Call as ProcessCall


@final
class Pool:
    """Makes calls in at most `size` processes, started when first needed.

    Close it at the end; processes also end when the pool is forgotten and when this process ends.
    """

    def __init__(self, *, size: int, timeout_s: float) -> None:
        self._timeout_s = timeout_s
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
            where="luyen.rewards.worker", name="judge", prepare="load", args=(call,)
        )
        reply = await self._processes.run(asked)
        beat()
        if reply.timed_out:
            error = f"no score within {self._timeout_s:g} s (reward.timeout_s)"
            return Outcome(error=error, seconds=reply.seconds)
        if reply.error is not None:
            return Outcome(error=reply.error, seconds=reply.seconds)
        return reply.value

    def close(self) -> None:
        """End every process and every thread. Closing twice is allowed."""
        self._processes.close()
