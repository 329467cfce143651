"""The pool of replicas: started, given weights, watched, and restarted when they are lost.

Nothing waits for a single replica. What they say arrives in one mailbox, whose events are handled
on the controller's thread; the cost of an event does not depend on how many replicas there are.
"""

import queue
import time
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeAlias, final

from luyen.base.boundary import boundary
from luyen.base.errors import UserError
from luyen.models.trained_weights import Fingerprint
from luyen.runtime.ray.messages import (
    ProcessDied,
    PublishedVersion,
    ReplicaFacts,
    ReplicaHandle,
    ReplicaState,
    ReplicaWeights,
    ReplyCallback,
)
from luyen.telemetry.spans import waiting_for

# Where everything that replicas say arrives, from whatever thread, for one that handles it.

EventHandler: TypeAlias = Callable[[ReplicaState, Any], None]
"""What is done with a reply."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaEvent:
    """Something that a replica said.

    Example:
        >>> member = ReplicaState(0)
        >>> ReplicaEvent(member=member, life=1, then=print, value="hello", error=None).is_late
        False
    """

    member: ReplicaState
    """Who."""
    life: int
    """In which of its lives."""
    then: EventHandler
    """What to do with it."""
    value: Any
    """What it said."""
    error: BaseException | None
    """What it failed with instead."""
    came: float = field(default_factory=time.monotonic)
    """When it was heard."""

    @property
    def is_late(self) -> bool:
        """Whether another process has taken its place since."""
        return self.life != self.member.life


@final
class EventQueue:
    """Events in the order in which they came."""

    def __init__(self) -> None:
        self._events: queue.SimpleQueue[ReplicaEvent] = queue.SimpleQueue()

    def reply(self, member: ReplicaState, then: EventHandler) -> ReplyCallback:
        """Where a call to a replica, as it lives now, is to be answered; from any thread."""
        life, put = member.life, self._events.put
        return lambda value, error: put(
            ReplicaEvent(member=member, life=life, then=then, value=value, error=error)
        )

    def next(self, wait_s: float) -> ReplicaEvent | None:
        """The oldest event that was not handled; where there is none, wait so long for one."""
        try:
            with waiting_for("rollout") if wait_s > 0 else nullcontext():
                return self._events.get(block=wait_s > 0, timeout=wait_s or None)
        except queue.Empty:
            return None


# How long the controller waits for replicas.


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaTimeouts:
    """How long the controller waits, and how often it begins again.

    Example:
        >>> ReplicaTimeouts().deaths
        3
    """

    start_s: float = 600.0
    """Seconds without any replica that is ready, before the run is given up."""
    still_s: float = 300.0
    """Seconds in which a replica with work makes no pass, before it is taken for lost."""
    deaths: int = 3
    """Losses in a row that end the run."""


_FIELD = "actor_rollout_ref.rollout.data_parallel_size"
_LOOK_S = 1.0
_WAIT_S = 0.05


@final
class ReplicaPool:
    """All replicas. The first error that one of them reports is raised, now and ever after."""

    def __init__(
        self,
        start: Callable[[int], ReplicaHandle],
        replicas: int,
        *,
        ready: Callable[[ReplicaState], None],
        lost: Callable[[ReplicaState], None],
        timeouts: ReplicaTimeouts,
    ) -> None:
        """`start` begins the process of a replica; `ready` and `lost` hear of each."""
        self._start = start
        self._ready = ready
        self._lost = lost
        self._timeouts = timeouts
        self._mailbox = EventQueue()
        self._looked = self._some_ready = self._heard = time.monotonic()
        self._published: list[PublishedVersion] = []
        self.publication = 0
        """Counts the publications; 0: replicas draw with the weights they were made with."""
        self.restarts = 0
        """Replicas that were begun again."""
        self.restart_s = 0.0
        """Seconds until those were ready."""
        self.failure: BaseException | None = None
        """The first error."""
        self.members = [ReplicaState(index) for index in range(replicas)]
        for member in self.members:
            self._begin(member)

    def call(
        self, member: ReplicaState, method: str, *arguments: Any, then: EventHandler | None = None
    ) -> None:
        """Call a method of a replica; `then` hears what it returned, in a later `receive`."""
        assert member.link is not None
        reply = None if then is None else self._mailbox.reply(member, then)
        member.link.call(method, *arguments, reply=reply)

    def receive(self, wait_s: float) -> None:
        """Handle what has arrived; where nothing has, wait so long for something."""
        if self.failure is not None:
            raise self.failure
        event = self._mailbox.next(wait_s)
        while event is not None:
            self._handle(event)
            event = self._mailbox.next(0.0)
        self._look_after()

    def wait_until(self, is_done: Callable[[], bool]) -> None:
        """Handle what arrives until something is so."""
        while not is_done():
            self.receive(_WAIT_S)

    def ask_all(self, method: str, *arguments: Any) -> dict[int, Any]:
        """Call a method of every replica that is ready; the answers of those that stay so."""
        answers: dict[int, Any] = {}
        asked = [(member, member.life) for member in self.members if member.is_ready]

        def keep(member: ReplicaState, value: Any) -> None:
            answers[member.index] = value

        for member, _ in asked:
            self.call(member, method, *arguments, then=keep)
        self.wait_until(lambda: all(m.index in answers or m.life != life for m, life in asked))
        return answers

    def begin_publication(
        self,
        version: int | None = None,
        *,
        keep: Collection[int] = (),
        holder: Callable[[], None] | None = None,
    ) -> None:
        """The parts that follow replace all weights of the replicas but the versions to keep.

        `holder` raises if whoever has the parts is lost; it is asked while replicas lack them.
        """
        self.publication += 1
        kept = [one for one in self._published if one.version is not None and one.version in keep]
        self._published = [*kept, PublishedVersion(self.publication, version, holder)]
        for member in self.members:
            member.held &= {one.number for one in kept}

    def send_part(self, part: Any) -> None:
        """Give a part of the weights to every replica; it is kept for those that begin later."""
        self._published[-1].parts.append(part)
        for member in self.members:
            if member.facts is not None:
                member.moved()
                self._load(member, self._published[-1], part)

    def send_all(self, parts: Sequence[Any], expected: Mapping[str, str]) -> None:
        """Give all parts to every replica, which is to hold these weights then (`expect`)."""
        newest = self._published[-1]
        newest.parts, newest.expected = list(parts), expected
        for member in self.members:
            if member.facts is not None:
                member.moved()
                self._give(member, newest)

    def expect(self, expected: Mapping[str, str]) -> None:
        """Every replica is to hold these weights, now that it has all parts; else a UserError.

        It draws with them only if it does.
        """
        newest = self._published[-1]
        newest.expected = expected
        for member in self.members:
            if member.facts is not None:
                self._confirm(member, newest)

    def end_publication(self, expected: Mapping[str, str]) -> None:
        """Return once every replica that can work holds the expected weights; else a UserError."""
        self.expect(expected)
        self.wait_until(lambda: self.is_published)

    @property
    def is_published(self) -> bool:
        """Whether some replica can work, and all that can hold the newest weights."""
        ready = [member for member in self.members if member.is_ready]
        return bool(ready) and all(self.publication in member.held for member in ready)

    def publication_of(self, version: int | None) -> int:
        """The number of the publication that requests of a version are drawn with."""
        numbers = [one.number for one in self._published if one.version == version]
        return numbers[-1] if numbers else self.publication

    @property
    def confirmed(self) -> float:
        """When the last replica so far confirmed the newest weights, by the monotonic clock."""
        return self._published[-1].confirmed

    def stop(self) -> None:
        """End every replica."""
        for member in self.members:
            if member.link is not None:
                member.link.kill()
            member.began(None)

    def _begin(self, member: ReplicaState) -> None:
        member.began(self._start(member.index))
        self.call(member, "facts", then=self._on_facts)

    def _on_facts(self, member: ReplicaState, facts: ReplicaFacts) -> None:
        member.facts = facts
        member.moved()
        if self.publication == 0:
            self._now_ready(member)
            return
        for publication in self._published:
            self._give(member, publication)

    def _give(self, member: ReplicaState, publication: PublishedVersion) -> None:
        """All parts that there are, and with the last one what they should make."""
        parts, expected = publication.parts, publication.expected
        if expected is not None and not parts:
            self._confirm(member, publication)
        last = parts[-1:] if expected is not None else []
        for part in parts[: len(parts) - len(last)]:
            self._load(member, publication, part)
        for part in last:
            what = *self._which(publication), part, len(parts), expected
            self.call(member, "load_last", *what, then=self._on_held)

    def _which(self, publication: PublishedVersion) -> tuple[Any, ...]:
        """Number and version of a publication, and the versions that are needed beside it."""
        keep = frozenset(one.version for one in self._published)
        return publication.number, publication.version, keep

    def _load(self, member: ReplicaState, publication: PublishedVersion, part: Any) -> None:
        self.call(member, "load", *self._which(publication), part, then=_moved)

    def _confirm(self, member: ReplicaState, publication: PublishedVersion) -> None:
        what = publication.number, publication.version, len(publication.parts)
        self.call(member, "confirm", *what, publication.expected, then=self._on_held)

    def _on_held(self, member: ReplicaState, held: ReplicaWeights) -> None:
        member.moved()
        meant = next((one for one in self._published if one.number == held.version), None)
        if meant is None:
            return
        assert meant.expected is not None, "nobody was asked yet"
        wanted = Fingerprint(weights=meant.expected)
        difference = Fingerprint(weights=held.digests).first_difference(wanted)
        if difference is not None:
            why = f"replica {member.index} does not hold what was published: {difference}"
            fix = "look for what else writes into its weights; nothing was drawn with them"
            raise UserError("actor_rollout_ref.rollout.name", member.index, why, fix)
        member.held.add(held.version)
        meant.confirmed = self._heard
        if not member.is_ready and not self._lacks(member):
            self._now_ready(member)

    def _lacks(self, member: ReplicaState) -> bool:
        """Whether a replica does not hold all weights that it should."""
        return not member.held >= {one.number for one in self._published}

    def _now_ready(self, member: ReplicaState) -> None:
        member.is_ready = True
        member.moved()
        if member.restarted is not None:
            self.restart_s += time.monotonic() - member.restarted
            member.restarted = None
        self._ready(member)

    def _handle(self, event: ReplicaEvent) -> None:
        self._heard = event.came
        if event.is_late:
            return
        with self._ever_after():
            if isinstance(event.error, ProcessDied):
                self._replace(event.member, str(event.error))
            elif event.error is not None:
                raise event.error
            else:
                event.then(event.member, event.value)

    @contextmanager
    def _ever_after(self) -> Generator[None]:
        """What is raised inside is the first error."""
        faults: list[BaseException] = []
        with boundary(faults):
            yield
        if faults:
            self.failure = faults[0]
            raise self.failure

    def _replace(self, member: ReplicaState, reason: str) -> None:
        """Begin a lost replica again, in its place."""
        member.deaths += 1
        self.restarts += 1
        if member.link is not None:
            member.link.kill()
        member.is_ready = False
        self._lost(member)
        if member.deaths >= self._timeouts.deaths:
            why = f"replica {member.index} was lost {member.deaths} times in a row: {reason}"
            fix = "look at its memory and at the node's logs; the run can be resumed"
            raise UserError(_FIELD, len(self.members), why, fix)
        member.restarted = member.restarted or time.monotonic()
        if not any(other.is_ready for other in self.members):
            self._some_ready = time.monotonic()  # nobody may have looked for a long time
        self._begin(member)

    def _look_after(self) -> None:
        """Once a second: whoever owes an answer and does not get on is taken for lost."""
        now = time.monotonic()
        if now - self._looked < _LOOK_S:
            return
        self._looked = now
        lacking = [member for member in self.members if member.facts and self._lacks(member)]
        for holder in {one.holder for one in self._published} if lacking else ():
            if holder is not None:
                with self._ever_after():
                    holder()
        for member in self.members:
            owes = member.is_asked or member in lacking
            if owes and now - member.since > self._timeouts.still_s:
                with self._ever_after():
                    still = f"it got nothing done for {self._timeouts.still_s:.0f} s"
                    self._replace(member, still)
        if any(member.is_ready for member in self.members):
            self._some_ready = now
        elif now - self._some_ready > self._timeouts.start_s:
            why = f"no replica was ready within {self._timeouts.start_s:.0f} s"
            fix = "ask `ray status` what the cluster lacks, and `ray logs` what they wait for"
            with self._ever_after():
                raise UserError(_FIELD, len(self.members), why, fix)


def _moved(member: ReplicaState, value: Any) -> None:
    del value
    member.moved()
