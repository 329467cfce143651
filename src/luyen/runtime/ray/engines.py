"""Many replicas as one rollout engine: requests are routed, completions come back as ready.

A response depends on its prompt, its key and the weights alone, so it is the same on every replica,
and the same when it is generated again after a replica was lost.
"""

import heapq
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import final

from luyen.base.errors import UserError
from luyen.config.schema.trainer import TimeoutsConfig
from luyen.models.weights import Fingerprint
from luyen.rollout.protocol import Completion, Request
from luyen.runtime.ray.messages import PendingRequest, PollResult, ReplicaHandle, ReplicaState
from luyen.runtime.ray.replica import Replica
from luyen.runtime.ray.replica_pool import MAX_FAILURES, ReplicaPool

# Routing.

_BLOCK = 32
"""Tokens of a prefix block; shorter prefixes are not remembered."""
_REMEMBERED = 1 << 16
"""Prefixes whose replica is remembered."""
_SLACK = 8
"""Responses that the replica of a prefix may have pending above the least loaded one."""


@final
class Router:
    """Chooses the replica of a request: the one that has cached its prefix, if not overloaded.

    With more than `_SLACK` pending responses above the least loaded replica, the latter is chosen.
    A choice costs the logarithm of the number of replicas.

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
        self._prefix_replicas: OrderedDict[int, int] = OrderedDict()

    def open(self, replica: int) -> None:
        """Route requests to this replica from now on; it has none pending."""
        self._loads[replica] = 0
        heapq.heappush(self._heap, (0, replica))

    def close(self, replica: int) -> None:
        """Route no more requests to this replica, and forget its load."""
        self._loads.pop(replica, None)

    def add(self, replica: int, answers: int) -> None:
        """Change the number of a replica's pending responses."""
        if replica not in self._loads:
            return
        self._loads[replica] += answers
        heapq.heappush(self._heap, (self._loads[replica], replica))
        if len(self._heap) > 64 + 4 * len(self._loads):
            self._heap = [(load, name) for name, load in self._loads.items()]
            heapq.heapify(self._heap)

    def choose(self, tokens: Sequence[int]) -> int | None:
        """The replica for a prompt, which is then remembered; None: no replica is open."""
        least_loaded = self._least_loaded()
        if least_loaded is None:
            return None
        blocks = _prefix_hashes(tokens)
        cached = next(
            (self._prefix_replicas[b] for b in reversed(blocks) if b in self._prefix_replicas), None
        )
        is_fit = cached in self._loads and self._loads[cached] <= self._loads[least_loaded] + _SLACK
        chosen = cached if cached is not None and is_fit else least_loaded
        if blocks:
            self._remember(blocks[-1], chosen)
        return chosen

    def _least_loaded(self) -> int | None:
        """The least loaded replica, the lowest index among equals; drops stale heap entries."""
        while self._heap:
            load, replica = self._heap[0]
            if self._loads.get(replica) == load:
                return replica
            heapq.heappop(self._heap)
        return None

    def _remember(self, block: int, replica: int) -> None:
        self._prefix_replicas[block] = replica
        self._prefix_replicas.move_to_end(block)
        if len(self._prefix_replicas) > _REMEMBERED:
            self._prefix_replicas.popitem(last=False)


def _prefix_hashes(tokens: Sequence[int]) -> list[int]:
    """A hash of every prefix of whole blocks: equal prefixes have equal hashes."""
    found: list[int] = []
    last = 0
    for start in range(0, len(tokens) - _BLOCK + 1, _BLOCK):
        last = hash((last, tuple(tokens[start : start + _BLOCK])))
        found.append(last)
    return found


_ADVANCE_WAIT_S = 0.003
"""Seconds that `advance` waits for a completion; it blocks the controller's thread."""
_MAX_COMPLETIONS = 32
"""Most completions of one `advance`: conversations can submit their next turns in between."""
_LONG_POLL_S = 1.0


