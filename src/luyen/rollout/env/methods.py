"""Methods of an object as tools of one conversation: they share its state, so they take turns."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, final

from luyen.base.records import Prompt
from luyen.rollout.tools.marks import Remembers, RunLimits
from luyen.rollout.tools.protocol import ToolLimits, ToolReply, ToolSession
from luyen.rollout.tools.reply import reply_of
from luyen.rollout.tools.signature import Signature
from luyen.rollout.tools.threads import Threads


@final
class MethodTool(Remembers, RunLimits):
    """One method of the object that a conversation's world holds."""

    def __init__(
        self,
        signature: Signature,
        bound: Callable[[], Callable[..., Any]],
        *,
        turns: asyncio.Lock,
        threads: Threads,
    ) -> None:
        """`bound` gives the method once the world is open; `turns` is held while one runs."""
        self._signature = signature
        self._bound = bound
        self._turns = turns
        self._threads = threads

    @property
    def name(self) -> str:
        """How the policy calls it."""
        return self._signature.schema["function"]["name"]

    @property
    def schema(self) -> Mapping[str, Any]:
        """Made from the signature and the docstring."""
        return self._signature.schema

    @property
    def limits(self) -> ToolLimits:
        """Those of any tool; the time is that of the run."""
        return ToolLimits()

    async def open(self, prompt: Prompt, key: int) -> ToolSession:
        """The tool itself: what is kept is in the object."""
        del prompt, key
        return self

    async def close(self) -> None:
        """Nothing is held: the world lets its object go."""

    async def call(self, arguments: Mapping[str, Any]) -> ToolReply:
        """Run the method; one of the object's methods runs at a time."""
        values = self._signature.bind(arguments)
        async with self._turns:
            return reply_of(await self._threads.run(self._bound(), values))

    async def score(self) -> float | None:
        """The world scores, not its tools."""
        return None

    async def release(self) -> None:
        """Nothing is held."""
