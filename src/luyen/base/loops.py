"""Event loops for foreign code: a thread of it that hangs keeps nobody from ending."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar, final

from luyen.base.foreign import boundary

P = ParamSpec("P")
T = TypeVar("T")


@final
class LooseThreads(ThreadPoolExecutor):
    """A thread for every call, which nobody waits for in the end, neither a loop nor the process.

    `asyncio.to_thread` uses the executor of its loop. Python's own waits for all its threads.

    Example:
        >>> LooseThreads().submit(len, "abc").result()
        3
    """

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> "Future[T]":
        """Call the function on a thread of its own."""
        future: Future[T] = Future()

        def work() -> None:
            if not future.set_running_or_notify_cancel():
                return
            faults: list[BaseException] = []
            with boundary(faults):
                future.set_result(fn(*args, **kwargs))
            if faults:
                future.set_exception(faults[0])

        threading.Thread(target=work, name="loose", daemon=True).start()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Nothing is waited for."""
        del wait, cancel_futures


def loosened(loop: asyncio.AbstractEventLoop) -> asyncio.AbstractEventLoop:
    """The loop, which from now on waits for no thread of `asyncio.to_thread` when it closes."""
    loop.set_default_executor(LooseThreads())
    return loop


def run_loosely(coroutine: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run`, without waiting for threads that foreign code has left behind.

    Example:
        >>> async def answer() -> int:
        ...     return await asyncio.to_thread(lambda: 42)
        >>> run_loosely(answer())
        42
    """
    with asyncio.Runner() as runner:
        loosened(runner.get_loop())
        return runner.run(coroutine)
