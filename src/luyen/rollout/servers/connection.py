"""A connection to one server: calls on a thread with an event loop, replies as JSON."""

import asyncio
import json
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar, final

from luyen.base.http import HttpError, Response, send
from luyen.rollout.servers.dialect import HttpCall, ServerFault

T = TypeVar("T")
_MOST_BYTES = 64 << 20
"""Most bytes of a reply: a long answer with log-probabilities is some megabytes."""
_SHOWN = 300
_HEADERS = {"Content-Type": "application/json", "Accept": "application/json"}


@final
class ServerConnection:
    """Sends calls to the address that the server has at the time."""

    def __init__(self, url: Callable[[], str], *, timeout_s: float) -> None:
        """`timeout_s` bounds every call that has no limit of its own."""
        self._url = url
        self._timeout_s = timeout_s
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="rollout server", daemon=True
        )
        self._thread.start()

    def call(self, call: HttpCall) -> Any:
        """Send a call and wait: its reply; None for an empty one. A ServerFault otherwise."""
        return self.start(call).result()

    def start(self, call: HttpCall, *, delay_s: float = 0.0) -> Future[Any]:
        """Send a call after a delay; the future has its reply, or a ServerFault."""
        return self._run(self._reply(call, delay_s))

    def is_ready(self, health: HttpCall) -> bool:
        """Whether the server answers."""
        try:
            self.call(health)
        except ServerFault:
            return False
        return True

    def close(self) -> None:
        """Drop every call; closing twice is allowed."""
        if not self._thread.is_alive():
            return
        self._run(_cancel_all()).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def _reply(self, call: HttpCall, delay_s: float) -> Any:
        await asyncio.sleep(delay_s)
        body = b"" if call.body is None else json.dumps(call.body, allow_nan=False).encode()
        url = self._url().rstrip("/") + call.path
        limit = call.timeout_s or self._timeout_s
        try:
            async with asyncio.timeout(limit):
                response = await send(call.method, url, body, _HEADERS, most_bytes=_MOST_BYTES)
        except TimeoutError as error:
            raise ServerFault("timeout", f"no reply to {call.path} in {limit:g} s") from error
        except HttpError as error:
            raise ServerFault("connection", f"{call.path}: {error}") from error
        return _read(call, response)


def _read(call: HttpCall, response: Response) -> Any:
    if not 200 <= response.status < 300:
        text = response.body[:_SHOWN].decode(errors="replace")
        raise ServerFault(f"http_{response.status}", f"{call.path}: {text}")
    if not response.body.strip():
        return None
    try:
        return json.loads(response.body)
    except (ValueError, RecursionError) as error:
        if "json" not in response.headers.get("content-type", ""):
            return None  # some routes answer with a word
        shown = response.body[:_SHOWN]
        raise ServerFault("not_json", f"{call.path}: {shown!r}") from error


async def _cancel_all() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks)
