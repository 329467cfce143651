"""Who of some processes is gone, and who has not been heard of for too long.

A process that is killed is told of by Ray at once. One that is stopped, or on a node that cannot be
reached, says nothing at all, and whoever waits for it would wait for ever.
"""

import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, final

import ray
from ray.exceptions import RayError

from luyen.base.heartbeat import HEART
from luyen.runtime.ray.losses import lost_silent, meaning

_PAUSE_S = 10.0
"""Who looks after so long has not been waiting all the while: silence until then means nothing."""


@final
class Pulse:
    """Asks for signs of life, one question to each process at a time; from any thread."""

    def __init__(
        self, asks: Sequence[Callable[[], Any]], *, start_s: float, silence_s: float
    ) -> None:
        """`asks` send the question and return at once. A first answer may take `start_s`."""
        self._asks = asks
        self._start_s = start_s
        self._silence_s = silence_s
        self._pending: dict[int, Any] = {}
        self._since: dict[int, float] = {}
        """Since when the answer to a pending question is missed."""
        self._beats: dict[int, int] = {}
        self._gone: dict[int, RayError] = {}
        self._looked = -math.inf
        self._lock = threading.Lock()

    def gone(self) -> dict[int, RayError]:
        """Processes that cannot answer any more, with what Ray says; work of others is beaten."""
        with self._lock:
            self._ask()
            ranks = {asked: rank for rank, asked in self._pending.items()}
            if ranks:
                # Without any wait even an answer that is there may not be seen.
                done, _ = ray.wait(list(ranks), num_returns=len(ranks), timeout=0.01)
                for asked in done:
                    self._hear(ranks[asked], asked)
            return dict(self._gone)

    def silent(self) -> dict[int, float]:
        """Processes that have not answered for too long, and for how many seconds."""
        with self._lock:
            now = time.monotonic()
            found = {rank: now - self._since[rank] for rank in self._pending}
            return {rank: seconds for rank, seconds in found.items() if seconds > self._limit(rank)}

    def loss(self) -> BaseException | None:
        """Why nothing more can come of one of them; None: all live, for all that is known."""
        for rank, error in self.gone().items():
            return meaning(error, rank)
        return next((lost_silent(*one) for one in self.silent().items()), None)

    def _ask(self) -> None:
        now = time.monotonic()
        if now - self._looked > _PAUSE_S:
            self._since = dict.fromkeys(self._pending, now)
        self._looked = now
        for rank, ask in enumerate(self._asks):
            if rank not in self._pending and rank not in self._gone:
                self._pending[rank], self._since[rank] = ask(), now

    def _limit(self, rank: int) -> float:
        return self._silence_s if rank in self._beats else self._start_s

    def _hear(self, rank: int, asked: Any) -> None:
        del self._pending[rank]
        try:
            beats: int = ray.get(asked)
        except RayError as error:
            self._gone[rank] = error
            return
        if beats != self._beats.get(rank):
            # What moves there moves the run: the watchdog of this process hears of it.
            HEART.beat_of_loop()
        self._beats[rank] = beats
