"""Where everything that replicas say arrives, from whatever thread, for one that handles it."""

import queue
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeAlias, final

from luyen.runtime.ray.member import Member
from luyen.runtime.ray.wire import Reply
from luyen.telemetry.waits import waiting_for

Then: TypeAlias = Callable[[Member, Any], None]
"""What is done with a reply."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that a replica said.

    Example:
        >>> member = Member(0)
        >>> Event(member=member, life=1, then=print, value="hello", error=None).is_late
        False
    """

    member: Member
    """Who."""
    life: int
    """In which of its lives."""
    then: Then
    """What to do with it."""
    value: Any
    """What it said."""
    error: BaseException | None
    """What it failed with instead."""
    came: float = field(default_factory=time.monotonic)
    """When it was heard."""

    @property
    def is_late(self) -> bool:
        """Whether another process has taken its place since."""
        return self.life != self.member.life


@final
class Mailbox:
    """Events in the order in which they came."""

    def __init__(self) -> None:
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()

    def reply(self, member: Member, then: Then) -> Reply:
        """Where a call to a replica, as it lives now, is to be answered; from any thread."""
        life, put = member.life, self._events.put
        return lambda value, error: put(
            Event(member=member, life=life, then=then, value=value, error=error)
        )

    def next(self, wait_s: float) -> Event | None:
        """The oldest event that was not handled; where there is none, wait so long for one."""
        try:
            with waiting_for("rollout") if wait_s > 0 else nullcontext():
                return self._events.get(block=wait_s > 0, timeout=wait_s or None)
        except queue.Empty:
            return None
