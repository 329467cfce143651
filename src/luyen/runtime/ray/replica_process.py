"""The process of a replica: its calls are timed, and what it did travels with the answers."""

import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, final

from luyen.rollout.protocol import RolloutEngine
from luyen.runtime.device_memory import device_bytes
from luyen.runtime.ray.answered import Answered
from luyen.runtime.ray.replica import Replica
from luyen.telemetry.own_work import WORK

_SPANS = {
    "load": "load weights",
    "load_last": "load weights",
    "confirm": "confirm weights",
}
"""Calls that are work of their own; drawing is timed where it is done, in the engine's thread."""


@final
class ReplicaProcess:
    """A replica behind one method."""

    def __init__(
        self,
        make: Callable[[int], RolloutEngine],
        index: int,
        *,
        folder: str,
        node: Callable[[], str],
    ) -> None:
        WORK.device_bytes = device_bytes
        self._node = node()
        self._replica = Replica(make, index, folder=folder, node=node)

    async def carry_out(self, is_heard: bool, method: str, *arguments: Any) -> Answered:
        """Call a method of the replica; where nobody hears the answer, spans wait for another."""
        came, name = time.time(), _SPANS.get(method)
        with nullcontext() if name is None else WORK.span(name):
            value = await getattr(self._replica, method)(*arguments)
        report = WORK.report(node=self._node, came=came) if is_heard else None
        return Answered(value=value, report=report)
