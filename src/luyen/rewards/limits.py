"""How often and how many at once: limits that all groups of a step share."""

import asyncio
import threading
from collections.abc import Callable
from time import monotonic
from typing import final
from weakref import WeakKeyDictionary

FIRST_WAIT_S = 0.5
LONGEST_WAIT_S = 30.0


def wait_before(retry: int, asked_s: float | None = None) -> float:
    """Seconds to wait before the n-th retry: twice as long each time, or what the server asks for.

    Example:
        >>> [wait_before(n) for n in (1, 2, 3, 10)]
        [0.5, 1.0, 2.0, 30.0]
        >>> wait_before(1, asked_s=7.0)
        7.0
    """
    grown = FIRST_WAIT_S * 2.0 ** min(retry - 1, 32)
    return min(LONGEST_WAIT_S, grown if asked_s is None else max(grown, asked_s))


@final
class Pace:
    """At most so many starts a minute, evenly spaced, so that no minute anywhere holds more.

    Example:
        >>> pace = Pace(per_minute=30, now=lambda: 0.0)
        >>> pace.reserve(), pace.reserve(), pace.reserve()
        (0.0, 2.0, 4.0)
    """

    def __init__(self, *, per_minute: float | None, now: Callable[[], float] = monotonic) -> None:
        """`None`: no limit, but `pause` holds all the same."""
        self._apart_s = 0.0 if per_minute is None else 60.0 / per_minute
        self._now = now
        self._lock = threading.Lock()
        self._free_at = now()

    def reserve(self) -> float:
        """Take the next place; how many seconds from now it comes."""
        with self._lock:
            now = self._now()
            at = max(now, self._free_at)
            self._free_at = at + self._apart_s
            return at - now

    def pause(self, seconds: float) -> None:
        """Let nobody start for so long: the server has asked for it."""
        with self._lock:
            self._free_at = max(self._free_at, self._now() + seconds)


@final
class Room:
    """At most so many at once. Every step has an event loop of its own, and one semaphore on it."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._semaphores: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = (
            WeakKeyDictionary()
        )

    def here(self) -> asyncio.Semaphore:
        """The semaphore of the running loop."""
        loop = asyncio.get_running_loop()
        return self._semaphores.setdefault(loop, asyncio.Semaphore(self._size))
