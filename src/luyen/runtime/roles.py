"""The roles that the training loop calls, wherever they run, and the digests of their weights."""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, final

import torch
from torch import Tensor

from luyen.algorithms.aggregation import aggregation_weights
from luyen.algorithms.objective import Objective
from luyen.checkpoint.writer import CheckpointWriter
from luyen.engine.actor import (
    merge_policy_updates,
    policy_inputs,
    prepare_update,
    router_statistics,
)
from luyen.engine.batch import (
    REPLAYED_ROUTES,
    BatchShard,
    MicroBatching,
    PackedBatch,
    join_shards,
    split_batch,
)
from luyen.engine.sharded_state import merge_sums
from luyen.engine.step import LOSS_WEIGHT, UpdateResult, merge_updates
from luyen.rollout.protocol import Sampling
from luyen.rollout.single_turn import PromptRequest
from luyen.runtime.generation import Generation, RolloutFuture
from luyen.runtime.monitoring import RoleMonitor, TraceTarget
from luyen.runtime.weight_sync import WeightSync
from luyen.runtime.worker import ModelWorker, TrainWorker, WorkerGroup
from luyen.telemetry.journal import WorkJournal


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RoleMicroBatching:
    """Micro-batching of each role, and the aggregation of the value loss.

    Example:
        >>> whole = MicroBatching()
        >>> RoleMicroBatching(actor=whole, log_probs=whole, reference=whole).critic is None
        True
    """

    actor: MicroBatching
    """The policy's update."""
    log_probs: MicroBatching
    """Old log-probabilities."""
    reference: MicroBatching
    """Log-probabilities of the reference."""
    critic: MicroBatching | None = None
    """Values and the critic's update; None: there is no critic."""
    value_aggregation: str = "token-mean"
    """Aggregation of the value losses of tokens."""
    value_scale: float | None = None
    """`loss_scale_factor` of the aggregation."""


@final
class WeightDigests:
    """Type, shape and digest of every trained tensor of the roles, as one text per tensor.

    Computed on first read, then cached. Reading changes nothing; no role may be updated before
    both methods were called.
    """

    def __init__(
        self,
        workers: WorkerGroup[Any],
        published: Mapping[str, str] | None,
        *,
        further: Sequence[WorkerGroup[Any]] = (),
    ) -> None:
        """`published` are digests of the workers' weights, where a publication has gathered them.

        `further` are groups of other roles that learn.
        """
        self._workers = workers
        self._published = published
        self._further = further

    def weights(self) -> Mapping[str, str]:
        """Trained parameters, and their fp32 masters where they have any."""
        return self._weights

    def moments(self) -> Mapping[str, str]:
        """First moments of the optimizers, which hold the gradients."""
        return self._moments

    @cached_property
    def _weights(self) -> Mapping[str, str]:
        found = dict(self._published or merge_sums(self._workers.all(ModelWorker.weight_sums)))
        for group in self._further:
            found |= merge_sums(group.all(ModelWorker.weight_sums))
        return found

    @cached_property
    def _moments(self) -> Mapping[str, str]:
        found: dict[str, str] = {}
        for group in (self._workers, *self._further):
            found |= merge_sums(group.all(ModelWorker.moment_sums))
        return found


# Handles of work that may still be in progress: an update, a publication.


@final
class PendingUpdate:
    """Handle of an optimizer step that was started.

    Example:
        >>> PendingUpdate(lambda: None).result() is None  # type: ignore[arg-type]
        True
    """

    def __init__(self, collect: Callable[[], UpdateResult]) -> None:
        """`collect` waits for the workers."""
        self._collect = collect
        self._found: UpdateResult | None = None

    def result(self) -> UpdateResult:
        """What it measured; raises what stopped the first worker."""
        if self._found is None:
            self._found = self._collect()
        return self._found


class Publication(Protocol):
    """Handle of a weight sync from the trainer to the rollout engines."""

    def wait(self) -> None:
        """Return when every engine has confirmed the weights by digest; may be called twice."""
        ...


