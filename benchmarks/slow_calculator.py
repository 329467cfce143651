"""The calculator, made slow: the tool of `async_tools.py`.

How long a call takes depends on its conversation and on a seed, so that the same conversations meet
the same latencies however a run is scheduled, and others under another seed.
"""

import asyncio

from luyen.base.seeds import derive_key, uniform
from luyen.rollout.tools import tool_class
from luyen.rollout.tools.calculator import evaluated

SHORTEST_S, LONGEST_S = 0.2, 2.0
SLOW_SHARE, SLOW_S = 0.1, 5.0


def latency_s(seed: int, conversation: int, call: int) -> float:
    """Seconds of one call: uniform, but for a tenth that takes longest."""
    key = derive_key(seed, "latency", conversation, call)
    if uniform(key, 0) < SLOW_SHARE:
        return SLOW_S
    return SHORTEST_S + uniform(key, 1) * (LONGEST_S - SHORTEST_S)


@tool_class(concurrency=10_000, timeout_s=60)
class Calculator:
    """A calculator far away."""

    def __init__(self, seed: int = 0) -> None:
        self.seed, self.conversation, self.calls = seed, 0, 0

    async def create(self, key: int) -> None:
        """Know whose calls these are."""
        self.conversation = key

    async def call(self, expression: str) -> str:
        """Evaluate arithmetic."""
        self.calls += 1
        await asyncio.sleep(latency_s(self.seed, self.conversation, self.calls))
        return evaluated(expression)
