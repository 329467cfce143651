"""Functions in processes of their own: another core for what computes, an end for what hangs."""

import asyncio
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any, final

from luyen.base.errors import UserError
from luyen.rollout.tools.foreign import InvalidArguments, ToolError
from luyen.rollout.tools.marks import TimeIsUp
from luyen.rollout.tools.protocol import ToolLimits, ToolReply
from luyen.rollout.tools.reply import reply_of
from luyen.sandbox.calls import Call
from luyen.sandbox.pool import Pool
from luyen.sandbox.worker import module_of

_MOST = 1_000_000
"""Characters at either end of a longer result that are sent back."""
_OWN_FAULTS: dict[str, type[Exception]] = {
    kind.__name__: kind for kind in (InvalidArguments, ToolError)
}


@final
class Processes:
    """Calls one function in a pool of processes, started when first needed."""

    def __init__(self, function: Callable[..., Any], limits: ToolLimits) -> None:
        """A UserError when another process could not find the function."""
        self._where = _place_of(function)
        self._name = function.__name__
        self._limits = limits
        self._pool: Pool | None = None

    async def run(self, values: Mapping[str, Any]) -> ToolReply:
        """The reply; RuntimeError when the process died, TimeIsUp when its time was."""
        if self._pool is None:
            size = min(self._limits.concurrency, os.cpu_count() or 1)
            self._pool = Pool(size, self._limits.timeout_s)
        arguments = (self._where, self._name, dict(values))
        call = Call(where=__name__, name="perform", args=arguments, prepare="prepare")
        came = await self._pool.run(call)
        if came.timed_out:
            raise TimeIsUp(came.error)
        if came.error is not None:
            raise RuntimeError(came.error)
        kind, value = came.value
        if kind in _OWN_FAULTS:
            raise _OWN_FAULTS[kind](value)
        return value

    async def close(self) -> None:
        """End the processes."""
        if self._pool is not None:
            await asyncio.to_thread(self._pool.close)


def _place_of(function: Callable[..., Any]) -> str:
    """Module or file in which another process finds a function."""
    module = sys.modules.get(function.__module__)
    known = {} if module is None else vars(module)
    if function.__qualname__ != function.__name__ or not known.get("__file__"):
        why = "it runs in other processes, which find functions only at the top of a file"
        fix = "move it to the top of a Python file, or drop in_process"
        raise UserError("tool", function.__name__, why, fix)
    spec = known.get("__spec__")
    is_importable = spec is not None and not function.__module__.startswith("luyen_file_")
    return function.__module__ if is_importable else str(known["__file__"])


def prepare(where: str, name: str, values: Mapping[str, Any]) -> None:
    """In the other process: load the function, off the clock."""
    del name, values
    module_of(where)


def perform(where: str, name: str, values: Mapping[str, Any]) -> tuple[str, Any]:
    """In the other process: the reply, or what the function said about the call."""
    function = vars(module_of(where))[name].function
    try:
        returned = function(**values)
        if asyncio.iscoroutine(returned):
            returned = asyncio.run(returned)
        reply = reply_of(returned)
    except (InvalidArguments, ToolError) as fault:
        return type(fault).__name__, str(fault)
    if len(reply.text) > 2 * _MOST:
        text = reply.text[:_MOST] + reply.text[-_MOST:]
        reply = ToolReply(text=text, reward=reply.reward, metrics=reply.metrics)
    return "", reply
