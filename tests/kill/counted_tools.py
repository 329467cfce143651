"""A tool that notes each of its executions, with the key of the call."""

import os
from pathlib import Path

from luyen.rollout.tools import idempotency_key, tool


@tool
async def echo(text: str) -> str:
    """Say it again."""
    with Path(os.environ["LUYEN_TEST_CALLS"]).open("a") as log:
        log.write(f"{idempotency_key()}\n")
    return text[:6][::-1]
