"""The roles of a run on a Ray cluster, made from a configuration."""

from contextlib import ExitStack
from functools import partial

import torch

from luyen.config.plan import Placement, is_swapping, versions_held
from luyen.config.schema.run import RunConfig
from luyen.data.render import Renderer
from luyen.engine.actor import ActorEngine
from luyen.engine.fsdp import shard_as
from luyen.engine.optim import MasterAdamW
from luyen.engine.ranks import join_ranks
from luyen.models.policy import Policy
from luyen.models.threads import choose_threads
from luyen.models.value import ValueModel
from luyen.rewards.learned import Scorer
from luyen.rollout.build import Surroundings
from luyen.rollout.protocol import RolloutEngine
from luyen.runtime.cuts import Cuts
from luyen.runtime.rank_roles import RankRoles
from luyen.runtime.ray.cluster import STORE_BYTES, connect
from luyen.runtime.ray.pools import REWARD, PoolFacts, plan_pools
from luyen.runtime.roles import Roles
from luyen.train.build_roles import (
    actor_passes,
    build_critic,
    build_engine,
    build_reference,
    critic_passes,
    generation_of,
    log_prob_passes,
    resident_engines,
    start_policy,
    value_aggregation,
)
from luyen.train.learned_reward import ray_scorer
from luyen.train.needs import Needs
from luyen.train.process import import_plugins, load_run_tokenizer
from luyen.train.teacher import load_teacher


def build_ray_roles(
    config: RunConfig,
    renderer: Renderer,
    needs: Needs,
    where: Placement,
    *,
    surroundings: Surroundings | None = None,
) -> tuple[Roles, Scorer | None]:
    """Ranks, replicas and the reward model on a cluster; everything is given back on an error."""
    connection = connect(store_bytes=STORE_BYTES * versions_held(config.trainer))
    # Whether ray is installed is known from here on.
    from luyen.runtime.ray.placement import Placed
    from luyen.runtime.ray.ranks import RankGroup
    from luyen.runtime.ray.roles import RayRoles
    from luyen.runtime.ray.start import start_engines

    with ExitStack() as opened:
        opened.callback(connection.disconnect)
        pools = plan_pools(PoolFacts.of(config, where), connection.nodes())
        placed = Placed(pools)
        opened.callback(placed.free)
        places = {r: [placed.options(s) for s in slots] for r, slots in pools.slots.items()}
        ranks = RankGroup(partial(make_rank, config, needs, where.device), places=places["actor"])
        opened.callback(ranks.stop)
        seats, make = places["rollout"], partial(make_replica, config, where.device)
        engines = start_engines(make, replicas=len(seats), places=seats, watch=ranks.watch)
        opened.callback(engines.close)
        scorer = ray_scorer(config, where.device, places.get(REWARD, ()), ranks.watch)
        opened.pop_all()
    roles = RayRoles(
        ranks=ranks,
        engines=engines,
        generation=generation_of(config, surroundings, renderer),
        cuts=cuts_of(config, needs),
        ending=(placed.free, connection.disconnect),
        frees_cache=config.actor_rollout_ref.rollout.free_cache_engine,
        runs_ahead=config.trainer.max_staleness > 0,
        is_swapping=is_swapping(config.trainer),
    )
    return roles, scorer


def cuts_of(config: RunConfig, needs: Needs) -> Cuts:
    """How passes are cut on every rank, and how values weigh."""
    arr = config.actor_rollout_ref
    actor = arr.actor
    return Cuts(
        actor=actor_passes(actor),
        log_probs=log_prob_passes(arr.rollout, actor),
        reference=log_prob_passes(arr.ref, actor),
        critic=critic_passes(config) if needs.values else None,
        value_aggregation=value_aggregation(config),
        value_scale=actor.loss_scale_factor or float(config.data.max_response_length),
    )


def make_rank(
    config: RunConfig, needs: Needs, device: str, rank: int, ranks: int, address: str
) -> RankRoles:
    """What one rank holds, made in its process."""
    import_plugins(config.trainer.plugins)
    arr = config.actor_rollout_ref
    fsdp = arr.actor.fsdp_config
    mesh = join_ranks(rank, ranks, address, device=device, fsdp_size=fsdp.fsdp_size)
    tokenizer = load_run_tokenizer(config)

    def sharded(model: Policy | ValueModel) -> None:
        if ranks > 1:
            shard_as(model, mesh, fsdp)

    policy = start_policy(config, tokenizer, device)
    choose_threads(policy)
    sharded(policy)
    reference = build_reference(config, tokenizer, needs, device)
    teacher = load_teacher(config, tokenizer, device) if needs.teacher else None
    for frozen in (reference, teacher):
        if frozen is not None:
            sharded(frozen)
    here = torch.device(device, torch.cuda.current_device()) if device == "cuda" else None
    return RankRoles(
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
    """The engine of one replica, made in its process; its weights are published to it later."""
    del index
    import_plugins(config.trainer.plugins)
    tokenizer = load_run_tokenizer(config)
    policy = start_policy(config, tokenizer, device)
    choose_threads(policy)
    if config.trainer.max_staleness > 0:
        return resident_engines(config, policy, tokenizer, device)
    return build_engine(config, policy, tokenizer)
