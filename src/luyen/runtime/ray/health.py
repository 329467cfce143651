"""Health of worker processes: heartbeats, what Ray's errors stand for, exit with the parent.

A process that is killed is told of by Ray at once. One that is stopped, or on a node that cannot be
reached, says nothing at all, and whoever waits for it would wait for ever.
"""

import math
import os
import re
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, final

import ray
from ray.exceptions import (
    NodeDiedError,
    ObjectLostError,
    OutOfMemoryError,
    RayActorError,
    RayError,
    RayTaskError,
    WorkerCrashedError,
)

from luyen.base.errors import UserError
from luyen.base.heartbeat import HEART
from luyen.runtime.ray.messages import RanksLost, RemoteError

# What errors of Ray stand for: a process that is gone, or code that broke in one.

PROCESS_GONE = (RayActorError, NodeDiedError, WorkerCrashedError, OutOfMemoryError)
"""The process is gone, with its node or without, for whatever reason."""
FAILED_BEFORE = "another call of this rank failed before"
"""What a rank says to every call behind one that broke."""
_SECONDARY_ERRORS = re.compile(
    rf"{FAILED_BEFORE}|gloo/|Connection (closed|reset) by peer|ncclRemoteError|ncclSystemError|"
    r"NCCL communicator was aborted|DistNetworkError"
)
"""What a rank says when another is not there any more, or when it broke before."""
_REASONS = (
    r"(?P<said>[^\n]*low on memory[^\n]*)",
    r"Worker exit detail: (?P<said>.*?)(?: Some common causes|\n|$)",
    r"(?P<said>[^\n]*\bnode\b[^\n]*(?:died|dead|terminated)[^\n]*)",
    r"The actor (?:is dead|died) because (?P<said>[^\n]*)",
)
_COLOURS = re.compile(r"\x1b\[\d+m")


def is_secondary_error(error: RayError) -> bool:
    """Whether a rank broke only because it lost the connection to another."""
    is_users = isinstance(error, RayTaskError) and isinstance(error.cause, UserError)
    return (
        isinstance(error, RayTaskError)
        and not is_users
        and bool(_SECONDARY_ERRORS.search(str(error)))
    )


def classify_failure(error: RayError, rank: int) -> BaseException:
    """What an error of a rank stands for, to the one who runs."""
    if isinstance(error, PROCESS_GONE):
        return RanksLost(f"rank {rank} is gone: {failure_reason(error)}")
    if isinstance(error, ObjectLostError):
        return RanksLost(
            f"rank {rank} is gone, and with it what it had to say: {failure_reason(error)}"
        )
    if isinstance(error, RayTaskError):
        cause = error.cause
        if isinstance(cause, UserError):
            return cause
        broken = RemoteError(f"rank {rank}", traceback_of(error))
        if is_secondary_error(error):
            return RanksLost(f"rank {rank} lost the connection to the others\n{broken}")
        return broken
    return error


def is_object_lost(error: BaseException) -> bool:
    """Whether what was published is gone with the rank that held it."""
    inner = error.cause if isinstance(error, RayTaskError) else error
    return isinstance(inner, ObjectLostError)


def silence_error(rank: int, seconds: float) -> RanksLost:
    """What is said of a rank that gives no sign of life."""
    why = f"rank {rank} gave no sign of life for {seconds:.0f} s: its process or node is stopped"
    return RanksLost(f"{why}, overloaded or cut off")


def failure_reason(error: BaseException) -> str:
    """Of the many lines that Ray has to say, the one that tells why."""
    text = _COLOURS.sub("", str(error)).strip()
    for pattern in _REASONS:
        found = re.search(pattern, text)
        if found:
            return " ".join(found["said"].split()).rstrip(".")
    return text.partition("\n")[0].rstrip(".")


def traceback_of(error: RayTaskError) -> str:
    """What was raised in another process, with its place there."""
    first, *rest = _COLOURS.sub("", str(error)).splitlines()
    # Ray drops its own frames from the text, and leaves the carets under them.
    start = next((i for i, line in enumerate(rest) if line.strip(" ^~")), 0)
    return "\n".join([first, *rest[start:]])


_PAUSE_S = 10.0
"""Who looks after so long has not been waiting all the while: silence until then means nothing."""


@final
class HealthCheck:
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
            return classify_failure(error, rank)
        return next((silence_error(*one) for one in self.silent().items()), None)

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


# A process that ends with the one that started it, whatever it is doing then.
#
# Ray asks a worker to end, and one that waits in a collective may not hear of it: on a node
# that was given up and is back, a rank would wait for ranks that have long been begun again
# elsewhere.

_PARENT_POLL_S = 1.0


def exit_with_parent() -> None:
    """From now on this process ends within seconds of its parent."""
    parent = os.getppid()
    threading.Thread(target=_watch_parent, args=(parent,), name="tied", daemon=True).start()


def _watch_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_PARENT_POLL_S)
    os._exit(1)
