"""The calculator, made slow: the tool of `async_tools.py`.

How long a call takes is drawn for its group of conversations, the place in it and a seed, so that
runs of one seed meet the same latencies however they are scheduled.
"""

import asyncio
from collections import Counter

from luyen.base.seeds import derive_key, uniform
from luyen.rollout.tools import tool_class
from luyen.rollout.tools.builtin_tools import evaluate

SHORTEST_S, LONGEST_S = 0.2, 2.0
SLOW_SHARE, SLOW_S = 0.1, 5.0
OPENED: Counter[int] = Counter()
"""Conversations that have begun, by the key of their group. A run loads this file anew."""


def latency_s(seed: int, group: int, place: int, call: int) -> float:
    """Seconds of one call: uniform, but for a tenth that takes longest."""
    key = derive_key(seed, "latency", group, place, call)
    if uniform(key, 0) < SLOW_SHARE:
        return SLOW_S
    return SHORTEST_S + uniform(key, 1) * (LONGEST_S - SHORTEST_S)


@tool_class(concurrency=10_000, timeout_s=60)
class Calculator:
    """A calculator far away."""

    def __init__(self, seed: int = 0) -> None:
        self.seed, self.group, self.place, self.calls = seed, 0, 0, 0

    async def create(self, key: int) -> None:
        """Know whose calls these are."""
        self.group, self.place = key, OPENED[key]
        OPENED[key] += 1

    async def call(self, expression: str) -> str:
        """Evaluate arithmetic."""
        self.calls += 1
        await asyncio.sleep(latency_s(self.seed, self.group, self.place, self.calls))
        return evaluate(expression)
