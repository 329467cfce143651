"""Health of worker processes: classification of Ray's errors, health checks, exit with the parent.

Ray reports a killed process at once. A stopped one, or one on an unreachable node, is only noticed
because it does not answer the health check.
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
from luyen.config.schema.trainer import TimeoutsConfig
from luyen.runtime.ray.messages import RanksLost, RemoteError

# Classification of Ray's errors: a lost process, or an exception in its code.

PROCESS_GONE = (RayActorError, NodeDiedError, WorkerCrashedError, OutOfMemoryError)
"""Errors that mean that the process, or its node, is gone."""
FAILED_BEFORE = "another call of this rank failed before"
"""Error of every call of a rank after one that failed."""
_SECONDARY_ERRORS = re.compile(
    rf"{FAILED_BEFORE}|gloo/|Connection (closed|reset) by peer|ncclRemoteError|ncclSystemError|"
    r"NCCL communicator was aborted|DistNetworkError"
)
"""Errors of a rank that follow from the loss of another rank, or from its own earlier error."""
_REASONS = (
    r"(?P<said>[^\n]*low on memory[^\n]*)",
    r"Worker exit detail: (?P<said>.*?)(?: Some common causes|\n|$)",
    r"(?P<said>[^\n]*\bnode\b[^\n]*(?:died|dead|terminated)[^\n]*)",
    r"The actor (?:is dead|died) because (?P<said>[^\n]*)",
)
_COLOURS = re.compile(r"\x1b\[\d+m")


def is_secondary_error(error: RayError) -> bool:
    """Whether a rank failed only because it lost the connection to another rank."""
    is_users = isinstance(error, RayTaskError) and isinstance(error.cause, UserError)
    return isinstance(error, RayTaskError) and not is_users and is_lost_connection(str(error))


def is_lost_connection(text: str) -> bool:
    """Whether an error of this text follows from the loss of another rank."""
    return bool(_SECONDARY_ERRORS.search(text))


def classify_failure(error: RayError, process: str) -> BaseException:
    """The error to raise in the controller for an error of a process, for instance `rank 0`."""
    if isinstance(error, PROCESS_GONE):
        return RanksLost(f"{process} is gone: {failure_reason(error)}")
    if isinstance(error, ObjectLostError):
        return RanksLost(
            f"{process} is gone, and with it what it had to say: {failure_reason(error)}"
        )
    if isinstance(error, RayTaskError):
        cause = error.cause
        if isinstance(cause, UserError):
            return cause
        broken = RemoteError(process, traceback_of(error))
        if is_secondary_error(error):
            return RanksLost(f"{process} lost the connection to the other ranks\n{broken}")
        return broken
    return error


def is_object_lost(error: BaseException) -> bool:
    """Whether published weights were lost with the rank that stored them."""
    inner = error.cause if isinstance(error, RayTaskError) else error
    return isinstance(inner, ObjectLostError)


def silence_error(process: str, seconds: float) -> RanksLost:
    """The error of a process that does not answer the health check."""
    why = f"{process} gave no sign of life for {seconds:.0f} s: its process or node is stopped"
    return RanksLost(f"{why}, overloaded or cut off")


def failure_reason(error: BaseException) -> str:
    """The one line of Ray's message that names the cause."""
    text = _COLOURS.sub("", str(error)).strip()
    for pattern in _REASONS:
        found = re.search(pattern, text)
        if found:
            return " ".join(found["said"].split()).rstrip(".")
    return text.partition("\n")[0].rstrip(".")


def traceback_of(error: RayTaskError) -> str:
    """The traceback of an exception in another process."""
    first, *rest = _COLOURS.sub("", str(error)).splitlines()
    # Ray drops its own frames from the text, but leaves the carets under them.
    start = next((i for i, line in enumerate(rest) if line.strip(" ^~")), 0)
    return "\n".join([first, *rest[start:]])


_MAX_POLL_GAP_S = 10.0
"""If the controller did not poll for this long, silence is no evidence; the clocks restart."""


@final
class HealthCheck:
    """Pings processes, with at most one pending ping per process. Thread-safe."""

    def __init__(
        self, pings: Sequence[Callable[[], Any]], timeouts: TimeoutsConfig, *, name: str = "rank"
    ) -> None:
        """`pings` send without waiting. A first answer may take `start_s`.

        `name` is what errors call a process, before its number.
        """
        self._pings = pings
        self._name = name
        self._timeouts = timeouts
        self._pending: dict[int, Any] = {}
        self._since: dict[int, float] = {}
        """When the pending ping of each rank was sent."""
        self._beats: dict[int, int] = {}
        self._gone: dict[int, RayError] = {}
        self._polled_at = -math.inf
        self._lock = threading.Lock()

    def gone(self) -> dict[int, RayError]:
        """Processes that have ended, with Ray's error; progress of the rest counts as heartbeat."""
        with self._lock:
            self._ping()
            ranks = {call: rank for rank, call in self._pending.items()}
            if ranks:
                # With a timeout of 0 Ray may miss an answer that has arrived.
                done, _ = ray.wait(list(ranks), num_returns=len(ranks), timeout=0.01)
                for call in done:
                    self._receive(ranks[call], call)
            return dict(self._gone)

    def silent(self) -> dict[int, float]:
        """Processes that have not answered within their limit, and for how many seconds."""
        with self._lock:
            now = time.monotonic()
            found = {rank: now - self._since[rank] for rank in self._pending}
            return {rank: seconds for rank, seconds in found.items() if seconds > self._limit(rank)}

    def loss(self) -> BaseException | None:
        """The error of a lost or silent process; None: all are alive."""
        for rank, error in self.gone().items():
            return classify_failure(error, self.name_of(rank))
        silent = ((self.name_of(rank), seconds) for rank, seconds in self.silent().items())
        return next((silence_error(*one) for one in silent), None)

    def name_of(self, rank: int) -> str:
        """What errors call a process."""
        return f"{self._name} {rank}"

    def _ping(self) -> None:
        now = time.monotonic()
        if now - self._polled_at > _MAX_POLL_GAP_S:
            self._since = dict.fromkeys(self._pending, now)
        self._polled_at = now
        for rank, ping in enumerate(self._pings):
            if rank not in self._pending and rank not in self._gone:
                self._pending[rank], self._since[rank] = ping(), now

    def _limit(self, rank: int) -> float:
        timeouts = self._timeouts
        return timeouts.silence_s if rank in self._beats else timeouts.start_s

    def _receive(self, rank: int, call: Any) -> None:
        del self._pending[rank]
        try:
            beats: int = ray.get(call)
        except RayError as error:
            self._gone[rank] = error
            return
        if beats != self._beats.get(rank):
            # Progress of a worker is progress of the run, for the watchdog of this process.
            HEART.beat_of_loop()
        self._beats[rank] = beats


# Exit with the parent. Ray asks a worker to end, but one that waits in a collective may not notice:
# on a node that returns after it was given up, a rank would wait for ranks that were restarted on
# other nodes.

_PARENT_POLL_S = 1.0


def exit_with_parent() -> None:
    """Make this process end within seconds of its parent."""
    parent = os.getppid()
    threading.Thread(target=_watch_parent, args=(parent,), name="tied", daemon=True).start()


def _watch_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_PARENT_POLL_S)
    os._exit(1)
