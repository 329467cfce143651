"""An event loop on a thread of its own, for what must outlive the loops of single steps."""

import asyncio
import threading
import weakref
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar, final

from luyen.base.loops import loosened

T = TypeVar("T")


@final
class BackgroundLoop:
    """Runs coroutines on one loop, whoever asks. Stop it at the end; forgetting it stops it too.

    Example:
        >>> async def answer() -> int:
        ...     return 42
        >>> loop = BackgroundLoop("demo")
        >>> loop.wait(answer(), seconds=5.0)
        42
        >>> loop.stop()
    """

    def __init__(self, name: str) -> None:
        self._loop = loosened(asyncio.new_event_loop())
        self._thread = threading.Thread(target=_serve, args=(self._loop,), name=name, daemon=True)
        self._thread.start()
        self._finish = weakref.finalize(self, _stop, self._loop, self._thread)

    def wait(self, coroutine: Coroutine[Any, Any, T], *, seconds: float) -> T:
        """What the coroutine returns, waited for on this thread; TimeoutError after so long."""
        future = self._submit(coroutine)
        try:
            return future.result(seconds)
        except TimeoutError:
            future.cancel()
            raise

    async def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """What the coroutine returns, waited for in another loop; cancelling this cancels it."""
        return await asyncio.wrap_future(self._submit(coroutine))

    def _submit(self, coroutine: Coroutine[Any, Any, T]) -> "Future[T]":
        if not self._finish.alive:
            coroutine.close()
            raise RuntimeError("it was closed")
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def stop(self) -> None:
        """Cancel what still runs, and end the thread. Stopping twice is allowed."""
        self._finish()


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    loop.run_forever()
    for task in asyncio.all_tasks(loop):
        task.cancel()
        loop.run_until_complete(asyncio.wait({task}, timeout=5.0))
    loop.run_until_complete(loop.shutdown_asyncgens())
    loop.close()


def _stop(loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    loop.call_soon_threadsafe(loop.stop)
    if thread is not threading.current_thread():
        thread.join(timeout=15.0)
