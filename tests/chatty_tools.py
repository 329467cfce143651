"""A tool whose answer takes its time: how long depends on nothing that a run controls."""

import asyncio
import random
import time

from luyen.rollout.tools import tool


@tool
async def echo(text: str) -> str:
    """Say it again."""
    await asyncio.sleep(random.Random(time.perf_counter_ns()).random() * 0.003)
    return text[:6][::-1]
