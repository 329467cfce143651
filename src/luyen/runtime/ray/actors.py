"""Ray actors of the replicas, and the placement groups they run in."""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, final

import ray
from ray.exceptions import RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from luyen.base.errors import UserError
from luyen.config.schema.trainer import TimeoutsConfig
from luyen.rollout.protocol import RolloutEngine
from luyen.runtime.monitoring import CallResult, RoleMonitor, unwrap_result
from luyen.runtime.ray.cluster import Connection
from luyen.runtime.ray.engines import RayEngines
from luyen.runtime.ray.health import PROCESS_GONE, failure_reason, is_object_lost
from luyen.runtime.ray.messages import ProcessDied, RanksLost, RemoteError, ReplyCallback
from luyen.runtime.ray.pools import (
    Device,
    DevicePools,
    NodeOffer,
    PoolFacts,
    Slot,
    has_room,
)
from luyen.runtime.ray.replica import ReplicaProcess
from luyen.runtime.ray.replica_ranks import MakeSplit, SplitReplicaHandle
from luyen.telemetry.output import say

_ONE_CORE: Mapping[str, Any] = {"num_cpus": 1}
_NODES_POLL_S = 1.0


def start_engines(
    make: Callable[[int], RolloutEngine],
    *,
    replicas: int,
    places: Sequence[Mapping[str, Any]] | None = None,
    timeouts: TimeoutsConfig | None = None,
    watch: RoleMonitor | None = None,
) -> RayEngines:
    """Start one engine in each of `replicas` processes; returns when all are ready.

    `make` is pickled and called in each process with its index; it imports the plugins there.
    `places` are the options of each actor (`PlacedPools.options`), also of a restarted one; None: a
    core each, on any node. `watch` receives the reports of the processes.
    """
    options = places or [_ONE_CORE] * replicas
    assert len(options) == replicas, f"{len(options)} places for {replicas} replicas"
    # Pickled once, not for every replica and every restart.
    shared = ray.put(make)

    monitor = watch or RoleMonitor()

    def start(index: int) -> RayReplicaHandle:
        return RayReplicaHandle(_begin(shared, index, options[index]), index, monitor)

    return RayEngines(start, replicas=replicas, timeouts=timeouts)


