"""The roles of a run on a cluster: ranks that train, replicas that generate, one controller."""

from collections.abc import Callable, Sequence
from typing import final

from luyen.runtime.generation import AsyncGeneration, Generation
from luyen.runtime.monitoring import TraceSpec
from luyen.runtime.ray.engines import RayEngines
from luyen.runtime.ray.ranks import RankGroup
from luyen.runtime.ray.replica import Replica
from luyen.runtime.ray.rollout import ReplicaRollout
from luyen.runtime.roles import RoleMicroBatching, Roles
from luyen.runtime.weight_sync import WeightSync
from luyen.runtime.worker import TrainWorker


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
        self._pool = engines.replica_pool
        self._ahead = ahead

    def start_trace(self, trace: TraceSpec) -> None:
        """Start a trace in every rank and replica."""
        self._on_engine(lambda: self._pool.call_all(Replica.start_trace, trace))
        self._ranks.all(TrainWorker.start_trace, trace)

    def stop_trace(self) -> None:
        """End the traces and write their files."""
        self._ranks.all(TrainWorker.stop_trace)
        self._on_engine(lambda: self._pool.call_all(Replica.stop_trace))

    def _on_engine(self, call: Callable[[], object]) -> None:
        if self._ahead is None:
            call()
        else:
            self._ahead.on_engine(call)


def ray_roles(
    *,
    ranks: RankGroup,
    engines: RayEngines,
    generation: Generation,
    micro_batching: RoleMicroBatching,
    on_close: Sequence[Callable[[], None]] = (),
    frees_cache: bool = False,
    runs_ahead: bool = False,
    partial_rollouts: bool = False,
) -> Roles:
    """Roles on a cluster. Batches are on the controller; ranks get shards of them.

    With `runs_ahead` replicas generate while ranks train; they keep every version in use, or with
    `partial_rollouts` only the newest, with which unfinished responses continue. `frees_cache`
    frees the replicas' KV cache after each generation. `on_close` is called after all processes
    have ended.
    """
    ranks.watch.restart()
    weight_sync = WeightSync(ranks, engines.replica_pool, ranks.watch)
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
        rollout=ahead or ReplicaRollout(engines, generation, weight_sync, frees_cache=frees_cache),
        generation=generation,
        micro_batching=micro_batching,
        weight_sync=weight_sync,
        watch=ranks.watch,
        traces=ClusterTraces(ranks, engines, ahead),
        on_close=[
            engines.replica_pool.flush_reports,
            ranks.watch.write,
            engines.stop,
            ranks.stop,
            *on_close,
        ],
    )