@final
class RayEngines:
    """A rollout engine over replicas. After the first reported error, every call raises it."""

    def __init__(
        self,
        start: Callable[[int], ReplicaHandle],
        *,
        replicas: int,
        timeouts: TimeoutsConfig | None = None,
    ) -> None:
        """`start` starts the process of a replica (`luyen.runtime.ray.actors.start_engines`).

        Returns when all of them are ready.
        """
        assert replicas >= 1, "a rollout engine needs a replica"
        self._router = Router()
        self._pending: dict[str, PendingRequest] = {}
        self._unassigned: list[PendingRequest] = []
        self._unsent: set[int] = set()
        self._finished: list[Completion] = []
        self.resubmitted = 0
        """Responses that were requested again because a replica was lost."""
        self.replica_pool = ReplicaPool(
            start,
            replicas,
            ready=self._on_ready,
            lost=self._on_lost,
            timeouts=timeouts or TimeoutsConfig(),
        )
        """The processes of the replicas."""
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
        return not self._pending and not self._finished

    @property
    def is_batch_invariant(self) -> bool:
        """Whether a response does not depend on the other requests of the batch."""
        known = [member.facts for member in self.replica_pool.members if member.facts is not None]
        return all(facts.is_batch_invariant for facts in known)

    def submit(self, request: Request) -> None:
        """Queue a request; one that can never be served makes `advance` raise a UserError."""
        assert request.id not in self._pending, f"request {request.id} was submitted already"
        pending = PendingRequest(request)
        self._pending[request.id] = pending
        self._assign(pending)

    def advance(self) -> list[Completion]:
        """Finished completions; waits a few milliseconds if there are none."""
        self.send()
        self.replica_pool.receive(0.0 if self._finished or not self._pending else _ADVANCE_WAIT_S)
        found, self._finished = self._finished[:_MAX_COMPLETIONS], self._finished[_MAX_COMPLETIONS:]
        return found

    def abort(self, request: str, sample: int | None = None) -> list[Completion]:
        """Stop a request or one sample of it; returns its completions not returned before."""

        def is_meant(answer: Completion) -> bool:
            return answer.request == request and sample in (None, answer.sample)

        given = [answer for answer in self._finished if is_meant(answer)]
        self._finished = [answer for answer in self._finished if not is_meant(answer)]
        pending = self._pending.get(request)
        if pending is None:
            return given
        wanted_samples = sorted(pending.left) if sample is None else [sample]
        wanted_samples = [index for index in wanted_samples if index in pending.left]
        partial = self._stop_remotely(pending, wanted_samples, sample) if wanted_samples else {}
        return given + [partial.get(index) or pending.stopped(index) for index in wanted_samples]

    def fingerprint(self) -> Fingerprint | None:
        """The weights that all replicas sample with; a UserError if they differ."""
        answers = self.replica_pool.call_all(Replica.fingerprint)
        known = {index: found for index, found in answers.items() if found is not None}
        if len(known) < len(answers):
            return None
        prints = {index: Fingerprint(weights=digests) for index, digests in known.items()}
        (first, expected), *rest = prints.items()
        for index, found in rest:
            difference = found.first_difference(expected)
            if difference is not None:
                why = f"replicas {first} and {index} hold different weights: {difference}"
                fix = "publish the weights to all of them"
                raise UserError("actor_rollout_ref.rollout.name", index, why, fix)
        return expected

    def close(self) -> None:
        """Drop pending requests and free the engines' caches; the replicas stay alive."""
        self.drop()
        if self.replica_pool.failure is None:
            self.replica_pool.call_all(Replica.rest)

    def drop(self) -> None:
        """Forget all pending requests, without a message to the replicas."""
        for pending in list(self._pending.values()):
            self._forget(pending)
        self._finished = []

    def stop(self) -> None:
        """End the processes of all replicas."""
        self.replica_pool.stop()

    def _assign(self, pending: PendingRequest) -> None:
        """Queue a request for a replica; without a ready replica it waits in `_unassigned`."""
        chosen = self._router.choose(pending.request.tokens)
        if chosen is None:
            pending.at = None
            self._unassigned.append(pending)
            return
        member = self.replica_pool.members[chosen]
        pending.at = chosen
        member.requests[pending.request.id] = pending
        member.queued.append(pending.request)
        self._router.add(chosen, len(pending.left))
        self._unsent.add(chosen)

    def send(self) -> None:
        """Send queued requests, one message per replica, and poll the replicas that have work."""
        for index in sorted(self._unsent):
            member = self.replica_pool.members[index]
            if member.queued:
                member.mark_progress()
                versions = {request.weights for request in member.queued}
                weights = max(self.replica_pool.publication_of(version) for version in versions)
                number, queued = member.next_number(), tuple(member.queued)
                self.replica_pool.call(member, Replica.submit, number, queued, weights)
                member.queued = []
            self._poll(member)
        self._unsent.clear()

    def _poll(self, member: ReplicaState) -> None:
        if member.requests and not member.is_polling and member.is_ready:
            member.is_polling = True
            self.replica_pool.call(
                member, Replica.collect, member.received, _LONG_POLL_S, then=self._on_poll_result
            )

    def _on_poll_result(self, member: ReplicaState, result: PollResult) -> None:
        member.is_polling = False
        self._record(member, result)
        if result.failure is not None:
            raise result.failure
        self._poll(member)

    def _record(self, member: ReplicaState, result: PollResult) -> None:
        """Record new completions; those that were stopped or received before are ignored."""
        member.received = max(member.received, result.end)
        if result.passes != member.passes:
            member.passes = result.passes
            member.mark_progress()
        for completion in result.completions:
            pending = member.requests.get(completion.request)
            if pending is None:
                continue
            named = pending.named(completion)
            if named.sample in pending.left:
                self._close_sample(pending, named.sample)
                self._finished.append(named)
                member.failures = 0

    def _close_sample(self, pending: PendingRequest, sample: int) -> None:
        pending.left.discard(sample)
        if pending.at is not None:
            self._router.add(pending.at, -1)
        if not pending.left:
            self._forget(pending)

    def _forget(self, pending: PendingRequest) -> None:
        self._pending.pop(pending.request.id, None)
        if pending.at is None:
            self._unassigned = [one for one in self._unassigned if one is not pending]
            return
        member = self.replica_pool.members[pending.at]
        member.requests.pop(pending.request.id, None)
        member.queued = [request for request in member.queued if request is not pending.request]
        self._router.add(pending.at, -len(pending.left))

    def _stop_remotely(
        self, pending: PendingRequest, wanted_samples: list[int], sample: int | None
    ) -> dict[int, Completion]:
        """Stop samples on their replica, and wait for their partial completions."""
        is_broken = self.replica_pool.failure is not None
        if not is_broken:
            self.send()
        at = None if pending.at is None else self.replica_pool.members[pending.at]
        incarnation = None if at is None else at.incarnation
        there = None if sample is None else pending.samples.index(sample)
        for index in wanted_samples:
            self._close_sample(pending, index)
        if at is None or not at.is_ready or is_broken:
            return {}
        partial: dict[int, Completion] = {}
        replies: list[PollResult] = []

        def keep(member: ReplicaState, result: PollResult) -> None:
            replies.append(result)
            for completion in result.completions:
                if completion.request == pending.request.id:
                    named = pending.named(completion)
                    partial.setdefault(named.sample, named)
            self._record(member, result)

        name, number = pending.request.id, at.next_number()
        self.replica_pool.call(at, Replica.abort, number, name, there, at.received, then=keep)
        self.replica_pool.wait_until(lambda: bool(replies) or at.incarnation != incarnation)
        return partial

    def _on_ready(self, member: ReplicaState) -> None:
        """Route requests to a replica that became ready, the unassigned ones first."""
        self._router.open(member.index)
        waiting, self._unassigned = self._unassigned, []
        for pending in waiting:
            self._assign(pending)
        self._unsent.add(member.index)

    def _on_lost(self, member: ReplicaState) -> None:
        """Assign the unfinished requests of a lost replica to the remaining ones."""
        self._router.close(member.index)
        unfinished = list(member.requests.values())
        member.requests, member.queued = {}, []
        for pending in unfinished:
            number = self.replica_pool.publication_of(pending.request.weights)
            # A request that was still waiting for weights did not cause the loss.
            pending.failures += number == 0 or number in member.confirmed
            if pending.failures >= MAX_FAILURES:
                why = f"{pending.failures} replicas were lost in succession while generating it"
                fix = "check the memory that a prompt of its length takes"
                raise UserError(
                    f"request {pending.request.id}", len(pending.request.tokens), why, fix
                )
            pending.again()
            self.resubmitted += len(pending.left)
            self._assign(pending)