def start_split_engines(
    make: MakeSplit,
    *,
    ranks: int,
    places: Sequence[Mapping[str, Any]],
    timeouts: TimeoutsConfig | None = None,
    watch: RoleMonitor | None = None,
) -> RayEngines:
    """`start_engines` where `ranks` processes share each engine, in consecutive places."""
    shared, monitor = ray.put(make), watch or RoleMonitor()

    def start(index: int) -> SplitReplicaHandle:
        own = places[index * ranks : (index + 1) * ranks]
        return SplitReplicaHandle(
            shared, index, own, monitor, node=node_id, open_handle=RayReplicaHandle
        )

    return RayEngines(start, replicas=len(places) // ranks, timeouts=timeouts)


def _begin(make: Any, index: int, options: Mapping[str, Any]) -> Any:
    actor: Any = ray.remote(ReplicaProcess).options(max_restarts=0, max_concurrency=1000, **options)
    return actor.remote(make, index, folder=os.getcwd(), node=node_id)


def node_id() -> str:
    """Id of the node that this process runs on."""
    return ray.get_runtime_context().get_node_id()


@final
class RayReplicaHandle:
    """Handle of a replica that is a Ray actor."""

    def __init__(self, actor: Any, index: int, watch: RoleMonitor) -> None:
        """`watch` receives the reports of the replica."""
        self._actor = actor
        self._index = index
        self._watch = watch

    def call(self, method: str, *arguments: Any, reply: ReplyCallback | None = None) -> None:
        """Call a method of the replica without waiting; `ProcessDied` if its process is gone."""
        sent = time.time()
        found = self._actor.carry_out.remote(reply is not None, method, *arguments)
        if reply is not None:
            found.future().add_done_callback(lambda future: self._pass_on(future, reply, sent))

    def _pass_on(self, future: Future[Any], reply: ReplyCallback, sent: float) -> None:
        back, error = time.time(), future.exception()
        if error is not None:
            reply(None, _meaning(error))
            return
        answer: CallResult = future.result()
        reply(
            unwrap_result(answer, self._watch, "rollout", self._index, sent=sent, back=back), None
        )

    def kill(self) -> None:
        """Kill the process of the replica."""
        ray.kill(self._actor, no_restart=True)


def _meaning(error: BaseException) -> BaseException:
    """The error of this package that an error of Ray corresponds to."""
    if isinstance(error, PROCESS_GONE):
        return ProcessDied(failure_reason(error))
    if is_object_lost(error):
        return RanksLost("the published weights were lost with the rank that stored them")
    if isinstance(error, RayTaskError):
        cause = error.cause
        return cause if isinstance(cause, Exception) else RemoteError("a replica", str(error))
    return error


# Nodes, and the placement groups of the device pools.


def wait_for_nodes(
    facts: PoolFacts, connection: Connection, timeouts: TimeoutsConfig
) -> Sequence[NodeOffer]:
    """Living nodes, as soon as they have the devices of a run, or after `devices_s`.

    Nodes may still join a cluster that runs already, or replace one that was lost; a cluster of
    this process stays as it is.
    """
    until = time.monotonic() + timeouts.devices_s
    nodes = connection.nodes()
    if not connection.is_own and not has_room(facts, nodes):
        say(
            f"waiting up to {timeouts.devices_s:.0f} s (trainer.timeouts.devices_s) for nodes: the "
            f"cluster has {len(nodes)}, with too few devices for this run"
        )
    while not (connection.is_own or has_room(facts, nodes) or time.monotonic() > until):
        time.sleep(_NODES_POLL_S)
        nodes = connection.nodes()
    return nodes


@final
class PlacedPools:
    """Devices reserved on the cluster until `free`, or until this process ends.

    The devices of a group are on one node. When a node is lost, Ray moves its groups to another
    node with free devices, and restarted actors follow.
    """

    def __init__(self, pools: DevicePools, *, timeouts: TimeoutsConfig | None = None) -> None:
        """Reserve the groups, the largest first; a UserError if one is not free in `devices_s`."""
        timeouts = timeouts or TimeoutsConfig()
        wait_s = timeouts.devices_s
        self._device: Device = pools.device
        self._groups: dict[tuple[str, int], PlacementGroup] = {}
        bundle = {"CPU": 1.0, "GPU": 1.0} if pools.device == "cuda" else {"CPU": 1.0}
        for pool in pools.pools:
            for number, size in enumerate(pool.groups):
                group = placement_group([bundle] * size, strategy="STRICT_PACK")
                self._groups[pool.name, number] = group
                if not group.wait(timeout_seconds=wait_s):
                    self.free()
                    free = ray.available_resources()
                    left = {name: free.get(name, 0.0) for name in bundle}
                    why = (
                        f"group {number + 1} of pool {pool.name} ({size} x {bundle} on one node) "
                        f"was not free within {wait_s:.0f} s; free on all nodes: {left}"
                    )
                    fix = "wait until other jobs of the cluster end, or request fewer devices"
                    raise UserError("trainer.nnodes", len(pool.groups), why, fix)

    def options(self, slot: Slot) -> Mapping[str, Any]:
        """Ray options of an actor in this slot."""
        where = PlacementGroupSchedulingStrategy(
            self._groups[slot.pool, slot.group], placement_group_bundle_index=slot.bundle
        )
        gpus = {"num_gpus": slot.share} if self._device == "cuda" else {}
        return {"num_cpus": slot.share, "scheduling_strategy": where, **gpus}

    def free(self) -> None:
        """Remove the placement groups, which ends their actors. Freeing twice is allowed."""
        for group in self._groups.values():
            remove_placement_group(group)
        self._groups = {}
