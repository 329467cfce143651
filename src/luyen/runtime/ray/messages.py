"""Messages between controller and replicas, and the controller's state of each replica.

Nothing here depends on Ray: a handle may also lead to an engine in this process.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeAlias, final

from luyen.base.heartbeat import beat
from luyen.base.secrets import masked
from luyen.rollout.protocol import Completion, Request
from luyen.runtime.gpu_memory import MappedWeights

ReplyCallback: TypeAlias = Callable[[Any, BaseException | None], None]
"""Receives the value of a call, or its error; called from any thread."""


@final
class RemoteError(Exception):
    """An exception in another process; its traceback is the message."""

    def __init__(self, where: str, text: str) -> None:
        text = masked(text)
        super().__init__(where, text)
        self.where = where
        self.text = text

    def __str__(self) -> str:
        return f"{self.where} broke:\n{self.text}"


@final
class ProcessDied(Exception):
    """The process of the called replica is gone."""


@final
class RanksLost(Exception):
    """Ranks are gone or cannot reach each other, without an error in the code they ran.

    Restarting from the newest checkpoint may succeed.
    """


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaFacts:
    """Identity of a replica's process.

    Example:
        >>> ReplicaFacts(pid=1, node="a", is_batch_invariant=True).pid
        1
    """

    pid: int
    """Process id."""
    node: str
    """Id of its node."""
    is_batch_invariant: bool
    """Whether a response does not depend on the other requests of the batch."""
    reads_ranks: bool = False
    """Whether it reads weights in the memory of the first rank: they are on one GPU."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PollResult:
    """Completions of a replica since the last poll.

    Example:
        >>> PollResult(completions=(), end=0, passes=3).passes
        3
    """

    completions: tuple[Completion, ...]
    """Completions in the order in which they finished."""
    end: int
    """Completions so far, these included; the next poll passes it as `after`."""
    passes: int
    """Engine passes so far: it grows as long as the engine makes progress."""
    failure: Exception | None = None
    """First error of the engine; no later completion will come."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaWeights:
    """The weights of a replica.

    Example:
        >>> ReplicaWeights(version=2, digests={"w": "float32 [1] 00"}).version
        2
    """

    version: int
    """Number of the publication."""
    digests: Mapping[str, str]
    """Type, shape and digest of every trained parameter."""


class ReplicaHandle(Protocol):
    """The controller's handle of one replica."""

    def call(self, method: str, *arguments: Any, reply: ReplyCallback | None = None) -> None:
        """Call a method of the replica without waiting; `ProcessDied` if its process is gone."""
        ...

    def kill(self) -> None:
        """Kill the process of the replica."""
        ...


# The controller's state of requests, publications and replicas.


@final
class PendingRequest:
    """A submitted request, and its samples that are not finished."""

    __slots__ = ("at", "failures", "left", "request", "samples")

    def __init__(self, request: Request) -> None:
        self.request = request
        """As submitted, or with the remaining keys after a resubmission."""
        self.samples = tuple(range(len(request.keys)))
        """The original sample index of each key in `request`."""
        self.left = set(self.samples)
        """Original indices of the unfinished samples."""
        self.at: int | None = None
        """Index of its replica; None: unassigned."""
        self.failures = 0
        """Replicas that were lost while they generated it."""

    def again(self) -> None:
        """Reduce the request to unfinished samples: a key gives the same response anywhere."""
        keys = [
            (sample, key)
            for sample, key in zip(self.samples, self.request.keys, strict=True)
            if sample in self.left
        ]
        self.samples = tuple(sample for sample, _ in keys)
        self.request = replace(self.request, keys=tuple(key for _, key in keys))

    def named(self, completion: Completion) -> Completion:
        """The completion with the original sample index."""
        sample = self.samples[completion.sample]
        return completion if sample == completion.sample else replace(completion, sample=sample)

    def stopped(self, sample: int) -> Completion:
        """An aborted completion without tokens."""
        return Completion(
            request=self.request.id, sample=sample, tokens=(), logps=(), reason="aborted"
        )


@final
class PublishedVersion:
    """Weights that were sent, or are being sent, to the replicas."""

    def __init__(self, number: int, version: int, holder: Callable[[], None] | None) -> None:
        self.number = number
        """Number of the publication, counted from 1."""
        self.holder = holder
        """Raises if the process that stores the parts is lost; None: not checked."""
        self.version = version
        """The version that requests name."""
        self.parts: list[Any] = []
        """All parts as bytes, kept for replicas that start later; empty: no replica needed them."""
        self.mapped: MappedWeights | None = None
        """The weights in the memory of a rank; None: they are not there, or not any more."""
        self.gather_bytes: Callable[[], Sequence[Any]] | None = None
        """Gathers the parts while the ranks still have these weights; None: they do not."""
        self.expected: Mapping[str, str] | None = None
        """Digests that replicas must have after all parts; None: not known yet."""
        self.confirmed_at = 0.0
        """When the last replica confirmed the digests, by the monotonic clock."""


@final
class ReplicaState:
    """The controller's state of one replica."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.handle: ReplicaHandle | None = None
        self.incarnation = 0
        """Counts its processes: events of an earlier one are ignored."""
        self.facts: ReplicaFacts | None = None
        """Identity of its process, once that has started."""
        self.is_ready = False
        """Whether it has started and has all published weights."""
        self.confirmed = set[int]()
        """Publications that it has confirmed; empty: it has its initial weights."""
        self.queued: list[Request] = []
        """Requests of the next message."""
        self.requests: dict[str, PendingRequest] = {}
        """Requests assigned to it, those of the next message included."""
        self.failures = 0
        """Times it was lost since its last completion."""
        self.restarted: float | None = None
        """When it was lost; None: it is not being restarted."""
        self.reset(None)

    def reset(self, handle: ReplicaHandle | None) -> None:
        """Reset the state for a new process."""
        self.handle = handle
        self.incarnation += 1
        self.facts = None
        self.is_ready = False
        self.confirmed = set[int]()
        self.reading = set[int]()
        """Publications that it was sent to read in the memory of a rank, and did not confirm."""
        self.number = 0
        """Number of the next ordered message."""
        self.received = 0
        """Completions received from this process."""
        self.passes = -1
        """Passes of its engine at the last poll."""
        self.is_polling = False
        """Whether a call of `collect` is pending."""
        self.mark_progress()

    def mark_progress(self) -> None:
        """Note progress of the replica, which is a heartbeat of the run as well."""
        beat()
        self.last_progress = time.monotonic()
        """When it last made progress, by the monotonic clock."""

    def next_number(self) -> int:
        """The number of an ordered message."""
        self.number += 1
        return self.number - 1
