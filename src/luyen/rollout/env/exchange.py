"""Two coroutines that take turns: a program that asks, and the conversation that answers.

Some environments are written as a program that calls the policy. A conversation calls its world.
An exchange turns the one into the other.
"""

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, TypeAlias, final

from luyen.base.foreign import boundary
from luyen.base.records import Message

Messages: TypeAlias = Sequence[Message]
_END_S = 30.0
_GRACE_S = 1.0


@final
class Exchange:
    """Runs the program while the conversation waits, and lets it wait while the policy speaks."""

    def __init__(self) -> None:
        self._asked: asyncio.Queue[Messages] = asyncio.Queue()
        self._said: asyncio.Queue[Messages | None] = asyncio.Queue()
        self._program: asyncio.Task[None] | None = None
        self._is_over = False

    async def ask(self, messages: Messages) -> Messages | None:
        """For the program: say this; what the policy says to it, or None: it will not speak again.

        A RuntimeError when it asks on after that.
        """
        if self._is_over:
            raise RuntimeError("the conversation is over, and the environment asks on")
        self._asked.put_nowait(messages)
        said = await self._said.get()
        self._is_over = said is None
        return said

    async def start(self, program: Coroutine[Any, Any, None]) -> Messages:
        """For the conversation: run the program up to its first question."""
        self._program = asyncio.create_task(_guarded(program))
        first = await self._question()
        if first is None:
            raise RuntimeError("the environment ended without asking the policy anything")
        return first

    async def tell(self, messages: Messages) -> Messages | None:
        """For the conversation: what the policy said; the next question, or None at the end."""
        self._said.put_nowait(messages)
        return await self._question()

    async def finish(self) -> None:
        """For the conversation: nothing more is said. What the program raises is raised here."""
        if self._program is None:
            return
        self._said.put_nowait(None)
        await asyncio.wait({self._program}, timeout=_END_S)
        if not self._program.done():
            raise TimeoutError(f"the environment did not end within {_END_S:g} s")
        self._program.result()

    async def close(self) -> None:
        """End the program, wherever it is; one that will not end is left to itself."""
        if self._program is None:
            return
        self._program.cancel()
        await asyncio.wait({self._program}, timeout=_GRACE_S)
        if self._program.done() and not self._program.cancelled():
            self._program.exception()  # it was raised already, where somebody listened

    async def _question(self) -> Messages | None:
        assert self._program is not None
        asked = asyncio.ensure_future(self._asked.get())
        try:
            await asyncio.wait({asked, self._program}, return_when=asyncio.FIRST_COMPLETED)
            if asked.done():
                return asked.result()
            self._program.result()
            return None
        finally:
            asked.cancel()


async def _guarded(program: Coroutine[Any, Any, None]) -> None:
    """The program as a task that cannot end the event loop, as SystemExit in a task would."""
    faults: list[BaseException] = []
    with boundary(faults):
        await program
    if faults:
        raise faults[0]