class RolloutRole(Protocol):
    """Generates rollouts with the weights that were published, in turn with training or during it.

    `luyen.runtime.in_process.SharedRollout` is an engine over the actor's own weights,
    `luyen.runtime.ray.roles.ReplicaRollout` one over replicas; both alternate with training.
    `luyen.runtime.generation.AsyncGeneration` generates while the workers train.
    """

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
class Roles:
    """Actor, rollout engine, reference, teacher and critic.

    Batches are whole, on `device`. What depends on a whole optimizer step is computed here; then
    the batch is split, and each worker gets a shard. With one worker the shard is the batch.
    Reference and critic are models of the actor's workers, or have workers of their own.
    """

    def __init__(
        self,
        *,
        workers: WorkerGroup[TrainWorker],
        rollout: RolloutRole,
        generation: Generation,
        micro_batching: RoleMicroBatching,
        reference: WorkerGroup[TrainWorker] | None = None,
        critic: WorkerGroup[TrainWorker] | None = None,
        weight_sync: WeightSync | None = None,
        watch: RoleMonitor | None = None,
        traces: TraceTarget | None = None,
        on_close: Sequence[Callable[[], object]] = (),
    ) -> None:
        """`weight_sync` None: the engine samples with the actor's own weights.

        `reference` and `critic` are their own workers; None: `workers` have these models too.
        `on_close` is called at the end, in order: it ends processes and frees devices.
        """
        self.workers = workers
        self._reference = reference or workers
        self._critic = critic or workers
        self._further = () if critic is None else (critic,)
        """Groups that learn, besides the actor's."""
        self.rollout = rollout
        """Generates."""
        self.generation = generation
        """Makes rollouts out of requests."""
        self.micro_batching = micro_batching
        self.watch = watch
        """The monitor of the roles' processes; None: all roles are in this process."""
        self.traces = traces
        """Processes of the roles that can be traced; None: all roles are in this process."""
        self.weight_sync = weight_sync
        """Sends the actor's weights to the engines."""
        self._on_close = list(on_close)

    @property
    def device(self) -> torch.device:
        """The device that batches must be on."""
        return self.workers.device

    @property
    def has_critic(self) -> bool:
        """Whether there is a critic."""
        return self.micro_batching.critic is not None

    @property
    def generates_remotely(self) -> bool:
        """Whether submitted requests are generated while the caller continues."""
        return self.rollout.generates_remotely

    def submit(
        self,
        requests: Sequence[PromptRequest],
        sampling: Sampling,
        *,
        purpose: str,
        version: int,
        journal: WorkJournal | None = None,
    ) -> RolloutFuture:
        """Submit requests; engines in other processes start to generate at once.

        Rollouts are generated with exactly this version of the weights. It must have been
        published; if its publication is not complete, generation waits for it. Rollouts that the
        journal has are not generated again.
        """
        return self.rollout.submit(
            requests, sampling, purpose=purpose, version=version, journal=journal
        )

    def publish(self, version: int) -> Publication:
        """Send the actor's weights to the rollout engines, as this version.

        Returns without waiting for the transfer. Engines drop earlier versions that
        `keep_weights` did not name.
        """
        return self.rollout.publish(version)

    def keep_weights(self, versions: Collection[int]) -> None:
        """Only these versions will be submitted again, besides those published later."""
        self.rollout.keep_weights(versions)

    def old_scores(self, batch: PackedBatch, *, sum_pi_squared: bool) -> dict[str, Tensor]:
        """Log-probabilities under the weights that the update starts from."""
        shards = self._policy_shards(batch, self.micro_batching.log_probs)
        found = self.workers.each(TrainWorker.actor_scores, shards, sum_pi_squared=sum_pi_squared)
        return join_shards(shards, found, batch)

    def reference_logp(self, batch: PackedBatch) -> Tensor:
        """Log-probabilities under the reference policy."""
        shards = self._score_shards(batch, self.micro_batching.reference, self._reference)
        found = self._reference.each(TrainWorker.reference_scores, shards)
        return join_shards(shards, found, batch)["logp"]

    def teacher_logp(self, batch: PackedBatch) -> Tensor:
        """Log-probabilities under the teacher."""
        shards = self._score_shards(batch, self.micro_batching.log_probs, self.workers)
        found = self.workers.each(TrainWorker.teacher_scores, shards)
        return join_shards(shards, found, batch)["logp"]

    def values(self, batch: PackedBatch) -> Tensor:
        """The critic's value before each token."""
        assert self.micro_batching.critic is not None, "the run has no critic"
        shards = self._score_shards(batch, self.micro_batching.critic, self._critic)
        found = self._critic.each(TrainWorker.critic_scores, shards)
        return join_shards(shards, found, batch)["values"]

    def update_actor(
        self,
        batch: PackedBatch,
        objective: Objective,
        *,
        lr: float,
        seed: int,
        is_last: bool = False,
    ) -> PendingUpdate:
        """Start one optimizer step of the policy; the handle returns its metrics.

        With `is_last`, workers gather their weights for publication right after the step, where
        generation waits for them.
        """
        statistics = self._statistics(batch, objective, seed)
        prepared, numbers = prepare_update(batch, objective, statistics)
        numbers |= self._router_statistics(batch, objective)
        shards = split_batch(prepared, self.micro_batching.actor, ranks=self.workers.shards)
        sync, gathering = self.weight_sync, None
        if sync is not None:
            sync.release()
        if is_last and sync is not None and self.rollout.alternates:
            done, gathering = self.workers.begin_each_and_gather(
                TrainWorker.update_actor, shards, objective=objective, lr=lr, statistics=numbers
            )
        else:
            done = self.workers.begin_each(
                TrainWorker.update_actor, shards, objective=objective, lr=lr, statistics=numbers
            )
        if sync is not None:
            sync.change(gathering)
        return PendingUpdate(lambda: merge_policy_updates(batch, shards, done()))

    def update_critic(self, batch: PackedBatch, *, lr: float) -> UpdateResult:
        """One optimizer step of the critic."""
        micro_batching = self.micro_batching
        assert micro_batching.critic is not None, "the run has no critic"
        weights = aggregation_weights(
            micro_batching.value_aggregation,
            batch.rollouts,
            loss_scale_factor=micro_batching.value_scale,
        )
        prepared = batch.with_streams(**{LOSS_WEIGHT: weights})
        shards = split_batch(prepared, micro_batching.critic, ranks=self._critic.shards)
        return merge_updates(shards, self._critic.each(TrainWorker.update_critic, shards, lr=lr))

    def weight_digests(self) -> WeightDigests:
        """Digests of every trained tensor, as it is now: the sums of each worker's parts."""
        sync = self.weight_sync
        published = None if sync is None else sync.digests
        return WeightDigests(self.workers, published, further=self._further)

    def not_finite(self) -> list[str]:
        """Names of the tensors of a checkpoint that hold NaN or infinity."""
        groups = (self.workers, *self._further)
        found = [names for group in groups for names in group.all(ModelWorker.not_finite)]
        return sorted({name for names in found for name in names})

    def save(
        self,
        writer: CheckpointWriter,
        step: int,
        *,
        loop: Mapping[str, Any],
        facts: Mapping[str, Any],
    ) -> None:
        """Write a checkpoint of weights, optimizer state and the loop's state."""
        parts = {"loop": loop}
        self.workers.save(writer, step, parts=parts, facts=facts, further=self._further)

    def load(self, folder: Path) -> None:
        """Restore weights and optimizer state, whatever number of ranks saved them."""
        if self.weight_sync is not None:
            self.weight_sync.release()
        for group in (self.workers, *self._further):
            group.all(ModelWorker.load, folder.absolute())
        self.forget_weights()

    def forget_weights(self) -> None:
        """Drop every published version: the actor has got other weights."""
        self.rollout.forget()
        if self.weight_sync is not None:
            self.weight_sync.forget()

    def close(self) -> None:
        """Release engines, tools, processes and devices, even if a part of it fails."""
        endings = [self.rollout.close, self.generation.close, *self._on_close]
        self._on_close = []
        with ExitStack() as stack:
            for end in reversed(endings):
                stack.callback(end)

    def _score_shards(
        self, batch: PackedBatch, passes: MicroBatching, workers: WorkerGroup[TrainWorker]
    ) -> list[BatchShard]:
        """Shards of the tokens alone: a pass without a loss reads no stream."""
        return split_batch(replace(batch, streams={}), passes, ranks=workers.shards)

    def _policy_shards(self, batch: PackedBatch, passes: MicroBatching) -> list[BatchShard]:
        """Shards for passes of the policy, whose layers may take the sampler's experts."""
        kept = {name: x for name, x in batch.streams.items() if name == REPLAYED_ROUTES}
        return split_batch(replace(batch, streams=kept), passes, ranks=self.workers.shards)

    def _router_statistics(self, batch: PackedBatch, objective: Objective) -> dict[str, Tensor]:
        """Loads of experts over the whole step, from a pass without gradients."""
        if not objective.router_aux_loss_coef:
            return {}
        shards = self._policy_shards(batch, self.micro_batching.actor)
        counts = self.workers.each(TrainWorker.expert_counts, shards)
        return router_statistics(counts, len(batch.tokens))

    def _statistics(
        self, batch: PackedBatch, objective: Objective, seed: int
    ) -> Mapping[str, Tensor]:
        """Statistics of the whole step that a loss needs, from a pass without gradients."""
        if not objective.needs_statistics:
            return {}
        shards = self._policy_shards(batch, self.micro_batching.actor)
        found = self.workers.each(TrainWorker.actor_scores, shards)
        logp = join_shards(shards, found, batch)["logp"]
        return objective.statistics(policy_inputs(batch, logp), seed=seed)
