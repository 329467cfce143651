"""Replicas in this process, whose engines say what a script says, and which die on demand."""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from luyen.rollout.protocol import Completion, Request
from luyen.runtime.ray.messages import (
    PollResult,
    ProcessDied,
    ReplicaFacts,
    ReplicaWeights,
    ReplyCallback,
)


def drawn(request: Request, sample: int) -> Completion:
    """What any replica draws for a key: it depends on nothing else."""
    tokens = tuple((request.keys[sample] + i) % 97 for i in range(3))
    logps = tuple(-0.5 * token for token in tokens)
    return Completion(
        request=request.id, sample=sample, tokens=tokens, logps=logps, reason="length"
    )


class FakeReplica:
    """Finishes answers when told to; every call is answered at once, or when there is news."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.calls: list[tuple[Any, ...]] = []
        self.open: deque[tuple[Request, int]] = deque()
        self.finished: list[Completion] = []
        self.waiting: ReplyCallback | None = None
        self.is_dead = False
        self.passes = 0
        self.digests: dict[str, str] | None = {"w": "float32 [1] 00"}
        self.failure: Exception | None = None
        self.confirmed = {0}
        self.gated: list[tuple[int, Sequence[Request], int]] = []
        self.unanswered: set[str] = set()
        self.gpu = ""

    def call(self, method: str, *arguments: Any, reply: ReplyCallback | None = None) -> None:
        self.calls.append((method, *arguments))
        if self.is_dead:
            if reply is not None:
                reply(None, ProcessDied("it was killed"))
        elif method in self.unanswered:
            pass
        elif method == "collect":
            assert self.waiting is None, "two polls at once"
            self.waiting = reply
            self.tell()
        else:
            value = getattr(self, f"on_{method}")(*arguments)
            if reply is not None:
                reply(value, None)

    def kill(self) -> None:
        self.is_dead = True

    def die(self) -> None:
        """As when its process ends: whoever waits hears of it."""
        self.is_dead = True
        waiting, self.waiting = self.waiting, None
        if waiting is not None:
            waiting(None, ProcessDied("it was killed"))

    def finish(self, count: int = 1) -> None:
        """Draw some answers to their end."""
        self.passes += 1
        for _ in range(min(count, len(self.open))):
            self.finished.append(drawn(*self.open.popleft()))
        self.tell()

    def tell(self) -> None:
        """Answer the poll, if there is something to say."""
        if self.waiting is not None and (self.finished or self.failure):
            waiting, self.waiting = self.waiting, None
            waiting(self.news(), None)

    def news(self) -> PollResult:
        done, self.finished = self.finished, []
        return PollResult(completions=tuple(done), end=0, passes=self.passes, failure=self.failure)

    def on_facts(self, probe: Any = None) -> ReplicaFacts:
        return ReplicaFacts(
            pid=self.index,
            node="here",
            is_batch_invariant=True,
            reads_ranks=probe is not None and probe.weights.gpu == self.gpu,
        )

    def on_submit(self, number: int, requests: Sequence[Request], publication: int) -> None:
        if publication not in self.confirmed:
            self.gated.append((number, requests, publication))
            return
        self.open += [(request, i) for request in requests for i in range(len(request.keys))]

    def on_abort(self, number: int, request: str, sample: int | None, after: int) -> PollResult:
        meant = [(r, i) for r, i in self.open if r.id == request and sample in (None, i)]
        self.open = deque(pair for pair in self.open if pair not in meant)
        done = [
            Completion(request=r.id, sample=i, tokens=(1,), logps=(0.0,), reason="aborted")
            for r, i in meant
        ]
        return PollResult(completions=(*self.news().completions, *done), end=0, passes=self.passes)

    def on_load(self, publication: int, version: int | None, keep: Any, part: Any) -> None:
        self.digests = dict(part)

    def on_confirm(
        self, publication: int, version: int | None, parts: int, expected: Any
    ) -> ReplicaWeights:
        held = self.digests or {}
        if held == expected:
            self.confirmed.add(publication)
            gated, self.gated = self.gated, []
            for what in gated:
                self.on_submit(*what)
        return ReplicaWeights(version=publication, digests=held)

    def on_load_last(
        self, publication: int, version: int | None, keep: Any, part: Any, *rest: Any
    ) -> ReplicaWeights:
        self.on_load(publication, version, keep, part)
        return self.on_confirm(publication, version, *rest)

    def on_fingerprint(self) -> dict[str, str] | None:
        return self.digests

    def on_rest(self) -> None:
        self.open.clear()


class Fleet:
    """Starts fake replicas and remembers all of them, the lost ones too."""

    def __init__(self, change: Callable[[FakeReplica], None] = lambda _: None) -> None:
        self.begun: list[FakeReplica] = []
        self._change = change

    def __call__(self, index: int) -> FakeReplica:
        replica = FakeReplica(index)
        self._change(replica)
        self.begun.append(replica)
        return replica

    def living(self) -> list[FakeReplica]:
        return [replica for replica in self.begun if not replica.is_dead]
