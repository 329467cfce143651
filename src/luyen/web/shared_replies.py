"""Replies that tabs which ask for the same at the same time share.

Every tab that follows a run renews its screen upon the same event. An answer is computed for the
first of them and once more for all that asked meanwhile: an answer is never older than its request.
"""

import threading
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import Any, final

from fastapi.responses import Response

from luyen.studio.screens.live import json_bytes

_JSON = "application/json"


@final
class SharedReplies:
    """The answers that are being computed; safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: dict[Hashable, Future[bytes | None]] = {}
        self._next: dict[Hashable, Future[bytes | None]] = {}

    def reply(self, key: Hashable, make: Callable[[], Any]) -> Response:
        """What `make` returns as JSON; of those who wait for the same, one computes it."""
        mine: Future[bytes | None] = Future()
        with self._lock:
            running = self._running.get(key)
            if running is None:
                self._running[key] = mine
                waited = mine
            else:
                waited = self._next.setdefault(key, mine)
        if waited is not mine:
            # None: the one who computed it failed, so that this one finds out by itself.
            shared = waited.result()
            return Response(json_bytes(make()) if shared is None else shared, media_type=_JSON)
        if running is not None:
            running.result()
            with self._lock:
                self._running[key] = self._next.pop(key)
        return Response(self._computed(key, mine, make), media_type=_JSON)

    def _computed(
        self, key: Hashable, mine: "Future[bytes | None]", make: Callable[[], Any]
    ) -> bytes:
        found: bytes | None = None
        try:
            found = json_bytes(make())
            return found
        finally:
            with self._lock:
                if self._running.get(key) is mine:
                    del self._running[key]
            mine.set_result(found)
