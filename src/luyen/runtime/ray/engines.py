"""Many replicas as one rollout engine: requests are routed, completions come back as ready.

An answer depends on its prompt, its key and the weights alone, so it is the same whichever replica
draws it, and the same when it is drawn again after a replica was lost.
"""

import heapq
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import final

from luyen.base.errors import UserError
from luyen.models.trained_weights import Fingerprint
from luyen.rollout.protocol import Completion, Request
from luyen.runtime.ray.messages import PendingRequest, PollResult, ReplicaHandle, ReplicaState
from luyen.runtime.ray.replica_pool import ReplicaPool, ReplicaTimeouts

# Who gets the next request: whoever knows its beginning, unless others have much less to do.
#
# The cost of a choice does not grow with the number of replicas, but for the depth of a heap.

_BLOCK = 32
"""Tokens of a block; what is shorter is not worth remembering."""
_REMEMBERED = 1 << 16
"""Conversations whose replica is remembered."""
_SLACK = 8
"""Answers by which a known replica may be ahead of the idlest one."""


@final
class Router:
    """Loads of the replicas, and where conversations were held before.

    Example:
        >>> router = Router()
        >>> router.open(0), router.open(1)
        (None, None)
        >>> first = router.choose((1,) * 40)
        >>> router.add(first, 4)
        >>> first, router.choose((2,) * 40), router.choose((1,) * 80)
        (0, 1, 0)
    """

    def __init__(self) -> None:
        self._loads: dict[int, int] = {}
        self._heap: list[tuple[int, int]] = []
        self._homes: OrderedDict[int, int] = OrderedDict()

    def open(self, replica: int) -> None:
        """A replica takes requests from now on; it has none."""
        self._loads[replica] = 0
        heapq.heappush(self._heap, (0, replica))

    def shut(self, replica: int) -> None:
        """A replica takes no requests any more; what it had is not counted."""
        self._loads.pop(replica, None)

    def add(self, replica: int, answers: int) -> None:
        """A replica has so many answers more to draw, or fewer."""
        if replica not in self._loads:
            return
        self._loads[replica] += answers
        heapq.heappush(self._heap, (self._loads[replica], replica))
        if len(self._heap) > 64 + 4 * len(self._loads):
            self._heap = [(load, name) for name, load in self._loads.items()]
            heapq.heapify(self._heap)

    def choose(self, tokens: Sequence[int]) -> int | None:
        """The replica for a prompt, which is then remembered; None: no replica is open."""
        idlest = self._idlest()
        if idlest is None:
            return None
        blocks = _chain(tokens)
        home = next((self._homes[b] for b in reversed(blocks) if b in self._homes), None)
        is_fit = home in self._loads and self._loads[home] <= self._loads[idlest] + _SLACK
        chosen = home if home is not None and is_fit else idlest
        if blocks:
            self._remember(blocks[-1], chosen)
        return chosen

    def _idlest(self) -> int | None:
        """The least loaded replica, the first among equals; entries that are out of date go."""
        while self._heap:
            load, replica = self._heap[0]
            if self._loads.get(replica) == load:
                return replica
            heapq.heappop(self._heap)
        return None

    def _remember(self, block: int, replica: int) -> None:
        self._homes[block] = replica
        self._homes.move_to_end(block)
        if len(self._homes) > _REMEMBERED:
            self._homes.popitem(last=False)


def _chain(tokens: Sequence[int]) -> list[int]:
    """A hash for each beginning of whole blocks: equal beginnings have equal hashes."""
    found: list[int] = []
    last = 0
    for start in range(0, len(tokens) - _BLOCK + 1, _BLOCK):
        last = hash((last, tuple(tokens[start : start + _BLOCK])))
        found.append(last)
    return found


_PAUSE_S = 0.003
"""How long a pass waits for an answer: whoever shares the controller's thread waits as long."""
_AT_ONCE = 32
"""Answers of a pass: those who go on with them ask replicas again before the next ones do."""
_LONG_POLL_S = 1.0
_PATIENCE = ReplicaTimeouts()


