"""Build the roles of a run on a Ray cluster from a configuration."""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from luyen.config.catalog import training_engine
from luyen.config.plan import (
    Placement,
    count_weight_versions,
    has_partial_rollouts,
    ranks_per_replica,
    ranks_per_shard,
)
from luyen.config.schema.run import RunConfig
from luyen.data.render import Renderer
from luyen.models.load import choose_threads
from luyen.rewards.reward_model import Scorer
from luyen.rollout.build import ToolEnvironment
from luyen.rollout.protocol import RolloutEngine
from luyen.runtime.monitoring import RoleMonitor
from luyen.runtime.ray.cluster import STORE_BYTES, connect
from luyen.runtime.ray.engines import RayEngines
from luyen.runtime.ray.pools import CRITIC, REFERENCE, REWARD, PoolFacts, plan_pools
from luyen.runtime.roles import Roles
from luyen.runtime.split_engine import EngineRanks
from luyen.runtime.training import RankPlace, TrainingEngine, loads_on_host, training_engines
from luyen.runtime.worker import TrainWorker
from luyen.train.batch import RequiredSignals
from luyen.train.builders.reward import ray_reward_model
from luyen.train.builders.roles import (
    TRAINERS,
    build_engine,
    build_generation,
    build_worker,
    initial_policy,
    micro_batching,
    split_engine,
    versioned_engines,
)
from luyen.train.builders.setup import import_plugins, load_run_tokenizer

if TYPE_CHECKING:
    from luyen.runtime.ray.ranks import RankGroup


def build_ray_roles(
    config: RunConfig,
    renderer: Renderer,
    needs: RequiredSignals,
    where: Placement,
    *,
    tool_env: ToolEnvironment | None = None,
) -> tuple[Roles, Scorer | None]:
    """Start ranks, replicas and the reward model on a cluster; on an error all are released."""
    connection = connect(store_bytes=STORE_BYTES * count_weight_versions(config.trainer))
    # Imported here: `connect` has checked that ray is installed.
    from luyen.runtime.ray.actors import PlacedPools, wait_for_nodes
    from luyen.runtime.ray.roles import ray_roles

    with ExitStack() as opened:
        opened.callback(connection.disconnect)
        facts, timeouts = PoolFacts.of(config, where), config.trainer.timeouts
        pools = plan_pools(facts, wait_for_nodes(facts, connection, timeouts))
        placed = PlacedPools(pools, timeouts=timeouts)
        opened.callback(placed.free)
        places = {r: [placed.options(s) for s in slots] for r, slots in pools.slots.items()}
        groups, engines = _start_processes(config, needs, where, places, opened)
        ranks = groups["actor"]
        scorer = ray_reward_model(config, where.device, places.get(REWARD, ()), ranks.watch)
        opened.pop_all()
    # The controller computes little: more threads would compete with the workers for cores.
    torch.set_num_threads(1)
    roles = ray_roles(
        ranks=ranks,
        engines=engines,
        generation=build_generation(config, tool_env, renderer),
        micro_batching=micro_batching(config, needs),
        reference=groups.get(REFERENCE),
        critic=groups.get(CRITIC),
        on_close=(placed.free, connection.disconnect),
        frees_cache=config.actor_rollout_ref.rollout.free_cache_engine,
        runs_ahead=config.trainer.max_staleness > 0,
        partial_rollouts=has_partial_rollouts(config.trainer),
    )
    return roles, scorer


def _start_processes(
    config: RunConfig,
    needs: RequiredSignals,
    where: Placement,
    places: Mapping[str, Sequence[Mapping[str, Any]]],
    opened: ExitStack,
) -> "tuple[dict[str, RankGroup[TrainWorker]], RayEngines]":
    """Start the ranks of each pool, by role, and replicas; `opened` ends them on an error."""
    from luyen.runtime.ray.ranks import RankGroup
    from luyen.runtime.ray.roles import share_memory

    timeouts, watch = config.trainer.timeouts, RoleMonitor()
    pools = {REFERENCE: where.reference_pool, CRITIC: where.critic_pool}
    apart = [role for role, pool in pools.items() if pool is not None]
    shared = [role for role in TRAINERS if role not in apart]
    groups: dict[str, RankGroup[TrainWorker]] = {}
    for role, models in {"actor": shared, **{role: [role] for role in apart}}.items():
        make = partial(make_rank, config, needs, where.device, models)
        groups[role] = RankGroup(
            make,
            places=places[role],
            timeouts=timeouts,
            role=role,
            watch=watch,
            ranks_per_shard=ranks_per_shard(config),
        )
        opened.callback(groups[role].stop)
    engines = _start_engines(config, where.device, places["rollout"], watch)
    opened.callback(engines.close)
    is_read_in_place = config.actor_rollout_ref.rollout.cuda_ipc and where.device == "cuda"
    if is_read_in_place and config.trainer.max_staleness == 0:
        share_memory(groups["actor"], engines.replica_pool)
    return groups, engines


