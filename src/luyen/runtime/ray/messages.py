"""Messages between controller and replicas, and the controller's state of each replica.

Nothing here knows Ray: a link may as well lead to an engine in this process.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeAlias, final

from luyen.base.heartbeat import beat
from luyen.base.secrets import masked
from luyen.rollout.protocol import Completion, Request

ReplyCallback: TypeAlias = Callable[[Any, BaseException | None], None]
"""Hears what a call returned, or what it failed with; from any thread."""


@final
class RemoteError(Exception):
    """Something broke in another process; its traceback is the message."""

    def __init__(self, where: str, text: str) -> None:
        text = masked(text)
        super().__init__(where, text)
        self.where = where
        self.text = text

    def __str__(self) -> str:
        return f"{self.where} broke:\n{self.text}"


@final
class ProcessDied(Exception):
    """The process at the other end is gone."""


@final
class RanksLost(Exception):
    """Ranks are gone, or cannot reach each other, through no fault of what they were to do.

    The same work done again from the newest checkpoint may well succeed.
    """


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaFacts:
    """Who a replica is.

    Example:
        >>> ReplicaFacts(pid=1, node="a", is_batch_invariant=True).pid
        1
    """

    pid: int
    """Its process."""
    node: str
    """Where it runs."""
    is_batch_invariant: bool
    """Whether an answer does not depend on what else is drawn at the same time."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PollResult:
    """What a replica finished since it was asked last.

    Example:
        >>> PollResult(completions=(), end=0, passes=3).passes
        3
    """

    completions: tuple[Completion, ...]
    """Finished answers, in the order in which they finished."""
    end: int
    """How many there were up to these, which the next question says."""
    passes: int
    """Engine passes so far: it grows as long as the engine is alive."""
    failure: Exception | None = None
    """What the engine refused or broke with first; later answers are not to be waited for."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaWeights:
    """The weights that a replica holds.

    Example:
        >>> ReplicaWeights(version=2, digests={"w": "float32 [1] 00"}).version
        2
    """

    version: int
    """Number of the publication."""
    digests: Mapping[str, str]
    """Type, shape and digest of every parameter that learns."""


class ReplicaHandle(Protocol):
    """The controller's end of the way to one replica."""

    def call(self, method: str, *arguments: Any, reply: ReplyCallback | None = None) -> None:
        """Call a method of the replica without waiting; a lost one replies with `ProcessDied`."""
        ...

    def kill(self) -> None:
        """End the replica, whatever it is doing."""
        ...


# The controller's view of one replica, and of what is sent to them: requests and weights.


@final
class PendingRequest:
    """A request, and which of its answers are still wanted."""

    __slots__ = ("at", "deaths", "left", "request", "samples")

    def __init__(self, request: Request) -> None:
        self.request = request
        """As it came, or with the keys that were left when it was sent again."""
        self.samples = tuple(range(len(request.keys)))
        """Of each key that was sent, the index it first had."""
        self.left = set(self.samples)
        """First indices of the answers that are to come."""
        self.at: int | None = None
        """The replica that has it; None: nobody has."""
        self.deaths = 0
        """Replicas that were lost while they had it."""

    def again(self) -> None:
        """Ask only for what is left: the same keys draw the same answers anywhere."""
        keys = [
            (sample, key)
            for sample, key in zip(self.samples, self.request.keys, strict=True)
            if sample in self.left
        ]
        self.samples = tuple(sample for sample, _ in keys)
        self.request = replace(self.request, keys=tuple(key for _, key in keys))

    def named(self, completion: Completion) -> Completion:
        """An answer under the index that its key first had."""
        sample = self.samples[completion.sample]
        return completion if sample == completion.sample else replace(completion, sample=sample)

    def stopped(self, sample: int) -> Completion:
        """An answer of which there is nothing."""
        return Completion(
            request=self.request.id, sample=sample, tokens=(), logps=(), reason="aborted"
        )


@final
class PublishedVersion:
    """Weights that replicas hold, or are to hold."""

    def __init__(self, number: int, version: int | None, holder: Callable[[], None] | None) -> None:
        self.number = number
        """Counts the publications."""
        self.holder = holder
        """Raises if whoever has the parts is lost; None: nobody knows."""
        self.version = version
        """What requests call these weights; None: nothing, there are no others."""
        self.parts: list[Any] = []
        """What replicas load, for those that begin later."""
        self.expected: Mapping[str, str] | None = None
        """What they are to hold once they have all parts; None: nobody has said so yet."""
        self.confirmed = 0.0
        """When the last replica said that it does."""


@final
class ReplicaState:
    """One replica: the way to it, what was sent, and what it is to say."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.link: ReplicaHandle | None = None
        self.life = 0
        """Counts its processes: what an earlier one says comes too late."""
        self.facts: ReplicaFacts | None = None
        """Who it is, once it has begun."""
        self.is_ready = False
        """Whether it has begun and holds the weights."""
        self.held = set[int]()
        """Publications that it has confirmed; none: it is as it was made."""
        self.queued: list[Request] = []
        """Requests on their way to it, sent together."""
        self.requests: dict[str, PendingRequest] = {}
        """Requests that it has, or is to have with the next message."""
        self.deaths = 0
        """Times it was lost since it last finished something."""
        self.restarted: float | None = None
        """Since when it is missing."""
        self.began(None)

    def began(self, link: ReplicaHandle | None) -> None:
        """A new process takes its place; nothing was said to it yet."""
        self.link = link
        self.life += 1
        self.facts = None
        self.is_ready = False
        self.held = set[int]()
        self.number = 0
        """Of the next message whose order matters."""
        self.after = 0
        """Answers that came from this process."""
        self.passes = -1
        """Passes of its engine when it was last heard."""
        self.is_asked = False
        """Whether it owes an answer to `collect`."""
        self.moved()

    def moved(self) -> None:
        """There was a sign of life, of the run as well: it may wait for a replica in any phase."""
        beat()
        self.since = time.monotonic()
        """When it last was seen to get on."""

    def next_number(self) -> int:
        """Numbers messages whose order matters."""
        self.number += 1
        return self.number - 1
