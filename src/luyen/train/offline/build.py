"""Build an offline stage from a configuration: its models, in this process or as ranks on Ray."""

from contextlib import ExitStack
from functools import partial
from typing import Any

import torch

from luyen.base.rundir import RunDirectory
from luyen.config.catalog import training_engine
from luyen.config.optimizer_memory import is_optimizer_offloaded
from luyen.config.plan import Placement, ranks_per_sequence, ranks_per_shard
from luyen.config.schema.run import RunConfig
from luyen.data.offline import OfflineData
from luyen.data.tokenizer import Tokenizer
from luyen.engine.batch import MicroBatching
from luyen.engine.fsdp import Shardable
from luyen.runtime.in_process import LocalWorkers, is_strict
from luyen.runtime.monitoring import RoleMonitor
from luyen.runtime.offline import OfflineRoles, OfflineWorker
from luyen.runtime.training import ModelsOnRanks, loads_on_host
from luyen.telemetry.display import Display
from luyen.train.builders.roles import actor_passes
from luyen.train.builders.setup import import_plugins, load_run_tokenizer
from luyen.train.offline import preference, reward_model, sft
from luyen.train.offline.stage import OfflineStage, StageContext, StageKind, WorkerContext

STAGES: dict[str, StageKind] = {
    "sft": sft.SFT,
    "preference": preference.PREFERENCE,
    "reward_model": reward_model.REWARD_MODEL,
    "distill": sft.DISTILL,
}
"""Offline stages by `trainer.stage`."""


def build_stage(
    config: RunConfig,
    data: OfflineData[Any],
    tokenizer: Tokenizer,
    roles: OfflineRoles,
    display: Display,
    *,
    directory: RunDirectory | None = None,
) -> OfflineStage:
    """The stage over its models; `directory` caches slow preparations, None: nothing does."""
    context = StageContext(
        config=config,
        data=data,
        tokenizer=tokenizer,
        roles=roles,
        directory=directory,
        display=display,
    )
    return STAGES[config.trainer.stage].build(context)


def build_offline_roles(config: RunConfig, tokenizer: Tokenizer, where: Placement) -> OfflineRoles:
    """The models of a stage in their initial state, in this process or on a Ray cluster."""
    if where.runtime == "local":
        return local_offline_roles(config, tokenizer, where.device)
    return _ray_roles(config, where)


def local_offline_roles(config: RunConfig, tokenizer: Tokenizer, device: str) -> OfflineRoles:
    """The models of a stage in this process."""
    context = WorkerContext(
        config=config,
        tokenizer=tokenizer,
        device=device,
        offloads_optimizer=is_optimizer_offloaded(
            config.actor_rollout_ref.actor.fsdp_config, device, 1
        ),
    )
    worker = STAGES[config.trainer.stage].worker(context)
    return OfflineRoles(LocalWorkers(worker, is_strict=is_strict()), _passes(config))


def _ray_roles(config: RunConfig, where: Placement) -> OfflineRoles:
    """Start the ranks of a stage on a cluster; on an error all are released."""
    # Imported here: `connect` checks that ray is installed.
    from luyen.runtime.ray.cluster import connect
    from luyen.runtime.ray.pools import PoolFacts, plan_pools

    connection = connect()
    from luyen.runtime.ray.actors import PlacedPools, wait_for_nodes
    from luyen.runtime.ray.ranks import RankGroup

    with ExitStack() as opened:
        opened.callback(connection.disconnect)
        facts, timeouts = PoolFacts.of(config, where), config.trainer.timeouts
        pools = plan_pools(facts, wait_for_nodes(facts, connection, timeouts))
        placed = PlacedPools(pools, timeouts=timeouts)
        opened.callback(placed.free)
        watch = RoleMonitor()
        ranks: RankGroup[OfflineWorker] = RankGroup(
            partial(make_offline_rank, config, where.device),
            places=[placed.options(slot) for slot in pools.slots["actor"]],
            timeouts=timeouts,
            watch=watch,
            ranks_per_shard=ranks_per_shard(config),
        )
        opened.pop_all()
    # The controller computes little: more threads would compete with the ranks for cores.
    torch.set_num_threads(1)
    watch.restart()
    return OfflineRoles(
        ranks,
        _passes(config),
        watch=watch,
        on_close=(watch.write, ranks.stop, placed.free, connection.disconnect),
    )


def make_offline_rank(
    config: RunConfig, device: str, rank: int, ranks: int, address: str
) -> OfflineWorker:
    """Build the models of one rank; called in its process."""
    from luyen.train.builders.ray import join_engine

    import_plugins(config.trainer.plugins)
    engine = join_engine(config, device, rank, ranks, address)
    assert isinstance(engine, ModelsOnRanks), "the configuration was checked"

    def shard(model: Shardable) -> None:
        compute = engine.lay_out(model)
        assert compute is None, "rule F13 refuses engines that compute with other weights"

    context = WorkerContext(
        config=config,
        tokenizer=load_run_tokenizer(config),
        device=device,
        rank=rank,
        sharded=shard,
        on_host=loads_on_host(
            training_engine(config.actor_rollout_ref.actor.strategy, ranks), device
        ),
        here=engine.device,
        offloads_optimizer=engine.offload,
    )
    return STAGES[config.trainer.stage].worker(context)


def _passes(config: RunConfig) -> MicroBatching:
    return actor_passes(config.actor_rollout_ref.actor).on_ranks(ranks_per_sequence(config))