def _start_engines(
    config: RunConfig, device: str, places: Sequence[Mapping[str, Any]], watch: RoleMonitor
) -> RayEngines:
    """Start the replicas: a process in each place, or in several consecutive ones."""
    from luyen.runtime.ray.actors import start_engines, start_split_engines

    ranks, timeouts = ranks_per_replica(config), config.trainer.timeouts
    if ranks > 1:
        make_rank_of = partial(make_replica_rank, config, device)
        return start_split_engines(
            make_rank_of, ranks=ranks, places=places, timeouts=timeouts, watch=watch
        )
    make = partial(make_replica, config, device)
    return start_engines(make, replicas=len(places), places=places, timeouts=timeouts, watch=watch)


def make_rank(
    config: RunConfig,
    needs: RequiredSignals,
    device: str,
    roles: Collection[str],
    rank: int,
    ranks: int,
    address: str,
) -> TrainWorker:
    """Build the models of one rank, those of its roles; called in its process."""
    import_plugins(config.trainer.plugins)
    engine = join_engine(config, device, rank, ranks, address)
    tokenizer = load_run_tokenizer(config)
    name = training_engine(config.actor_rollout_ref.actor.strategy, ranks)
    return build_worker(
        config,
        tokenizer,
        needs,
        device,
        rank=rank,
        engine=engine,
        on_host=loads_on_host(name, device),
        roles=roles,
    )


def join_engine(
    config: RunConfig, device: str, rank: int, ranks: int, address: str
) -> TrainingEngine:
    """The training engine of a rank, which joins the other ranks; called in its process."""
    actor = config.actor_rollout_ref.actor
    place = RankPlace(
        device=device,
        rank=rank,
        ranks=ranks,
        address=address,
        timeout_s=config.trainer.timeouts.collective_s,
    )
    return training_engines.get(training_engine(actor.strategy, ranks))(place, actor.fsdp_config)


def make_replica(config: RunConfig, device: str, index: int) -> RolloutEngine:
    """Build the engine of one replica; called in its process. Weights are published later."""
    import_plugins(config.trainer.plugins)
    tokenizer = load_run_tokenizer(config)
    policy = initial_policy(config, tokenizer, device)
    choose_threads(policy)
    if config.trainer.max_staleness > 0:
        return versioned_engines(config, policy, tokenizer, device, replica=index)
    return build_engine(config, policy, tokenizer, replica=index)


def make_replica_rank(
    config: RunConfig,
    device: str,
    index: int,
    rank: int,
    ranks: int,
    address: str,
    faulty: Callable[[BaseException], object],
) -> RolloutEngine | None:
    """Build one rank's part of a replica's engine; called in its process.

    The first rank has the engine; the other ranks follow it until it ends, and have none.
    """
    import_plugins(config.trainer.plugins)
    place = RankPlace(
        device=device,
        rank=rank,
        ranks=ranks,
        address=address,
        timeout_s=config.trainer.timeouts.collective_s,
    )
    engine_ranks = EngineRanks(place, faulty=faulty)
    tokenizer = load_run_tokenizer(config)
    # A rank moves only its part of the weights to its device.
    policy = initial_policy(config, tokenizer, device, on_host=device == "cuda")
    choose_threads(policy)
    if config.trainer.max_staleness > 0:
        engine = versioned_engines(
            config, policy, tokenizer, device, replica=index, ranks=engine_ranks
        )
    else:
        engine = split_engine(config, policy, tokenizer, engine_ranks, replica=index)
    if rank == 0:
        return engine
    engine_ranks.follow()
    return None
