"""The roles of a run in this process: one worker, and engines on the same device."""

import os
import pickle
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, final

import torch

from luyen.base.errors import UserError
from luyen.checkpoint.writer import CheckpointWriter
from luyen.engine.sharded_state import merge_sums
from luyen.models.device_lock import CALLS
from luyen.models.policy import Policy
from luyen.models.weights import Fingerprint, trained_parameters
from luyen.rollout.engines import VersionedEngines
from luyen.rollout.protocol import RemoteEngine, RolloutEngine, Sampling, drop_prefixes
from luyen.rollout.single_turn import Group, PromptRequest
from luyen.runtime.generation import (
    AsyncGeneration,
    Generation,
    LazyRollouts,
    RolloutFuture,
)
from luyen.runtime.gpu_memory import MappedWeights
from luyen.runtime.roles import Publication, RoleMicroBatching, Roles, RolloutRole
from luyen.runtime.weight_sync import WeightSync
from luyen.runtime.weights import (
    GatheredWeights,
    Gathering,
    WeightForm,
    digests_of,
    finish_weights,
    free_memory,
    load_weights,
    total_bytes,
)
from luyen.runtime.worker import R, Results, TrainWorker, W, WorkerGroup
from luyen.telemetry.journal import WorkJournal

STRICT_VARIABLE = "LUYEN_STRICT"
"""Environment variable: at 1, the messages of a run in one process are pickled."""
_FIELD = "actor_rollout_ref.rollout.name"


def is_strict() -> bool:
    """Whether strict mode is on, by `STRICT_VARIABLE`."""
    return os.environ.get(STRICT_VARIABLE) == "1"


def pickle_roundtrip(value: R) -> R:
    """The value as another process would receive it; a TypeError if it cannot be pickled.

    Example:
        >>> given = {"logp": torch.ones(2)}
        >>> arrived = pickle_roundtrip(given)
        >>> arrived["logp"].tolist(), arrived["logp"] is given["logp"]
        ([1.0, 1.0], False)
    """
    return pickle.loads(pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL))


@final
class LocalWorkers(WorkerGroup[W]):
    """The one worker of a run in this process. A call is complete when it returns.

    In strict mode the messages of a call are pickled, so that caller and worker share no object.
    It finds batches that cannot be sent, and callers that rely on getting their own tensor back.
    Weights and checkpoints are no messages: they stay in this process.
    """

    count = 1

    def __init__(self, worker: W, *, is_strict: bool = False) -> None:
        self.worker = worker
        self.is_strict = is_strict

    @property
    def device(self) -> torch.device:
        """That of the worker."""
        return self.worker.device

    @property
    def is_over(self) -> bool:
        """The worker is part of this process."""
        return False

    def gather(self, form: WeightForm | None = None) -> Gathering:
        """The policy's own parameters, with digests of every trained tensor."""
        del form
        assert isinstance(self.worker, TrainWorker), "no other worker has engines to publish to"
        start = time.monotonic()
        weights = trained_parameters(self.worker.actor.policy)
        with CALLS:
            digests = merge_sums([self.worker.weight_sums()])
        gathered = GatheredWeights(
            parts=[weights],
            bytes=total_bytes(weights.values()),
            seconds=time.monotonic() - start,
            digests=digests,
        )
        return lambda: gathered

    def raise_if_lost(self) -> None:
        """The worker is here."""

    def save(
        self,
        writer: CheckpointWriter,
        step: int,
        *,
        parts: Mapping[str, Mapping[str, Any]],
        facts: Mapping[str, Any],
        further: Sequence[WorkerGroup[Any]] = (),
    ) -> None:
        """Write a checkpoint from this process."""
        assert not further, "every role is in this process"
        with CALLS:
            writer.save(step, {**self.worker.state(), **parts}, facts=facts)

    def _begin(
        self,
        method: Callable[..., R],
        arguments: Sequence[Sequence[Any]],
        named: Mapping[str, Any],
    ) -> Results[R]:
        (own,) = arguments
        if self.is_strict:
            own, named = pickle_roundtrip((own, named))
        with CALLS:
            value = method(self.worker, *own, **named)
        found = [pickle_roundtrip(value) if self.is_strict else value]
        return lambda: found

    def _begin_and_gather(
        self,
        method: Callable[..., R],
        arguments: Sequence[Sequence[Any]],
        named: Mapping[str, Any],
    ) -> tuple[Results[R], Gathering]:
        return self._begin(method, arguments, named), self.gather()


