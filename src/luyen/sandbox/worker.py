"""The process that makes calls for a pool: one at a time, on its main thread.

Its arguments are the number of an open pipe, the id of the process that owns it, and the most bytes
of a result.
"""

import asyncio
import importlib
import importlib.util
import inspect
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager
from functools import cache
from multiprocessing.connection import Connection
from operator import attrgetter
from pathlib import Path
from time import perf_counter
from types import ModuleType
from typing import Any

from luyen.base.boundary import boundary, last_line
from luyen.base.system import reset_signals
from luyen.base.user_modules import loaded_module, module_name
from luyen.sandbox.calls import Call, Reply, within
from luyen.sandbox.child.usage import kill_process_tree

READY = b"ready"
"""Said when the function is loaded and prepared: from here on the clock of the call runs."""
MARK_BYTES = 16
"""A request begins with bytes of chance, and so do the messages that belong to it: what a function
wrote into the pipe does not."""
_MARGIN_S = 2.0
"""How late the owner may notice that the time of a call is up."""


@cache
def module_of(where: str) -> ModuleType:
    """A module by name, or by the path of its file; loaded once."""
    if not where.endswith(".py"):
        return importlib.import_module(where)
    file = Path(where).resolve()
    loaded = loaded_module(file)
    if loaded is not None:
        return loaded
    spec = importlib.util.spec_from_file_location(module_name(file), file)
    if spec is None or spec.loader is None:
        raise FileNotFoundError(f"{where} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def function_of(where: str, name: str) -> Callable[..., Any]:
    """The function behind a call."""
    return attrgetter(name)(module_of(where))


def prepare(call: Call) -> None:
    """Load what a call needs."""
    function_of(call.where, call.name)
    if call.prepare is not None:
        function_of(call.where, call.prepare)(*call.args, **call.kwargs)


def perform(call: Call, *, timeout_s: float) -> Reply:
    """Make a call on this thread, where no event loop runs."""
    faults: list[BaseException] = []
    returned: Any = None
    start = perf_counter()
    with limited_cpu(timeout_s), boundary(faults), within(timeout_s):
        returned = function_of(call.where, call.name)(*call.args, **call.kwargs)
        if inspect.isawaitable(returned):
            returned = asyncio.run(_awaited(returned))
    seconds = perf_counter() - start
    return Reply(value=returned, error=last_line(faults[0]) if faults else None, seconds=seconds)


async def _awaited(waiting: Awaitable[Any]) -> Any:
    return await waiting


def packed(reply: Reply, *, result_bytes: int) -> bytes:
    """A reply as bytes; one that cannot be sent becomes an error that says so."""
    faults: list[BaseException] = []
    data = b""
    with boundary(faults):
        data = pickle.dumps(reply)
    if faults:
        error = f"the result cannot be sent: {last_line(faults[0])}"
    elif len(data) > result_bytes:
        error = f"the result takes {len(data)} bytes, and {result_bytes} are allowed"
    else:
        return data
    return pickle.dumps(Reply(error=error, seconds=reply.seconds))


def serve(pipe: "Connection[bytes, bytes]", *, result_bytes: int) -> None:
    """Answer calls until the other side hangs up; a copy that a call forked never answers."""
    own = os.getpid()
    while True:
        try:
            request = pipe.recv_bytes()
        except (EOFError, OSError):
            return
        faults: list[BaseException] = []
        with boundary(faults):
            call, timeout_s = pickle.loads(request[MARK_BYTES:])
            prepare(call)
        if os.getpid() != own:
            os._exit(0)
        mark = request[:MARK_BYTES]
        if faults:
            pipe.send_bytes(mark + pickle.dumps(Reply(error=last_line(faults[0]))))
            continue
        pipe.send_bytes(mark + READY)
        answer = packed(perform(call, timeout_s=timeout_s), result_bytes=result_bytes)
        if os.getpid() != own:
            os._exit(0)
        pipe.send_bytes(mark + answer)


def leave_with(owner: int) -> None:
    """End this process and all it started soon after its owner, even in the middle of a call."""
    while os.getppid() == owner:
        time.sleep(1.0)
    kill_process_tree(os.getpid())
    os._exit(1)


@contextmanager
def limited_cpu(seconds: float) -> Generator[None]:
    """Let the kernel end this process when it computes on beyond what its owner would allow.

    The owner ends it long before. When that is gone, a call that never lets go of the interpreter,
    such as a search for a pattern, would keep `leave_with` from running for ever.
    """
    if "setitimer" not in dir(signal):  # Windows
        yield
        return
    signal.setitimer(signal.ITIMER_PROF, (seconds + _MARGIN_S) * (os.cpu_count() or 1))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)


def main(number: str, owner: str, result_bytes: str) -> None:
    """Serve the pipe of this number."""
    reset_signals()
    threading.Thread(target=leave_with, args=(int(owner),), daemon=True).start()
    serve(Connection(int(number)), result_bytes=int(result_bytes))


if __name__ == "__main__":
    main(*sys.argv[1:])
