"""Who gets which devices, and what is said when there are too few."""

from pathlib import Path

import pytest

from luyen.base.errors import UserError
from luyen.runtime.ray.pools import NodeOffer, PoolFacts, Slot, plan_pools
from tests.runs import report_of


def nodes(*cpus: int, gpus: int = 0) -> list[NodeOffer]:
    return [NodeOffer(name=f"node{i}", cpus=c, gpus=gpus) for i, c in enumerate(cpus)]


def facts(**changes) -> PoolFacts:
    given = {"device": "cpu", "nnodes": 1, "per_node": 2, "replicas": 2, **changes}
    return PoolFacts(**given)


def test_colocated_roles_share_each_device():
    pools = plan_pools(facts(trainers=("actor", "reference", "critic")), nodes(2))
    [pool] = pools.pools
    assert pool.roles == ("actor", "reference", "critic", "rollout")
    assert pool.groups == (2,)
    halves = tuple(Slot(pool="shared", group=0, bundle=i, share=0.5) for i in range(2))
    assert pools.slots == dict.fromkeys(("actor", "reference", "critic", "rollout"), halves)


def test_fewer_replicas_than_devices_are_spread_over_the_nodes():
    pools = plan_pools(facts(nnodes=2, replicas=3), nodes(2, 2))
    assert [(s.group, s.bundle) for s in pools.slots["actor"]] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert [(s.group, s.bundle) for s in pools.slots["rollout"]] == [(0, 0), (1, 0), (0, 1)]


def test_split_replicas_have_devices_of_their_own():
    pools = plan_pools(facts(rollout=(1, 3), replicas=3), nodes(2, 3))
    assert [(pool.name, pool.groups) for pool in pools.pools] == [
        ("rollout", (3,)),
        ("shared", (2,)),
    ]
    assert [(s.pool, s.group, s.bundle, s.share) for s in pools.slots["rollout"]] == [
        ("rollout", 0, i, 1.0) for i in range(3)
    ]
    assert {(slot.pool, slot.share) for slot in pools.slots["actor"]} == {("shared", 1.0)}


def test_machines_of_one_device_lie_anywhere():
    pools = plan_pools(facts(rollout=(3, 1), replicas=3), nodes(3, 1, 1))
    assert [pool.groups for pool in pools.pools] == [(2,), (1, 1, 1)]
    assert [(s.group, s.bundle) for s in pools.slots["rollout"]] == [(0, 0), (1, 0), (2, 0)]


def test_a_shortage_of_a_split_pool_names_both_pools():
    with pytest.raises(UserError) as caught:
        plan_pools(facts(device="cuda", per_node=4, rollout=(1, 4), replicas=4), nodes(8, gpus=6))
    assert str(caught.value) == (
        "actor_rollout_ref.rollout.n_gpus_per_node = 4: the cluster has too few GPUs. Needed: "
        "shared (actor): 1 x 4 = 4 GPUs; rollout (rollout): 1 x 4 = 4 GPUs; in all 8. There are: "
        "node0 6; in all 6. Group 1 of rollout finds no node with 4 left. Fix: make its pool "
        "smaller, or set rollout.nnodes to 0: copies then share the devices of the actor"
    )


def test_more_copies_than_a_pool_has_devices_are_refused():
    with pytest.raises(UserError, match="3 copies have 1 x 2 devices"):
        plan_pools(facts(rollout=(1, 2), replicas=3), nodes(8))


def test_a_reward_model_has_a_pool_of_its_own_or_shares():
    own = plan_pools(facts(reward=(2, 3)), nodes(3, 3, 2))
    assert [(pool.name, pool.groups) for pool in own.pools] == [
        ("reward model", (3, 3)),
        ("shared", (2,)),
    ]
    assert len(own.slots["reward model"]) == 6
    shared = plan_pools(facts(is_reward_shared=True), nodes(2))
    assert {slot.share for slot in shared.slots["reward model"]} == {0.3333}


def test_more_replicas_than_cores_share_and_than_gpus_do_not():
    crowded = plan_pools(facts(per_node=1, replicas=3), nodes(1))
    assert [slot.share for slot in crowded.slots["rollout"]] == [0.25] * 3
    with pytest.raises(UserError, match="3 copies would share 1 GPUs"):
        plan_pools(facts(device="cuda", per_node=1, replicas=3), nodes(4, gpus=1))


