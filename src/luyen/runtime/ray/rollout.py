"""The rollout role over replicas, in turn with training."""

from collections.abc import Callable, Collection, Sequence
from typing import final

from luyen.rollout.protocol import Sampling
from luyen.rollout.single_turn import Group, PromptRequest
from luyen.runtime.futures import LazyRollouts, Publication, ReadyRollouts, RolloutFuture
from luyen.runtime.generation import Generation
from luyen.runtime.ray.engines import RayEngines
from luyen.runtime.weight_sync import WeightSync
from luyen.telemetry.journal import WorkJournal


@final
class ReplicaRollout:
    """Replicas that generate what is submitted at once, or as soon as they have the weights.

    There is at most one generation in progress: one that is submitted meanwhile starts when its
    result is read.
    """

    generates_remotely = True
    alternates = True

    def __init__(
        self,
        engines: RayEngines,
        generation: Generation,
        weight_sync: WeightSync,
        *,
        frees_cache: bool,
    ) -> None:
        """`frees_cache` frees the replicas' KV cache after each generation."""
        self.engines = engines
        self._generation = generation
        self._weight_sync = weight_sync
        self._frees_cache = frees_cache
        self._in_flight: RolloutFuture = ReadyRollouts([])
        """The generation that replicas are working on."""

    def submit(
        self,
        requests: Sequence[PromptRequest],
        sampling: Sampling,
        *,
        purpose: str,
        version: int,
        journal: WorkJournal | None = None,
    ) -> RolloutFuture:
        """Submit requests."""

        def begin() -> Callable[[], list[Group]]:
            self._weight_sync.demand(version)
            return self._generation.begin(
                self.engines, requests, sampling, purpose=purpose, version=version, journal=journal
            )

        def generate() -> list[Group]:
            self._in_flight.result()  # completions do not tell which generation they belong to
            return self._finish(begin())

        if not self._in_flight.done():
            return LazyRollouts(generate)
        answers = begin()
        self.engines.send()
        self._in_flight = LazyRollouts(lambda: self._finish(answers))
        return self._in_flight

    def publish(self, version: int) -> Publication:
        """Send the weights; a replica generates with them once it has confirmed their digests."""
        assert self.engines.is_idle, "weights would change in the middle of an answer"
        return self._weight_sync.begin(version)

    def keep_weights(self, versions: Collection[int]) -> None:
        """Replicas have one version of the weights."""

    def forget(self) -> None:
        """The weight sync knows which version the replicas have."""

    def close(self) -> None:
        """Forget all pending requests."""
        self.engines.drop()

    def _finish(self, answers: Callable[[], list[Group]]) -> list[Group]:
        groups = answers()
        if self._frees_cache:
            self.engines.close()
        return groups
