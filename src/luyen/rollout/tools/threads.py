"""Ordinary functions on threads of their own, so that one that waits delays nobody."""

import asyncio
import contextvars
import inspect
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, final

from luyen.base.foreign import boundary


@final
class Threads:
    """Calls functions on threads that nothing waits for once the caller has gone.

    A thread cannot be killed. One that outlives its caller is counted until it ends, and when
    `most_hanging` of them are about, further calls are refused. The threads do not keep the process
    from ending.
    """

    def __init__(self, *, most_hanging: int) -> None:
        self._most_hanging = most_hanging
        self._hanging: list[threading.Thread] = []

    async def run(self, function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
        """What the function returns; what it raises is raised here."""
        self._hanging = [thread for thread in self._hanging if thread.is_alive()]
        if len(self._hanging) >= self._most_hanging:
            raise RuntimeError(f"{len(self._hanging)} earlier calls of it still hang")
        if inspect.iscoroutinefunction(function):
            return await function(**arguments)
        returned = await self._on_a_thread(function, arguments)
        return await returned if inspect.isawaitable(returned) else returned

    async def _on_a_thread(self, function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
        loop = asyncio.get_running_loop()
        done: asyncio.Future[list[Any]] = loop.create_future()
        faults: list[BaseException] = []
        context = contextvars.copy_context()

        def work() -> None:
            values: list[Any] = []
            with boundary(faults):
                values.append(context.run(lambda: function(**arguments)))
            with suppress(RuntimeError):  # the loop was closed meanwhile
                loop.call_soon_threadsafe(_settle, done, values)

        thread = threading.Thread(target=work, name="tool", daemon=True)
        thread.start()
        try:
            values = await done
        except asyncio.CancelledError:
            self._hanging.append(thread)
            raise
        if faults:
            raise faults[0]
        return values[0]


def _settle(done: "asyncio.Future[list[Any]]", values: list[Any]) -> None:
    if not done.done():
        done.set_result(values)
