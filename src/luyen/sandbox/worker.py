"""The process that makes calls for a pool: one at a time, on its main thread.

Its arguments are the number of an open pipe, the id of the process that owns it, and the most bytes
of a result.
"""

import asyncio
import hashlib
import importlib
import importlib.util
import inspect
import os
import pickle
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

from luyen.base.faults import last_line
from luyen.sandbox.calls import Call, Reply
from luyen.sandbox.deadline import within

READY = b"ready"
"""Said when the function is loaded and prepared: from here on the clock of the call runs."""


@contextmanager
def boundary(faults: list[str]) -> Generator[None, None, None]:
    """Turn whatever the called code raises into a line in `faults`, with the place of it."""
    try:
        yield
    except Exception as fault:  # noqa: BLE001
        faults.append(last_line(fault))


@cache
def module_of(where: str) -> ModuleType:
    """A module by name, or by the path of its file; loaded once."""
    if not where.endswith(".py"):
        return importlib.import_module(where)
    file = Path(where).resolve()
    mark = hashlib.blake2b(str(file).encode(), digest_size=4).hexdigest()
    spec = importlib.util.spec_from_file_location(f"luyen_file_{file.stem}_{mark}", file)
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
    faults: list[str] = []
    returned: Any = None
    start = perf_counter()
    with boundary(faults), within(timeout_s):
        returned = function_of(call.where, call.name)(*call.args, **call.kwargs)
        if inspect.isawaitable(returned):
            returned = asyncio.run(_awaited(returned))
    seconds = perf_counter() - start
    return Reply(value=returned, error=faults[0] if faults else None, seconds=seconds)


async def _awaited(waiting: Awaitable[Any]) -> Any:
    return await waiting


def packed(reply: Reply, *, result_bytes: int) -> bytes:
    """A reply as bytes; one that cannot be sent becomes an error that says so."""
    faults: list[str] = []
    data = b""
    with boundary(faults):
        data = pickle.dumps(reply)
    if faults:
        error = f"the result cannot be sent: {faults[0]}"
    elif len(data) > result_bytes:
        error = f"the result takes {len(data)} bytes, and {result_bytes} are allowed"
    else:
        return data
    return pickle.dumps(Reply(error=error, seconds=reply.seconds))


def serve(pipe: "Connection[bytes, bytes]", *, result_bytes: int) -> None:
    """Answer calls until the other side hangs up."""
    while True:
        try:
            request = pipe.recv_bytes()
        except (EOFError, OSError):
            return
        faults: list[str] = []
        with boundary(faults):
            call, timeout_s = pickle.loads(request)
            prepare(call)
        if faults:
            pipe.send_bytes(pickle.dumps(Reply(error=faults[0])))
            continue
        pipe.send_bytes(READY)
        pipe.send_bytes(packed(perform(call, timeout_s=timeout_s), result_bytes=result_bytes))


def leave_with(owner: int) -> None:
    """End this process soon after its owner, even in the middle of a call."""
    while os.getppid() == owner:
        time.sleep(1.0)
    os._exit(1)


def main(number: str, owner: str, result_bytes: str) -> None:
    """Serve the pipe of this number."""
    threading.Thread(target=leave_with, args=(int(owner),), daemon=True).start()
    serve(Connection(int(number)), result_bytes=int(result_bytes))


if __name__ == "__main__":
    main(*sys.argv[1:])