@final
class RayEngines:
    """A rollout engine over replicas. The first error of any of them is raised by every call."""

    def __init__(
        self,
        start: Callable[[int], ReplicaHandle],
        *,
        replicas: int,
        timeouts: ReplicaTimeouts = _PATIENCE,
    ) -> None:
        """`start` begins the process of a replica (`luyen.runtime.ray.actors.start_engines`).

        Returns when all of them are ready.
        """
        assert replicas >= 1, "no replica, no answer"
        self._timeouts = timeouts
        self._router = Router()
        self._asked: dict[str, PendingRequest] = {}
        self._homeless: list[PendingRequest] = []
        self._unsent: set[int] = set()
        self._finished: list[Completion] = []
        self.resubmitted = 0
        """Answers that were asked for again because a replica was lost."""
        self.replica_pool = ReplicaPool(
            start, replicas, ready=self._welcome, lost=self._take_back, timeouts=timeouts
        )
        """The replicas themselves."""
        try:
            self.replica_pool.wait_until(
                lambda: all(member.is_ready for member in self.replica_pool.members)
            )
        finally:
            if self.replica_pool.failure is not None:
                self.replica_pool.stop()

    @property
    def is_idle(self) -> bool:
        """Whether nothing is queued or running."""
        return not self._asked and not self._finished

    @property
    def is_batch_invariant(self) -> bool:
        """Whether an answer does not depend on what else is drawn at the same time."""
        known = [member.facts for member in self.replica_pool.members if member.facts is not None]
        return all(facts.is_batch_invariant for facts in known)

    def submit(self, request: Request) -> None:
        """Queue a request; one that can never be served makes `advance` raise a UserError."""
        assert request.id not in self._asked, f"request {request.id} is there already"
        asked = PendingRequest(request)
        self._asked[request.id] = asked
        self._deal(asked)

    def advance(self) -> list[Completion]:
        """What was finished; where nothing was, it waits a few milliseconds."""
        self.send()
        self.replica_pool.receive(0.0 if self._finished or not self._asked else _PAUSE_S)
        found, self._finished = self._finished[:_AT_ONCE], self._finished[_AT_ONCE:]
        return found

    def abort(self, request: str, sample: int | None = None) -> list[Completion]:
        """Stop a request or one sample of it; what there is of answers that were not given yet."""

        def is_meant(answer: Completion) -> bool:
            return answer.request == request and sample in (None, answer.sample)

        given = [answer for answer in self._finished if is_meant(answer)]
        self._finished = [answer for answer in self._finished if not is_meant(answer)]
        asked = self._asked.get(request)
        if asked is None:
            return given
        meant = sorted(asked.left) if sample is None else [sample]
        meant = [index for index in meant if index in asked.left]
        said = self._stop_remotely(asked, meant, sample) if meant else {}
        return given + [said.get(index) or asked.stopped(index) for index in meant]

    def fingerprint(self) -> Fingerprint | None:
        """The weights that all replicas draw with; a UserError where they differ."""
        held = self.replica_pool.ask_all("fingerprint")
        if any(digests is None for digests in held.values()):
            return None
        prints = {index: Fingerprint(weights=digests) for index, digests in held.items()}
        (first, wanted), *others = prints.items()
        for index, other in others:
            difference = other.first_difference(wanted)
            if difference is not None:
                why = f"replicas {first} and {index} hold other weights: {difference}"
                fix = "publish the weights to all of them"
                raise UserError("actor_rollout_ref.rollout.name", index, why, fix)
        return wanted

    def close(self) -> None:
        """Free what the engines hold; what they were drawing is dropped, and they stay."""
        self.drop()
        if self.replica_pool.failure is None:
            self.replica_pool.ask_all("rest")

    def drop(self) -> None:
        """Nobody waits for anything any more; replicas hear nothing of it."""
        for asked in list(self._asked.values()):
            self._forget(asked)
        self._finished = []

    def stop(self) -> None:
        """End the processes of all replicas; nothing can be drawn any more."""
        self.replica_pool.stop()

    def _deal(self, asked: PendingRequest) -> None:
        """Give a request to the replica that fits; nobody being there, it waits."""
        chosen = self._router.choose(asked.request.tokens)
        if chosen is None:
            asked.at = None
            self._homeless.append(asked)
            return
        member = self.replica_pool.members[chosen]
        asked.at = chosen
        member.requests[asked.request.id] = asked
        member.queued.append(asked.request)
        self._router.add(chosen, len(asked.left))
        self._unsent.add(chosen)

    def send(self) -> None:
        """All that was queued, one message for each replica, and ask those that have work."""
        for index in sorted(self._unsent):
            member = self.replica_pool.members[index]
            if member.queued:
                member.moved()
                versions = {request.weights for request in member.queued}
                weights = max(self.replica_pool.publication_of(version) for version in versions)
                number, queued = member.next_number(), tuple(member.queued)
                self.replica_pool.call(member, "submit", number, queued, weights)
                member.queued = []
            self._ask_for_news(member)
        self._unsent.clear()

    def _ask_for_news(self, member: ReplicaState) -> None:
        if member.requests and not member.is_asked and member.is_ready:
            member.is_asked = True
            self.replica_pool.call(
                member, "collect", member.after, _LONG_POLL_S, then=self._on_news
            )

    def _on_news(self, member: ReplicaState, news: PollResult) -> None:
        member.is_asked = False
        self._hear(member, news)
        if news.failure is not None:
            raise news.failure
        self._ask_for_news(member)

    def _hear(self, member: ReplicaState, news: PollResult) -> None:
        """Take in what is new; what was stopped or came already is passed over."""
        member.after = max(member.after, news.end)
        if news.passes != member.passes:
            member.passes = news.passes
            member.moved()
        for completion in news.completions:
            asked = member.requests.get(completion.request)
            if asked is None:
                continue
            named = asked.named(completion)
            if named.sample in asked.left:
                self._close_sample(asked, named.sample)
                self._finished.append(named)
                member.deaths = 0

    def _close_sample(self, asked: PendingRequest, sample: int) -> None:
        asked.left.discard(sample)
        if asked.at is not None:
            self._router.add(asked.at, -1)
        if not asked.left:
            self._forget(asked)

    def _forget(self, asked: PendingRequest) -> None:
        self._asked.pop(asked.request.id, None)
        if asked.at is None:
            self._homeless = [other for other in self._homeless if other is not asked]
            return
        member = self.replica_pool.members[asked.at]
        member.requests.pop(asked.request.id, None)
        member.queued = [request for request in member.queued if request is not asked.request]
        self._router.add(asked.at, -len(asked.left))

    def _stop_remotely(
        self, asked: PendingRequest, meant: list[int], sample: int | None
    ) -> dict[int, Completion]:
        """Stop answers where they are drawn, and wait for what there is of them."""
        is_broken = self.replica_pool.failure is not None
        if not is_broken:
            self.send()
        at = None if asked.at is None else self.replica_pool.members[asked.at]
        life = None if at is None else at.life
        there = None if sample is None else asked.samples.index(sample)
        for index in meant:
            self._close_sample(asked, index)
        if at is None or not at.is_ready or is_broken:
            return {}
        said: dict[int, Completion] = {}
        replies: list[PollResult] = []

        def keep(member: ReplicaState, news: PollResult) -> None:
            replies.append(news)
            for completion in news.completions:
                if completion.request == asked.request.id:
                    named = asked.named(completion)
                    said.setdefault(named.sample, named)
            self._hear(member, news)

        name, number = asked.request.id, at.next_number()
        self.replica_pool.call(at, "abort", number, name, there, at.after, then=keep)
        self.replica_pool.wait_until(lambda: bool(replies) or at.life != life)
        return said

    def _welcome(self, member: ReplicaState) -> None:
        """A replica is ready: it takes requests, first those that nobody has."""
        self._router.open(member.index)
        waiting, self._homeless = self._homeless, []
        for asked in waiting:
            self._deal(asked)
        self._unsent.add(member.index)

    def _take_back(self, member: ReplicaState) -> None:
        """A replica is lost: others draw what it had not finished."""
        self._router.shut(member.index)
        orphans = list(member.requests.values())
        member.requests, member.queued = {}, []
        for asked in orphans:
            number = self.replica_pool.publication_of(asked.request.weights)
            # What waited for weights has killed nobody: many may be lost while nobody looks.
            asked.deaths += number == 0 or number in member.held
            if asked.deaths >= self._timeouts.deaths:
                why = f"{asked.deaths} replicas were lost, one after the other, while they drew it"
                fix = "look at the memory that a prompt of its length takes"
                raise UserError(f"request {asked.request.id}", len(asked.request.tokens), why, fix)
            asked.again()
            self.resubmitted += len(asked.left)
            self._deal(asked)
