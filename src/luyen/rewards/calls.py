"""A call of a judging function as data, so that it can be made here or in another process."""

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from time import perf_counter
from typing import Any, Protocol, final

from luyen.base.foreign import boundary, own_copy
from luyen.base.heartbeat import beat
from luyen.rewards.loading import load_function, load_module
from luyen.rewards.outcome import Outcome, fault_of, outcome_of
from luyen.rewards.rules.all import rule_rewards
from luyen.rewards.trl import called_as_ours

FILE_FIELD = "reward.custom_reward_function"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """Which function to call, and with what.

    Example:
        >>> Call(name="compute_score", source="my_reward.py", arguments={"solution_str": "4"}).rule
        False
    """

    name: str
    """A function of the file, or a registered rule."""
    source: str | None
    """File that defines it; None for what comes with the package."""
    rule: bool = False
    """Whether the name is looked up among the registered rules."""
    arguments: Mapping[str, Any]
    """Keyword arguments."""


class Executor(Protocol):
    """Makes calls, somewhere."""

    async def run(self, calls: Sequence[Call]) -> list[Outcome]:
        """What came of each call, in order."""
        ...


@cache
def function_of(name: str, source: str | None, rule: bool) -> Callable[..., Any]:
    """The function behind a call, with what it needs imported."""
    if not rule:
        assert source is not None, "a function that is no rule comes from a file"
        return called_as_ours(load_function(source, name, field=FILE_FIELD))
    if source is not None:
        load_module(source, field="trainer.plugins")
    door = rule_rewards.facts(name).get("door")
    if door is not None:
        import_module(door)
    return rule_rewards.get(name)


def perform(call: Call) -> Outcome:
    """Make a call on this thread, where no event loop runs."""
    faults: list[BaseException] = []
    returned: Any = None
    start = perf_counter()
    with boundary(faults):
        returned = function_of(call.name, call.source, call.rule)(**call.arguments)
        if inspect.isawaitable(returned):
            returned = asyncio.run(_awaited(returned))
    seconds = perf_counter() - start
    if faults:
        return fault_of(faults, seconds=seconds)
    return outcome_of(returned, seconds=seconds)


async def _awaited(waiting: Awaitable[Any]) -> Any:
    return await waiting


@final
class Inline:
    """Makes calls one after the other on the calling thread; a coroutine has a time limit."""

    def __init__(self, *, timeout_s: float) -> None:
        self._timeout_s = timeout_s

    async def run(self, calls: Sequence[Call]) -> list[Outcome]:
        """What came of each call, in order."""
        return [await self._one(call) for call in calls]

    async def _one(self, call: Call) -> Outcome:
        start = perf_counter()
        function = function_of(call.name, call.source, call.rule)
        is_ours = function.__module__.startswith("luyen.")
        arguments = call.arguments if is_ours else own_copy(call.arguments)
        fault, returned = await attempt(function, arguments, timeout_s=self._timeout_s)
        beat()
        seconds = perf_counter() - start
        if fault is not None:
            return replace(fault, seconds=seconds)
        return outcome_of(returned, seconds=seconds)


async def attempt(
    function: Callable[..., Any], arguments: Mapping[str, Any], *, timeout_s: float
) -> tuple[Outcome | None, Any]:
    """The fault of a call, if any, and what it returned; a coroutine gets a limited time."""
    faults: list[BaseException] = []
    returned: Any = None
    limit = asyncio.timeout(None)
    with boundary(faults):
        returned = function(**arguments)
        if inspect.isawaitable(returned):
            limit = asyncio.timeout(timeout_s)
            async with limit:
                returned = await returned
    if limit.expired():
        return Outcome(error=f"no score within {timeout_s:g} s (reward.timeout_s)"), None
    return (fault_of(faults) if faults else None), returned
