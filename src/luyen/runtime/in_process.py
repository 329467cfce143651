"""The roles of a run in this process: one worker, and engines on the same device."""

from luyen.rollout.engines import VersionedEngines
from luyen.rollout.protocol import RolloutEngine
from luyen.runtime.generation import AsyncGeneration, Generation
from luyen.runtime.roles import RoleMicroBatching, Roles
from luyen.runtime.rollout_role import RolloutRole, SharedRollout
from luyen.runtime.weight_sync import LocalReceiver, WeightSync
from luyen.runtime.worker import TrainWorker
from luyen.runtime.worker_group import LocalWorkers


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
