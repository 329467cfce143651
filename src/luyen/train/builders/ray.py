"""Build the roles of a run on a Ray cluster from a configuration."""

from contextlib import ExitStack
from functools import partial

import torch

from luyen.config.plan import Placement, count_weight_versions, has_partial_rollouts
from luyen.config.schema.run import RunConfig
from luyen.data.render import Renderer
from luyen.engine.actor import ActorEngine
from luyen.engine.fsdp import join_ranks, shard_as
from luyen.engine.optim import MasterAdamW
from luyen.models.load import choose_threads
from luyen.models.policy import Policy, ValueModel
from luyen.rewards.reward_model import Scorer
from luyen.rollout.build import ToolEnvironment
from luyen.rollout.protocol import RolloutEngine
from luyen.runtime.ray.cluster import STORE_BYTES, connect
from luyen.runtime.ray.pools import REWARD, PoolFacts, plan_pools
from luyen.runtime.ray.roles import RoleMicroBatching
from luyen.runtime.roles import Roles
from luyen.runtime.worker import RankWorker
from luyen.train.batch import RequiredSignals
from luyen.train.builders.reward import ray_reward_model
from luyen.train.builders.roles import (
    actor_passes,
    build_critic,
    build_engine,
    build_generation,
    build_reference,
    critic_passes,
    initial_policy,
    load_teacher,
    log_prob_passes,
    value_aggregation,
    versioned_engines,
)
from luyen.train.builders.setup import import_plugins, load_run_tokenizer


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
    from luyen.runtime.ray.actors import PlacedPools, start_engines
    from luyen.runtime.ray.ranks import RankGroup
    from luyen.runtime.ray.roles import RayRoles

    with ExitStack() as opened:
        opened.callback(connection.disconnect)
        pools = plan_pools(PoolFacts.of(config, where), connection.nodes())
        placed = PlacedPools(pools)
        opened.callback(placed.free)
        places = {r: [placed.options(s) for s in slots] for r, slots in pools.slots.items()}
        ranks = RankGroup(partial(make_rank, config, needs, where.device), places=places["actor"])
        opened.callback(ranks.stop)
        replica_slots, make = places["rollout"], partial(make_replica, config, where.device)
        engines = start_engines(
            make, replicas=len(replica_slots), places=replica_slots, watch=ranks.watch
        )
        opened.callback(engines.close)
        scorer = ray_reward_model(config, where.device, places.get(REWARD, ()), ranks.watch)
        opened.pop_all()
    roles = RayRoles(
        ranks=ranks,
        engines=engines,
        generation=build_generation(config, tool_env, renderer),
        micro_batching=micro_batching(config, needs),
        on_close=(placed.free, connection.disconnect),
        frees_cache=config.actor_rollout_ref.rollout.free_cache_engine,
        runs_ahead=config.trainer.max_staleness > 0,
        partial_rollouts=has_partial_rollouts(config.trainer),
    )
    return roles, scorer


def micro_batching(config: RunConfig, needs: RequiredSignals) -> RoleMicroBatching:
    """Micro-batching of all passes, and aggregation of the value loss."""
    arr = config.actor_rollout_ref
    actor = arr.actor
    return RoleMicroBatching(
        actor=actor_passes(actor),
        log_probs=log_prob_passes(arr.rollout, actor),
        reference=log_prob_passes(arr.ref, actor),
        critic=critic_passes(config) if needs.values else None,
        value_aggregation=value_aggregation(config),
        value_scale=actor.loss_scale_factor or float(config.data.max_response_length),
    )


def make_rank(
    config: RunConfig, needs: RequiredSignals, device: str, rank: int, ranks: int, address: str
) -> RankWorker:
    """Build the models of one rank; called in its process."""
    import_plugins(config.trainer.plugins)
    arr = config.actor_rollout_ref
    fsdp = arr.actor.fsdp_config
    mesh = join_ranks(rank, ranks, address, device=device, fsdp_size=fsdp.fsdp_size)
    tokenizer = load_run_tokenizer(config)

    def sharded(model: Policy | ValueModel) -> None:
        if ranks > 1:
            shard_as(model, mesh, fsdp)

    policy = initial_policy(config, tokenizer, device)
    choose_threads(policy)
    sharded(policy)
    reference = build_reference(config, tokenizer, needs, device)
    teacher = load_teacher(config, tokenizer, device) if needs.teacher else None
    for frozen in (reference, teacher):
        if frozen is not None:
            sharded(frozen)
    here = torch.device(device, torch.cuda.current_device()) if device == "cuda" else None
    return RankWorker(
        rank=rank,
        actor=ActorEngine(
            policy,
            MasterAdamW(policy.parameters(), arr.actor.optim),
            actor_passes(arr.actor),
            temperature=arr.rollout.temperature,
            device=here,
        ),
        reference=reference,
        teacher=teacher,
        critic=build_critic(config, tokenizer, device, sharded=sharded, here=here)
        if needs.values
        else None,
    )


def make_replica(config: RunConfig, device: str, index: int) -> RolloutEngine:
    """Build the engine of one replica; called in its process. Weights are published later."""
    import_plugins(config.trainer.plugins)
    tokenizer = load_run_tokenizer(config)
    policy = initial_policy(config, tokenizer, device)
    choose_threads(policy)
    if config.trainer.max_staleness > 0:
        return versioned_engines(config, policy, tokenizer, device, replica=index)
    return build_engine(config, policy, tokenizer, replica=index)