def test_a_shortage_shows_the_arithmetic():
    with pytest.raises(UserError) as caught:
        plan_pools(facts(nnodes=2, per_node=4, reward=(1, 2)), nodes(8, 1))
    assert str(caught.value) == (
        "reward.reward_model.n_gpus_per_node = 2: the cluster has too few cores. Needed: "
        "shared (actor, rollout): 2 x 4 = 8 cores; reward model (reward model): 1 x 2 = 2 cores; "
        "in all 10. There are: node0 8, node1 1; in all 9. Group 1 of reward model finds no node "
        "with 2 left. Fix: make its pool smaller, or set enable_resource_pool to false"
    )


def test_a_group_lies_on_one_node_even_where_the_sum_would_do():
    with pytest.raises(UserError, match="Group 1 of shared finds no node with 4 left"):
        plan_pools(facts(per_node=4), nodes(3, 3))
    with pytest.raises(UserError, match="There are: no node; in all 0"):
        plan_pools(facts(), [])


def test_gpus_are_counted_where_the_device_is_a_gpu():
    pools = plan_pools(facts(device="cuda", per_node=8, replicas=8), nodes(96, gpus=8))
    assert len(pools.slots["rollout"]) == 8
    with pytest.raises(UserError, match="too few GPUs"):
        plan_pools(facts(device="cuda"), nodes(96))


def test_what_a_configuration_asks_for(tmp_path: Path):
    words = (
        "trainer.device=cpu",
        "trainer.nnodes=2",
        "trainer.n_gpus_per_node=4",
        "actor_rollout_ref.rollout.data_parallel_size=8",
        "actor_rollout_ref.actor.use_kl_loss=true",
    )
    report = report_of(tmp_path, *words)
    found = PoolFacts.of(report.config, report.plan.where)
    assert found == PoolFacts(
        device="cpu", nnodes=2, per_node=4, replicas=8, trainers=("actor", "reference")
    )


def test_a_pool_of_its_own_is_read_from_the_configuration(tmp_path: Path):
    words = ("trainer.n_gpus_per_node=4", "actor_rollout_ref.rollout.nnodes=2")
    report = report_of(tmp_path, *words)
    found = PoolFacts.of(report.config, report.plan.where)
    assert (found.rollout, found.replicas, found.is_split) == ((2, 4), 8, True)
    one = report_of(tmp_path, "actor_rollout_ref.rollout.nnodes=1")
    assert one.plan.where.runtime == "ray", "two devices are two processes"


def test_reference_and_critic_have_pools_of_their_own(tmp_path: Path):
    words = (
        "trainer.n_gpus_per_node=2",
        "algorithm.adv_estimator=gae",
        "actor_rollout_ref.actor.use_kl_loss=true",
        "actor_rollout_ref.ref.nnodes=1",
        "actor_rollout_ref.ref.n_gpus_per_node=1",
        "critic.nnodes=2",
    )
    report = report_of(tmp_path, *words)
    found = PoolFacts.of(report.config, report.plan.where)
    assert (found.trainers, found.reference, found.critic) == (("actor",), (1, 1), (2, 2))
    pools = plan_pools(found, nodes(4, 3))
    assert [pool.words("cpu") for pool in pools.pools] == [
        "shared (actor, rollout): 1 x 2 = 2 cores",
        "critic (critic): 2 x 2 = 4 cores",
        "reference (reference): 1 x 1 = 1 cores",
    ]
    assert [(s.pool, s.group, s.bundle, s.share) for s in pools.slots["critic"]] == [
        ("critic", group, i, 1.0) for group in range(2) for i in range(2)
    ]
    with pytest.raises(UserError, match="Group 2 of critic finds no node with 2 left"):
        plan_pools(found, nodes(4, 1))


def test_an_empty_pool_of_the_reward_model_is_refused():
    with pytest.raises(UserError, match="its own pool of 0 x 2 devices is empty"):
        plan_pools(facts(reward=(0, 2)), nodes(8))
