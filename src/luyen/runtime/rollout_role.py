"""The rollout role: it generates with published weights, in turn with training or beside it.

`SharedRollout` is an engine over the actor's own weights,
`luyen.runtime.ray.rollout.ReplicaRollout` one over replicas; both alternate with training.
`luyen.runtime.generation.AsyncGeneration` generates while the workers train.
"""

from collections.abc import Collection, Sequence
from typing import Protocol, final

from luyen.base.errors import UserError
from luyen.models.policy import Policy
from luyen.models.trained_weights import Fingerprint
from luyen.rollout.protocol import RolloutEngine, Sampling
from luyen.rollout.single_turn import Group, PromptRequest
from luyen.runtime.futures import LazyRollouts, Publication, RolloutFuture, SharedWeights
from luyen.runtime.generation import Generation
from luyen.telemetry.journal import WorkJournal

_FIELD = "actor_rollout_ref.rollout.name"


class RolloutRole(Protocol):
    """Generates rollouts with the weights that were published."""

    @property
    def generates_remotely(self) -> bool:
        """Whether submitted requests are generated while the caller continues."""
        ...

    @property
    def alternates(self) -> bool:
        """Whether generation waits for the next weights, and training for the rollouts."""
        ...

    def submit(
        self,
        requests: Sequence[PromptRequest],
        sampling: Sampling,
        *,
        purpose: str,
        version: int,
        journal: WorkJournal | None = None,
    ) -> RolloutFuture:
        """Submit requests, which are generated with exactly this version of the weights."""
        ...

    def publish(self, version: int) -> Publication:
        """Load the actor's weights into the engine, as this version."""
        ...

    def keep_weights(self, versions: Collection[int]) -> None:
        """Only these versions will be submitted again, besides those published later."""
        ...

    def forget(self) -> None:
        """Drop every version: the actor has got other weights."""
        ...

    def close(self) -> None:
        """End generation."""
        ...


@final
class SharedRollout:
    """An engine in this process that samples with the actor's own weights.

    Requests are generated when their result is read.
    """

    generates_remotely = False
    alternates = True

    def __init__(
        self, engine: RolloutEngine, generation: Generation, actor: Policy, *, frees_cache: bool
    ) -> None:
        """`frees_cache` frees the engine's KV cache after each generation."""
        self.engine = engine
        self._generation = generation
        self._actor = actor
        self._frees_cache = frees_cache
        self.weight_checks = 0
        """Generations before which the engine's weights were compared with the actor's."""

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
        return LazyRollouts(lambda: self.generate(requests, sampling, purpose, version, journal))

    def generate(
        self,
        requests: Sequence[PromptRequest],
        sampling: Sampling,
        purpose: str,
        version: int,
        journal: WorkJournal | None,
    ) -> list[Group]:
        """Generate now; a UserError if the engine's weights are not the actor's."""
        self._refuse_other_weights(version)
        groups = self._generation.play(
            self.engine, requests, sampling, purpose=purpose, version=version, journal=journal
        )
        if self._frees_cache:
            self.engine.close()
        return groups

    def publish(self, version: int) -> Publication:
        """Nothing is sent: the engine has the actor's weights."""
        del version
        return SharedWeights()

    def keep_weights(self, versions: Collection[int]) -> None:
        """There is one version of the weights."""

    def forget(self) -> None:
        """The engine has the actor's weights, whichever they are."""

    def close(self) -> None:
        """Nothing runs between two calls."""

    def _refuse_other_weights(self, version: int) -> None:
        fingerprint = self.engine.fingerprint()
        if fingerprint is None:
            return
        self.weight_checks += 1
        difference = fingerprint.first_difference(Fingerprint.of(self._actor))
        if difference is not None:
            raise UserError(
                _FIELD,
                type(self.engine).__name__,
                f"it does not have version {version} of the weights: {difference}",
                "copy every trained parameter to the engine after each update, adapters too",
            )
