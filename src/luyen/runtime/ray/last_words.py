"""The last spans of replicas: what they did since they were heard, before they are ended."""

import queue
import time
from collections.abc import Iterable
from typing import Any

from luyen.base.foreign import boundary
from luyen.runtime.ray.member import Member

_PATIENCE_S = 1.0
"""For all of them together: a run does not wait for spans."""


def hear_last_words(members: Iterable[Member]) -> None:
    """Ask every replica that is ready who it is, for the report that comes with the answer."""
    said: queue.SimpleQueue[Any] = queue.SimpleQueue()
    asked = 0
    with boundary([]):
        for member in members:
            if member.is_ready and member.link is not None:
                member.link.call("facts", reply=lambda value, error: said.put((value, error)))
                asked += 1
    last = time.monotonic() + _PATIENCE_S
    for _ in range(asked):
        try:
            said.get(timeout=max(0.0, last - time.monotonic()))
        except queue.Empty:
            return
