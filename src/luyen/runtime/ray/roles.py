"""The roles of a run on a cluster: ranks that train, replicas that generate, one controller."""

from collections.abc import Callable, Collection, Sequence
from typing import final

from luyen.rollout.protocol import Sampling
from luyen.rollout.single_turn import Group, PromptRequest
from luyen.runtime.generation import (
    AsyncGeneration,
    Generation,
    LazyRollouts,
    ReadyRollouts,
    RolloutFuture,
)
from luyen.runtime.monitoring import TraceSpec
from luyen.runtime.ray.engines import RayEngines
from luyen.runtime.ray.ranks import RankGroup
from luyen.runtime.ray.replica import Replica
from luyen.runtime.ray.replica_pool import ReplicaPool
from luyen.runtime.roles import Publication, RoleMicroBatching, Roles
from luyen.runtime.weight_sync import WeightSync
from luyen.runtime.worker import TrainWorker
from luyen.telemetry.journal import WorkJournal
from luyen.telemetry.output import say


@final
class ClusterTraces:
    """Starts and stops traces in the processes of all ranks and replicas.

    A replica that is lost while it is traced writes no trace.
    """

    def __init__(
        self,
        groups: Sequence[RankGroup[TrainWorker]],
        engines: RayEngines,
        ahead: AsyncGeneration | None,
    ) -> None:
        """With `ahead` only its thread may touch the engines."""
        self._groups = groups
        self._pool = engines.replica_pool
        self._ahead = ahead

    def start_trace(self, trace: TraceSpec) -> None:
        """Start a trace in every rank and replica."""
        self._on_engine(lambda: self._pool.call_all(Replica.start_trace, trace))
        for ranks in self._groups:
            ranks.all(TrainWorker.start_trace, trace)

    def stop_trace(self) -> None:
        """End the traces and write their files."""
        for ranks in self._groups:
            ranks.all(TrainWorker.stop_trace)
        self._on_engine(lambda: self._pool.call_all(Replica.stop_trace))

    def _on_engine(self, call: Callable[[], object]) -> None:
        if self._ahead is None:
            call()
        else:
            self._ahead.on_engine(call)


@final
class ReplicaRollout:
    """Replicas that generate what is submitted at once, or as soon as they have the weights.

    There is at most one generation in progress: one that is submitted during it starts when its
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


def share_memory(ranks: RankGroup[TrainWorker], pool: ReplicaPool) -> None:
    """Let replicas on the GPU of the first rank copy weights from its memory, if they can.

    For replicas that generate in turn with training: those that generate meanwhile need versions
    again that the ranks do not have any more.
    """
    probe = ranks.probe()
    if isinstance(probe, str):
        say(
            f"weights reach the replicas through the host: memory of rank 0 cannot be shared "
            f"({probe}); PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True is such a case"
        )
    elif probe is not None:
        pool.offer(probe)
        ranks.form = lambda: pool.wanted_form


def ray_roles(
    *,
    ranks: RankGroup[TrainWorker],
    engines: RayEngines,
    generation: Generation,
    micro_batching: RoleMicroBatching,
    reference: RankGroup[TrainWorker] | None = None,
    critic: RankGroup[TrainWorker] | None = None,
    on_close: Sequence[Callable[[], None]] = (),
    frees_cache: bool = False,
    runs_ahead: bool = False,
    partial_rollouts: bool = False,
) -> Roles:
    """Roles on a cluster. Batches are on the controller; ranks get shards of them.

    `reference` and `critic` have pools of their own; None: `ranks` have their models. With
    `runs_ahead` replicas generate while ranks train; they keep every version in use, or with
    `partial_rollouts` only the newest, with which unfinished responses continue. `frees_cache`
    frees the replicas' KV cache after each generation. `on_close` is called after all processes
    have ended.
    """
    groups = [group for group in (ranks, reference, critic) if group is not None]
    pool, stops = engines.replica_pool, [group.stop for group in groups]
    ranks.watch.restart()
    weight_sync = WeightSync(ranks, pool, ranks.watch)
    ahead: AsyncGeneration | None = None
    if runs_ahead:
        ahead = AsyncGeneration(
            engines,
            generation,
            load_weights=weight_sync.publish_extra,
            partial_rollouts=partial_rollouts,
        )
    return Roles(
        workers=ranks,
        reference=reference,
        critic=critic,
        rollout=ahead or ReplicaRollout(engines, generation, weight_sync, frees_cache=frees_cache),
        generation=generation,
        micro_batching=micro_batching,
        weight_sync=weight_sync,
        watch=ranks.watch,
        traces=ClusterTraces(groups, engines, ahead),
        on_close=[pool.flush_reports, ranks.watch.write, engines.stop, *stops, *on_close],
    )
