"""Where tool code runs: threads, a process pool, or an event loop on its own thread."""

import asyncio
import contextvars
import inspect
import os
import sys
import threading
import weakref
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar, final

from luyen.base.boundary import boundary, with_daemon_threads
from luyen.base.errors import UserError
from luyen.rollout.tools.protocol import ToolLimits, ToolReply, ToolTimeout, reply_of
from luyen.rollout.tools.user_code import InvalidArguments, ToolError
from luyen.sandbox.calls import Call
from luyen.sandbox.pool import ProcessPool
from luyen.sandbox.worker import module_of


@final
class ThreadExecutor:
    """Calls functions on daemon threads; a cancelled call leaves its thread running.

    A thread cannot be killed. One that outlives its caller is counted until it ends, and while
    `most_hanging` of them run, further calls are refused. The threads do not keep the process from
    ending.
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
            with suppress(RuntimeError):  # the loop was closed before the thread ended
                loop.call_soon_threadsafe(_set_result, done, values)

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


def _set_result(done: "asyncio.Future[list[Any]]", values: list[Any]) -> None:
    if not done.done():
        done.set_result(values)


# Functions in other processes: they use other cores and can be killed.

_MOST = 1_000_000
"""Characters at either end of a longer result that are sent back."""
_OWN_FAULTS: dict[str, type[Exception]] = {
    kind.__name__: kind for kind in (InvalidArguments, ToolError)
}


@final
class ProcessExecutor:
    """Calls one function in a pool of processes, started when first needed."""

    def __init__(self, function: Callable[..., Any], limits: ToolLimits) -> None:
        """A UserError when another process could not find the function."""
        self._where = _place_of(function)
        self._name = function.__name__
        self._limits = limits
        self._pool: ProcessPool | None = None

    async def run(self, values: Mapping[str, Any]) -> ToolReply:
        """The reply; RuntimeError when the process died, ToolTimeout when its time was."""
        if self._pool is None:
            size = min(self._limits.concurrency, os.cpu_count() or 1)
            self._pool = ProcessPool(size, self._limits.timeout_s)
        arguments = (self._where, self._name, dict(values))
        call = Call(where=__name__, name="perform", args=arguments, prepare="prepare")
        came = await self._pool.run(call)
        if came.timed_out:
            raise ToolTimeout(came.error)
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
    """In the worker process: load the function, before its time is measured."""
    del name, values
    module_of(where)


def perform(where: str, name: str, values: Mapping[str, Any]) -> tuple[str, Any]:
    """In the worker process: the reply, or the error that the policy reads."""
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


T = TypeVar("T")


@final
class BackgroundLoop:
    """An event loop on its own thread that outlives the loops of single steps.

    Call `stop` at the end; garbage collection stops it too.

    Example:
        >>> async def answer() -> int:
        ...     return 42
        >>> loop = BackgroundLoop("demo")
        >>> loop.wait(answer(), seconds=5.0)
        42
        >>> loop.stop()
    """

    def __init__(self, name: str) -> None:
        self._loop = with_daemon_threads(asyncio.new_event_loop())
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
