"""The roles of a run on a cluster: ranks that train, replicas that generate, one controller."""

import queue
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from luyen.algorithms.aggregation import aggregation_weights
from luyen.algorithms.objective import Objective
from luyen.base.boundary import boundary
from luyen.checkpoint.tensors import save_state
from luyen.checkpoint.writer import CheckpointWriter, WritersGone
from luyen.engine.actor import merge_policy_updates, policy_inputs, prepare_update
from luyen.engine.batch import PackedBatch
from luyen.engine.batch_shards import MicroBatching, join_shards, split_batch
from luyen.engine.step import LOSS_WEIGHT, UpdateResult, merge_updates
from luyen.rollout.protocol import Sampling
from luyen.rollout.single_turn import Group, PromptRequest
from luyen.runtime.futures import (
    LazyRollouts,
    Publication,
    ReadyRollouts,
    RolloutFuture,
    RunningUpdate,
)
from luyen.runtime.generation import AsyncGeneration, Generation
from luyen.runtime.monitoring import TraceSpec
from luyen.runtime.ray.engines import RayEngines
from luyen.runtime.ray.messages import ReplicaState
from luyen.runtime.ray.ranks import RankGroup
from luyen.runtime.ray.weight_sync import RankWeightDigests, WeightSync
from luyen.runtime.weights import Gathering
from luyen.telemetry.journal import WorkJournal


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RoleMicroBatching:
    """Micro-batching of each role on the ranks, and the aggregation of the value loss.

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
class ClusterTraces:
    """Starts and stops traces in the processes of ranks and replicas.

    A replica that is lost while it is traced writes no trace.
    """

    def __init__(
        self, ranks: RankGroup, engines: RayEngines, ahead: AsyncGeneration | None
    ) -> None:
        """With `ahead` only its thread may touch the engines."""
        self._ranks = ranks
        self._engines = engines
        self._ahead = ahead

    def start_trace(self, trace: TraceSpec) -> None:
        """Start a trace in every rank and replica."""
        self._replicas("start_trace", trace)
        self._ranks.all("start_trace", trace)

    def stop_trace(self) -> None:
        """End the traces and write their files."""
        self._ranks.all("stop_trace")
        self._replicas("stop_trace")

    def _replicas(self, method: str, *arguments: TraceSpec) -> None:
        def call() -> object:
            return self._engines.replica_pool.call_all(method, *arguments)

        if self._ahead is None:
            call()
        else:
            self._ahead.on_engine(call)


_FLUSH_S = 1.0
"""Seconds to wait for the last spans of all replicas together."""


def flush_traces(members: Iterable[ReplicaState]) -> None:
    """Call every ready replica for the report that comes with the result, before they are ended."""
    replies: queue.SimpleQueue[Any] = queue.SimpleQueue()
    called = 0
    with boundary([]):
        for member in members:
            if member.is_ready and member.handle is not None:
                member.handle.call("facts", reply=lambda value, error: replies.put((value, error)))
                called += 1
    last = time.monotonic() + _FLUSH_S
    for _ in range(called):
        try:
            replies.get(timeout=max(0.0, last - time.monotonic()))
        except queue.Empty:
            return


@final
class RayRoles:
    """The roles of a run on a cluster. Batches are on the controller; ranks get shards of them."""

    def __init__(
        self,
        *,
        ranks: RankGroup,
        engines: RayEngines,
        generation: Generation,
        micro_batching: RoleMicroBatching,
        on_close: Sequence[Callable[[], None]] = (),
        frees_cache: bool = False,
        runs_ahead: bool = False,
        partial_rollouts: bool = False,
    ) -> None:
        """`on_close` is called at the end, in order: it frees devices and disconnects.

        `frees_cache` frees the replicas' KV cache after each generation.

        With `runs_ahead` replicas generate while ranks train; they keep every version in use, or
        with `partial_rollouts` only the newest, with which unfinished responses continue.
        """
        # The controller computes little: more threads would compete with the workers for cores.
        torch.set_num_threads(1)
        self.ranks = ranks
        self.engines = engines
        self.generation = generation
        self.micro_batching = micro_batching
        self.frees_cache = frees_cache
        self.watch = ranks.watch
        """Collects the reports of ranks and replicas."""
        self.watch.restart()
        self.weight_sync = WeightSync(ranks, engines)
        """Sends the ranks' weights to the replicas."""
        self._in_flight: RolloutFuture = ReadyRollouts([])
        """The generation that replicas are working on; there is at most one."""
        self._gathering: Gathering | None = None
        """Weights that ranks gather after the last update of a step, until `publish`."""
        self._on_close = list(on_close)
        self.ahead: AsyncGeneration | None = None
        """Generates while the ranks train; None: generation and training alternate."""
        if runs_ahead:
            self.ahead = AsyncGeneration(
                engines,
                generation,
                load_weights=self.weight_sync.publish_extra,
                partial_rollouts=partial_rollouts,
            )
        self.traces = ClusterTraces(ranks, engines, self.ahead)

    @property
    def device(self) -> torch.device:
        """The device that batches must be on."""
        return torch.device("cpu")

    @property
    def has_critic(self) -> bool:
        """Whether there is a critic."""
        return self.micro_batching.critic is not None

    @property
    def generates_remotely(self) -> bool:
        """Always: replicas generate."""
        return True

    def submit(
        self,
        requests: Sequence[PromptRequest],
        sampling: Sampling,
        *,
        purpose: str,
        version: int,
        journal: WorkJournal | None = None,
    ) -> RolloutFuture:
        """Submit requests; rollouts that the journal has are not generated again."""
        if self.ahead is not None:
            return self.ahead.begin(
                requests, sampling, purpose=purpose, version=version, journal=journal
            )
        if not self._in_flight.done():
            return LazyRollouts(
                lambda: self._generate(requests, sampling, purpose, version, journal)
            )
        self.weight_sync.demand(version)
        answers = self.generation.begin(
            self.engines, requests, sampling, purpose=purpose, version=version, journal=journal
        )
        self.engines.send()
        self._in_flight = LazyRollouts(lambda: self._finish(answers))
        return self._in_flight

    def publish(self, version: int) -> Publication:
        """Send the ranks' weights to the replicas, as this version.

        Ranks gather them after their earlier calls; a replica generates with them only after it
        has confirmed their digests.
        """
        if self.ahead is not None:
            return self.ahead.publish(version)
        gathering, self._gathering = self._gathering, None
        return self.weight_sync.begin(version, gathering)

    def keep_weights(self, versions: Collection[int]) -> None:
        """Only these versions will be submitted again, besides those published later."""
        if self.ahead is not None:
            self.ahead.keep(versions)

    def _generate(
        self,
        requests: Sequence[PromptRequest],
        sampling: Sampling,
        purpose: str,
        version: int,
        journal: WorkJournal | None,
    ) -> list[Group]:
        self._in_flight.result()  # completions do not tell which generation they belong to
        self.weight_sync.demand(version)
        answers = self.generation.begin(
            self.engines, requests, sampling, purpose=purpose, version=version, journal=journal
        )
        return self._finish(answers)

    def _finish(self, answers: Callable[[], list[Group]]) -> list[Group]:
        groups = answers()
        if self.frees_cache:
            self.engines.close()
        return groups

    def old_scores(self, batch: PackedBatch, *, sum_pi_squared: bool) -> dict[str, Tensor]:
        """Log-probabilities under the weights that the update starts from."""
        more = {"sum_pi_squared": sum_pi_squared}
        return self._scores("actor_scores", batch, self.micro_batching.log_probs, more)

    def reference_logp(self, batch: PackedBatch) -> Tensor:
        """Log-probabilities under the reference policy."""
        return self._scores("reference_scores", batch, self.micro_batching.reference)["logp"]

    def teacher_logp(self, batch: PackedBatch) -> Tensor:
        """Log-probabilities under the teacher."""
        return self._scores("teacher_scores", batch, self.micro_batching.log_probs)["logp"]

    def values(self, batch: PackedBatch) -> Tensor:
        """The critic's value before each token."""
        assert self.micro_batching.critic is not None, "the run has no critic"
        return self._scores("critic_scores", batch, self.micro_batching.critic)["values"]

    def _scores(
        self,
        method: str,
        batch: PackedBatch,
        passes: MicroBatching,
        more: Mapping[str, Any] | None = None,
    ) -> dict[str, Tensor]:
        bare = replace(batch, streams={})
        shards = split_batch(bare, passes, ranks=self.ranks.count)
        return join_shards(shards, self.ranks.each(method, [(s,) for s in shards], more), batch)

    def update_actor(
        self,
        batch: PackedBatch,
        objective: Objective,
        *,
        lr: float,
        seed: int,
        is_last: bool = False,
    ) -> RunningUpdate:
        """Start one optimizer step of the policy.

        With `is_last`, ranks gather and digest their weights in the same call.
        """
        statistics: Mapping[str, Tensor] = {}
        if objective.needs_statistics:
            logp = self._scores("actor_scores", batch, self.micro_batching.actor)["logp"]
            statistics = objective.statistics(policy_inputs(batch, logp), seed=seed)
        prepared, numbers = prepare_update(batch, objective, statistics)
        shards = split_batch(prepared, self.micro_batching.actor, ranks=self.ranks.count)
        more = {"objective": objective, "lr": lr, "statistics": numbers}
        call = "update_actor", [(shard,) for shard in shards], more
        self._gathering = None
        if is_last and self.ahead is None:
            done, self._gathering = self.ranks.begin_and_publish(*call)
        else:
            done = self.ranks.begin(*call)
        self.weight_sync.change()
        return RunningUpdate(lambda: merge_policy_updates(batch, shards, done()))

    def update_critic(self, batch: PackedBatch, *, lr: float) -> UpdateResult:
        """One optimizer step of the critic."""
        assert self.micro_batching.critic is not None, "the run has no critic"
        micro_batching = self.micro_batching
        weights = aggregation_weights(
            micro_batching.value_aggregation,
            batch.rollouts,
            loss_scale_factor=micro_batching.value_scale,
        )
        prepared = batch.with_streams(**{LOSS_WEIGHT: weights})
        shards = split_batch(prepared, self.micro_batching.critic, ranks=self.ranks.count)
        done = self.ranks.each("update_critic", [(shard,) for shard in shards], {"lr": lr})
        return merge_updates(shards, done)

    def weight_digests(self) -> RankWeightDigests:
        """Digests of every trained tensor: the sums of each rank's parts."""
        return RankWeightDigests(self.ranks, self.weight_sync.digests)

    def not_finite(self) -> list[str]:
        """Names of the tensors of a checkpoint that hold NaN or infinity."""
        return sorted({name for names in self.ranks.all("not_finite") for name in names})

    def save(
        self,
        writer: CheckpointWriter,
        step: int,
        *,
        loop: Mapping[str, Any],
        facts: Mapping[str, Any],
    ) -> None:
        """Write a checkpoint; every rank writes its shards into the folder, on a shared disk."""
        how = "begin_write" if writer.is_async else "write"

        def fill(folder: Path) -> None:
            self.ranks.all(how, folder.absolute())
            save_state(folder, "loop", loop)

        def is_written() -> bool:
            if self.ranks.is_over:
                raise WritersGone
            return all(self.ranks.all("is_written"))

        if writer.is_async:
            writer.save_remote(step, fill, is_written, facts=facts)
        else:
            writer.save_now(step, fill, facts=facts)

    def load(self, folder: Path) -> None:
        """Restore weights and optimizer state, whatever number of ranks saved them."""
        self.ranks.all("load", folder.absolute())
        self.weight_sync.forget()
        if self.ahead is not None:
            self.ahead.forget()

    def close(self) -> None:
        """End every process and free the devices, even if a part of it fails."""
        endings: list[Callable[[], object]] = [
            self.ahead.close if self.ahead is not None else self.engines.drop,
            self.generation.close,
            lambda: flush_traces(self.engines.replica_pool.members),
            self.watch.write,
            self.engines.stop,
            self.ranks.stop,
            *self._on_close,
        ]
        self._on_close = []
        with ExitStack() as stack:
            for end in reversed(endings):
                stack.callback(end)
