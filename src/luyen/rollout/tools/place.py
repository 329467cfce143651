"""A tool as one rollout has it, and how a call of it is made."""

import asyncio
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, final

from luyen.base.foreign import own_copy
from luyen.rollout.tools.foreign import InvalidArguments, Outcome, ToolError, attempt
from luyen.rollout.tools.marks import OwnClock, TimeIsUp
from luyen.rollout.tools.protocol import ToolLimits, ToolReply, ToolSession
from luyen.rollout.tools.validate import Checker


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A tool as one rollout has it.

    Example:
        >>> Place(name="add", checker=Checker("add", {}), limits=ToolLimits(),
        ...       free=asyncio.Semaphore(1), session=None, problem="no server").problem
        'no server'
    """

    name: str
    """Its name."""
    checker: Checker
    """Holds arguments against its schema."""
    limits: ToolLimits
    """How long and how often it may run."""
    free: AbstractAsyncContextManager[Any]
    """Held while it runs, so that not too many do."""
    session: ToolSession | None
    """Its session; None when it could not be opened."""
    problem: str = ""
    """Why there is no session."""
    remembers: bool = False
    """Whether its calls share a state, its own or that of a world, which dies with the process."""
    is_standing: bool = False
    """Whether the session is that of all rollouts: it scores nothing and is not released."""


async def tried(
    place: Place, session: ToolSession, arguments: Mapping[str, Any]
) -> tuple[Outcome, int, float]:
    """The last outcome of a call, how often it was tried, and how long it ran in all."""
    seconds = 0.0
    limit = None if isinstance(session, OwnClock) else place.limits.timeout_s
    for number in range(place.limits.retries + 1):
        if number > 0:
            await asyncio.sleep(place.limits.backoff_s * 2 ** (number - 1))
        async with place.free:
            outcome = await attempt(_called(session, arguments), seconds=limit)
        if isinstance(outcome.fault, TimeIsUp):
            outcome = Outcome(is_late=True, seconds=outcome.seconds)
        seconds += outcome.seconds
        is_final = isinstance(outcome.fault, InvalidArguments | ToolError)
        has_answered = outcome.fault is None and not outcome.is_late
        if has_answered or is_final or number == place.limits.retries:
            return outcome, number + 1, seconds
    raise AssertionError("a call is tried at least once")


async def _called(session: ToolSession, arguments: Mapping[str, Any]) -> ToolReply:
    """Each try has arguments of its own: a tool may do with them what it likes."""
    return await session.call(own_copy(arguments))
