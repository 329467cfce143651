"""A cluster of three nodes: replicas lie as planned, and a lost node changes nothing."""

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from luyen.models.weights import trained_parameters
from luyen.rollout.protocol import Completion, generate
from luyen.runtime.ray.cluster import Connection, connect
from luyen.runtime.ray.pools import PoolFacts, plan_pools
from tests.generation import native, request
from tests.tiny_models import tiny_policy
from tests.unit.runtime.ray.factories import begin_publication, tiny_engine

pytest.importorskip("ray", reason="the extra `ray` is not installed")
REQUESTS = [request(6 + i, 80, name=f"r{i}", samples=2) for i in range(9)]


@pytest.fixture(scope="module")
def three() -> Iterator[tuple[Any, Connection]]:
    """A head without cores for us and three nodes of two; the cluster was there before we came."""
    Cluster = pytest.importorskip("ray.cluster_utils").Cluster

    # A lost node is noticed in seconds, not in half a minute.
    quick = {"health_check_period_ms": 500, "health_check_failure_threshold": 3}
    small = {"object_store_memory": 80 << 20, "include_dashboard": False, "_system_config": quick}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **small})
    for _ in range(3):
        cluster.add_node(num_cpus=2, object_store_memory=80 << 20)
    connection = connect(cluster.address, threads=1)
    yield cluster, connection
    connection.disconnect()
    cluster.shutdown()


@pytest.mark.slow
def test_replicas_lie_as_planned_and_outlive_a_node(three: tuple[Any, Connection]):
    from luyen.runtime.ray.actors import PlacedPools, start_engines

    cluster, connection = three
    assert not connection.is_own
    assert sorted(node.cpus for node in connection.nodes()) == [0, 2, 2, 2]
    facts = PoolFacts(device="cpu", nnodes=2, per_node=2, replicas=3)
    pools = plan_pools(facts, connection.nodes())
    placed = PlacedPools(pools)
    engines = start_engines(
        tiny_engine, replicas=3, places=[placed.options(slot) for slot in pools.slots["rollout"]]
    )
    where = [member.facts.node for member in engines.replica_pool.members if member.facts]
    assert where[0] == where[2] != where[1]
    policy = tiny_policy("llama", seed=3)
    begin_publication(engines, trained_parameters(policy), version=1).wait()

    [lost] = [node for node in cluster.worker_nodes if node.node_id == where[1]]
    found: list[Completion] = []

    def finished(completion: Completion) -> None:
        found.append(completion)
        if len(found) == 4:
            cluster.remove_node(lost, allow_graceful=False)
            # Here its workers would live on for a while; on a machine that is gone they do not.
            os.kill(engines.replica_pool.members[1].facts.pid, signal.SIGKILL)

    assert generate(engines, REQUESTS, finished=finished) == generate(native(policy), REQUESTS)
    engines.replica_pool.wait_until(
        lambda: all(member.is_ready for member in engines.replica_pool.members)
    )
    now = [member.facts.node for member in engines.replica_pool.members if member.facts]
    assert [now[0], now[2]] == [where[0], where[2]]
    assert now[1] not in where, "the third node took the place of the lost one"
    assert generate(engines, REQUESTS) == generate(native(policy), REQUESTS)
    engines.stop()
    placed.free()
