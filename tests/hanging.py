"""A reward and a tool that hang once they were called often enough, if the environment says so.

`LUYEN_HANG=score:40` lets the 41st score sleep for a minute. Without it nothing hangs, so that a
run can be resumed with the very same files.
"""

import os
import time
from typing import Any

from luyen.rollout.tools import tool
from tests.shares_reward import compute_score as shares

_calls: dict[str, int] = {}


def is_time_to_hang(place: str) -> bool:
    """Count a call of this place; whether it is the one that hangs."""
    wanted, _, after = os.environ.get("LUYEN_HANG", "").partition(":")
    _calls[place] = _calls.get(place, 0) + 1
    return wanted == place and _calls[place] > int(after)


def sleep_for_ever() -> None:
    """A loop of short sleeps, as a client that polls a dead service."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        time.sleep(0.05)


def compute_score(**given: Any) -> dict[str, float]:
    """Shares of characters, unless it hangs."""
    if is_time_to_hang("score"):
        sleep_for_ever()
    return shares(**given)


@tool
def echo(text: str) -> str:
    """Say it again."""
    if is_time_to_hang("tool"):
        sleep_for_ever()
    return text[:6][::-1]
