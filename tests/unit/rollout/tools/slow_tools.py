"""Tools that run in processes of their own."""

import os
import time

from luyen.rollout.tools import ToolError, tool


@tool(in_process=True)
def double(number: int) -> int:
    """Twice a number."""
    return 2 * number


@tool(in_process=True)
def where() -> int:
    """Id of the process."""
    return os.getpid()


@tool(in_process=True, timeout_s=0.2)
def hang() -> str:
    """Never come back."""
    time.sleep(1000)
    return "late"


@tool(in_process=True, retries=1, backoff_s=0.0)
def die() -> str:
    """Take the process along."""
    os._exit(7)


@tool(in_process=True, retries=5)
def complain() -> str:
    """Say no."""
    raise ToolError("not this one")


@tool(in_process=True)
def flood() -> str:
    """Return 100 MB."""
    return "x" * 100_000_000
