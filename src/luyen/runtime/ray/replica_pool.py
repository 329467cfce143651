"""The pool of replicas: started, given weights, monitored, and restarted when they are lost.

The controller never waits for a single replica. Replies arrive in one queue, whose events are
handled on the controller's thread; the cost of an event does not depend on the number of replicas.
"""

import queue
import time
from collections.abc import Awaitable, Callable, Collection, Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar, TypeVarTuple, final

from luyen.base.boundary import boundary
from luyen.base.errors import UserError
from luyen.config.schema.trainer import TimeoutsConfig
from luyen.models.weights import Fingerprint
from luyen.runtime.gpu_memory import MappedWeights, MemoryProbe
from luyen.runtime.ray.messages import (
    ProcessDied,
    PublishedVersion,
    ReplicaFacts,
    ReplicaHandle,
    ReplicaState,
    ReplicaWeights,
    ReplyCallback,
)
from luyen.runtime.ray.replica import Replica
from luyen.runtime.weights import WeightForm
from luyen.telemetry.spans import waiting_for

T = TypeVar("T")
Arguments = TypeVarTuple("Arguments")
EventHandler: TypeAlias = Callable[[ReplicaState, Any], None]
"""Handles the value of a reply."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaEvent:
    """The reply of a replica to a call.

    Example:
        >>> replica = ReplicaState(0)
        >>> ReplicaEvent(member=replica, incarnation=1, then=print, value=3, error=None).is_late
        False
    """

    member: ReplicaState
    """The replica."""
    incarnation: int
    """The incarnation that was called."""
    then: EventHandler
    """Handler of the value."""
    value: Any
    """What the method returned."""
    error: BaseException | None
    """The error of the call."""
    came: float = field(default_factory=time.monotonic)
    """When it arrived, by the monotonic clock."""

    @property
    def is_late(self) -> bool:
        """Whether the replica was restarted since the call."""
        return self.incarnation != self.member.incarnation


@final
class EventQueue:
    """Events in the order of arrival; filled from any thread."""

    def __init__(self) -> None:
        self._events: queue.SimpleQueue[ReplicaEvent] = queue.SimpleQueue()

    def reply(self, member: ReplicaState, then: EventHandler) -> ReplyCallback:
        """The callback for a call to the current incarnation of a replica; thread-safe."""
        incarnation, put = member.incarnation, self._events.put
        return lambda value, error: put(
            ReplicaEvent(
                member=member, incarnation=incarnation, then=then, value=value, error=error
            )
        )

    def next(self, wait_s: float) -> ReplicaEvent | None:
        """The oldest event, after at most `wait_s`; None: there is none."""
        try:
            with waiting_for("rollout") if wait_s > 0 else nullcontext():
                return self._events.get(block=wait_s > 0, timeout=wait_s or None)
        except queue.Empty:
            return None


_FIELD = "actor_rollout_ref.rollout.data_parallel_size"
MAX_FAILURES = 3
"""Consecutive losses that end the run."""
_POLL_S = 1.0
_WAIT_S = 0.05
_FLUSH_S = 1.0
"""Seconds to wait for the last reports of all replicas together."""


@final
class ReplicaPool:
    """All replicas. After the first reported error, every call raises that error."""

    def __init__(
        self,
        start: Callable[[int], ReplicaHandle],
        replicas: int,
        *,
        ready: Callable[[ReplicaState], None],
        lost: Callable[[ReplicaState], None],
        timeouts: TimeoutsConfig,
    ) -> None:
        """`start` starts the process of a replica; `ready` and `lost` are called for each."""
        self._start = start
        self._ready = ready
        self._lost = lost
        self._timeouts = timeouts
        self._events = EventQueue()
        self._polled_at = self._some_ready = self._heard = time.monotonic()
        self._published: list[PublishedVersion] = []
        self._probe: MemoryProbe | None = None
        """Tells whether a replica reads the memory of the first rank; None: no replica may."""
        self.publication = 0
        """Counts the publications; 0: replicas have their initial weights."""
        self.restarts = 0
        """Restarts of replicas."""
        self.restart_s = 0.0
        """Seconds from losses until the restarted replicas were ready."""
        self.failure: BaseException | None = None
        """The first error."""
        self.members = [ReplicaState(index) for index in range(replicas)]
        for member in self.members:
            self._start_process(member)

    def call(
        self,
        member: ReplicaState,
        method: Callable[[Replica, *Arguments], Awaitable[T]],
        *arguments: *Arguments,
        then: Callable[[ReplicaState, T], None] | None = None,
    ) -> None:
        """Call a method of a replica; `then` gets the result in a later `receive`."""
        assert member.handle is not None
        reply = None if then is None else self._events.reply(member, then)
        member.handle.call(method.__name__, *arguments, reply=reply)

    def receive(self, wait_s: float) -> None:
        """Handle all events that have arrived, after waiting at most `wait_s` for the first."""
        if self.failure is not None:
            raise self.failure
        event = self._events.next(wait_s)
        while event is not None:
            self._handle(event)
            event = self._events.next(0.0)
        self._check_replicas()

    def wait_until(self, is_done: Callable[[], bool]) -> None:
        """Handle events until the condition is true."""
        while not is_done():
            self.receive(_WAIT_S)

    def call_all(
        self, method: Callable[[Replica, *Arguments], Awaitable[T]], *arguments: *Arguments
    ) -> dict[int, T]:
        """Call a method of every ready replica; the results of those that were not lost."""
        answers: dict[int, T] = {}
        called = [(member, member.incarnation) for member in self.members if member.is_ready]

        def keep(member: ReplicaState, value: T) -> None:
            answers[member.index] = value

        for member, _ in called:
            self.call(member, method, *arguments, then=keep)
        self.wait_until(
            lambda: all(
                m.index in answers or m.incarnation != incarnation for m, incarnation in called
            )
        )
        return answers

    def begin_publication(
        self,
        version: int,
        *,
        keep: Collection[int] = (),
        holder: Callable[[], None] | None = None,
    ) -> None:
        """Start a publication: it replaces all weights of the replicas but the versions to keep.

        `holder` raises if the process that stores the parts is lost; it is called while replicas
        lack them.
        """
        self.publication += 1
        kept = [one for one in self._published if one.version in keep]
        self._published = [*kept, PublishedVersion(self.publication, version, holder)]
        for member in self.members:
            member.confirmed &= {one.number for one in kept}

    def offer(self, probe: MemoryProbe) -> None:
        """Find out which replicas read weights in the memory of the process that made the probe."""
        self._probe = probe
        before = {member.index: member.incarnation for member in self.members}
        for index, facts in self.call_all(Replica.facts, probe).items():
            if self.members[index].incarnation == before[index]:
                self.members[index].facts = facts

    @property
    def wanted_form(self) -> WeightForm:
        """What the replicas that are there need the weights as."""
        found = {member.facts.reads_ranks for member in self.members if member.facts is not None}
        if found == {True}:
            return "mapped"
        return "both" if True in found else "bytes"

    def send_all(
        self,
        parts: Sequence[Any],
        expected: Mapping[str, str],
        *,
        mapped: MappedWeights | None = None,
        gather_bytes: Callable[[], Sequence[Any]] | None = None,
    ) -> None:
        """Send the weights to every replica, with the digests that it must confirm.

        A replica that reads the first rank's memory gets `mapped`, which says where; every other
        one gets all parts, for which `gather_bytes` is called if there are none. Both are kept for
        replicas that start later, until `withdraw`. A replica generates with the weights only after
        it has confirmed them; a UserError in `receive` if they differ.
        """
        newest = self._published[-1]
        newest.parts, newest.expected = list(parts), expected
        newest.mapped, newest.gather_bytes = mapped, gather_bytes
        for member in self.members:
            if member.facts is not None:
                member.mark_progress()
                self._send_publication(member, newest)

    def withdraw(self) -> None:
        """Return when no replica reads the memory of a rank, which is about to change.

        A replica that starts from now on gets the parts as bytes, where they were needed before;
        else it waits for the next publication.
        """
        for one in self._published:
            one.mapped = one.gather_bytes = None
        self.wait_until(lambda: not any(member.reading for member in self.members))

    @property
    def is_published(self) -> bool:
        """Whether a replica is ready, and all ready ones have confirmed the newest weights."""
        ready = [member for member in self.members if member.is_ready]
        return bool(ready) and all(self.publication in member.confirmed for member in ready)

    def publication_of(self, version: int | None) -> int:
        """The number of the publication that requests of a version need."""
        numbers = [one.number for one in self._published if one.version == version]
        return numbers[-1] if numbers else self.publication

    @property
    def confirmed_at(self) -> float:
        """When a replica last confirmed the newest weights, by the monotonic clock."""
        return self._published[-1].confirmed_at

    def flush_reports(self) -> None:
        """Call every ready replica for the report that comes with the result, before they end."""
        replies: queue.SimpleQueue[None] = queue.SimpleQueue()
        called = 0
        with boundary([]):
            for member in self.members:
                if member.is_ready and member.handle is not None:
                    member.handle.call(Replica.facts.__name__, reply=lambda *_: replies.put(None))
                    called += 1
        last = time.monotonic() + _FLUSH_S
        for _ in range(called):
            try:
                replies.get(timeout=max(0.0, last - time.monotonic()))
            except queue.Empty:
                return

    def stop(self) -> None:
        """End every replica."""
        for member in self.members:
            if member.handle is not None:
                member.handle.kill()
            member.reset(None)

    def _start_process(self, member: ReplicaState) -> None:
        member.reset(self._start(member.index))
        self.call(member, Replica.facts, self._probe, then=self._on_facts)

    def _on_facts(self, member: ReplicaState, facts: ReplicaFacts) -> None:
        member.facts = facts
        member.mark_progress()
        if self.publication == 0:
            self._mark_ready(member)
            return
        for publication in self._published:
            self._send_publication(member, publication)

    def _send_publication(self, member: ReplicaState, publication: PublishedVersion) -> None:
        """Send all parts, with the last one the expected digests; nothing before they are there."""
        expected, keep = publication.expected, frozenset(one.version for one in self._published)
        if expected is None:
            return
        *parts, last = self._parts_for(member, publication) or [None]
        if last is None:
            return  # the ranks have other weights by now
        number, version = publication.number, publication.version
        for part in parts:
            self.call(member, Replica.load, number, version, keep, part, then=_mark_progress)
        count, then = len(publication.parts), self._on_weights
        self.call(
            member, Replica.load_last, number, version, keep, last, count, expected, then=then
        )

    def _parts_for(self, member: ReplicaState, publication: PublishedVersion) -> Sequence[Any]:
        """What a replica is sent of a publication; nothing if its weights are nowhere any more."""
        assert member.facts is not None, "it said what it can read"
        if publication.mapped is not None and member.facts.reads_ranks:
            member.reading.add(publication.number)
            return [publication.mapped]
        if not publication.parts and publication.gather_bytes is not None:
            publication.parts = list(publication.gather_bytes())
        return publication.parts

    def _on_weights(self, member: ReplicaState, weights: ReplicaWeights) -> None:
        member.mark_progress()
        member.reading.discard(weights.version)
        meant = next((one for one in self._published if one.number == weights.version), None)
        if meant is None:
            return
        assert meant.expected is not None, "no confirmation was requested"
        wanted = Fingerprint(weights=meant.expected)
        difference = Fingerprint(weights=weights.digests).first_difference(wanted)
        if difference is not None:
            why = f"replica {member.index} does not hold what was published: {difference}"
            fix = "find what else writes to its weights; nothing was generated with them"
            raise UserError("actor_rollout_ref.rollout.name", member.index, why, fix)
        member.confirmed.add(weights.version)
        meant.confirmed_at = self._heard
        if not member.is_ready and not self._lacks_weights(member):
            self._mark_ready(member)

    def _lacks_weights(self, member: ReplicaState) -> bool:
        """Whether a replica has not confirmed all published weights."""
        return not member.confirmed >= {one.number for one in self._published}

    def _mark_ready(self, member: ReplicaState) -> None:
        member.is_ready = True
        member.mark_progress()
        if member.restarted is not None:
            self.restart_s += time.monotonic() - member.restarted
            member.restarted = None
        self._ready(member)

    def _handle(self, event: ReplicaEvent) -> None:
        self._heard = event.came
        if event.is_late:
            return
        with self._keep_first_error():
            if isinstance(event.error, ProcessDied):
                self._replace(event.member, str(event.error))
            elif event.error is not None:
                raise event.error
            else:
                event.then(event.member, event.value)

    @contextmanager
    def _keep_first_error(self) -> Generator[None]:
        """Record an error that is raised inside as `failure`."""
        faults: list[BaseException] = []
        with boundary(faults):
            yield
        if faults:
            self.failure = faults[0]
            raise self.failure

    def _replace(self, member: ReplicaState, reason: str) -> None:
        """Restart a lost replica."""
        member.failures += 1
        self.restarts += 1
        if member.handle is not None:
            member.handle.kill()
        member.is_ready = False
        self._lost(member)
        if member.failures >= MAX_FAILURES:
            why = f"replica {member.index} was lost {member.failures} times in a row: {reason}"
            fix = "check its memory and the logs of its node; the run can be resumed"
            raise UserError(_FIELD, len(self.members), why, fix)
        member.restarted = member.restarted or time.monotonic()
        if not any(other.is_ready for other in self.members):
            self._some_ready = time.monotonic()  # the last check may be long ago
        self._start_process(member)

    def _check_replicas(self) -> None:
        """Once a second, restart replicas that have work and make no progress."""
        now, timeouts = time.monotonic(), self._timeouts
        if now - self._polled_at < _POLL_S:
            return
        self._polled_at = now
        lacking = [
            member for member in self.members if member.facts and self._lacks_weights(member)
        ]
        for holder in {one.holder for one in self._published} if lacking else ():
            if holder is not None:
                with self._keep_first_error():
                    holder()
        for member in self.members:
            owes = member.is_polling or member in lacking
            if owes and now - member.last_progress > timeouts.progress_s:
                with self._keep_first_error():
                    still = f"it got nothing done for {timeouts.progress_s:.0f} s"
                    self._replace(member, still)
        if any(member.is_ready for member in self.members):
            self._some_ready = now
        elif now - self._some_ready > timeouts.start_s:
            why = f"no replica was ready within {timeouts.start_s:.0f} s"
            fix = "see `ray status` for missing resources, and `ray logs` for the replicas' output"
            with self._keep_first_error():
                raise UserError(_FIELD, len(self.members), why, fix)


def _mark_progress(member: ReplicaState, value: None) -> None:
    del value
    member.mark_progress()