@final
class SharedWeights:
    """The publication of weights that trainer and engine share: there is nothing to send.

    Example:
        >>> SharedWeights().wait()
    """

    def wait(self) -> None:
        """Return at once."""


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
        try:
            groups = self._generation.play(
                self.engine, requests, sampling, purpose=purpose, version=version, journal=journal
            )
        finally:
            # The next thing that happens to the weights may be an optimizer step.
            drop_prefixes(self.engine)
        if self._frees_cache:
            free_memory(self.engine)
        return groups

    def publish(self, version: int) -> Publication:
        """Send the weights to a server; an engine of this process shares the actor's."""
        if isinstance(self.engine, RemoteEngine):
            self.engine.send_weights(version)
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


@final
class LocalReceiver:
    """Engines in this process, each with a copy of one version of the weights."""

    is_published = True
    """Always: what was sent is confirmed."""

    def __init__(self, engines: VersionedEngines) -> None:
        self._engines = engines
        self._next: tuple[int, frozenset[int]] | None = None
        self.confirmed_at = 0.0
        """When the newest weights were confirmed, by the monotonic clock."""

    def begin_publication(
        self,
        version: int,
        *,
        keep: Collection[int] = (),
        holder: Callable[[], None] | None = None,
    ) -> None:
        """Start a publication."""
        del holder
        self._next = version, frozenset(keep)

    def send_all(
        self,
        parts: Sequence[Any],
        expected: Mapping[str, str],
        *,
        mapped: MappedWeights | None = None,
        gather_bytes: Callable[[], Sequence[Any]] | None = None,
    ) -> None:
        """Copy the weights into an engine that is free; a UserError if their digests differ."""
        del mapped, gather_bytes
        assert self._next is not None, "no publication was started"
        version, keep = self._next
        engine = self._engines.hold(version, keep=keep)
        for part in parts:
            load_weights(engine, part)
        finish_weights(engine, version)
        found = Fingerprint(weights=digests_of(engine) or {})
        difference = found.first_difference(Fingerprint(weights=expected))
        if difference is not None:
            why = f"it does not have version {version} of the weights: {difference}"
            fix = "copy every trained parameter to the engine, adapters too"
            raise UserError(_FIELD, type(engine).__name__, why, fix)
        self.confirmed_at = time.monotonic()

    def withdraw(self) -> None:
        """Nothing is read after it was sent."""

    def receive(self, wait_s: float) -> None:
        """Nothing is on its way."""


def local_roles(
    *,
    worker: TrainWorker,
    engine: RolloutEngine,
    generation: Generation,
    micro_batching: RoleMicroBatching,
    frees_cache: bool = False,
    partial_rollouts: bool = False,
    is_strict: bool = False,
) -> Roles:
    """Roles in this process. The engine samples with the actor's own weights.

    `VersionedEngines` have copies of them and generate while the actor trains; with
    `partial_rollouts`, unfinished responses continue with every new version. `frees_cache` frees
    the engine's KV cache after each generation. `is_strict` pickles every message to the worker.
    """
    workers = LocalWorkers(worker, is_strict=is_strict)
    weight_sync: WeightSync | None = None
    rollout: RolloutRole
    if isinstance(engine, VersionedEngines):
        weight_sync = WeightSync(workers, LocalReceiver(engine))
        rollout = AsyncGeneration(
            engine,
            generation,
            load_weights=weight_sync.publish_extra,
            partial_rollouts=partial_rollouts,
            device=worker.device,
        )
    else:
        rollout = SharedRollout(engine, generation, worker.actor.policy, frees_cache=frees_cache)
    return Roles(
        workers=workers,
        rollout=rollout,
        generation=generation,
        micro_batching=micro_batching,
        weight_sync=weight_sync,
        on_close=[engine.close],
    )
