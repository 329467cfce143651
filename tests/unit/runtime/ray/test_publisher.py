"""Weights get to the replicas when they are published, and only those that are right count."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from luyen.base.errors import UserError
from luyen.base.heartbeat import HEART
from luyen.config.schema.trainer import TimeoutsConfig
from luyen.rollout.protocol import Request, Sampling
from luyen.runtime.ray.engines import RayEngines
from luyen.runtime.ray.messages import RanksLost
from luyen.runtime.weight_sync import WeightSync
from luyen.runtime.weights import GatheredWeights
from luyen.runtime.worker import split_learned_state
from tests.unit.runtime.ray.fakes import FakeReplica, Fleet

FORM = "float32 [1]"
SAMPLING = Sampling(max_new_tokens=3)


class FakeRanks:
    """Two ranks, each with a part of the sum of one weight; a step changes it."""

    def __init__(self) -> None:
        self.weight = 1
        self.gathered = 0
        self.is_lost = False
        self.watch = self
        self.noted: list[dict[str, Any]] = []

    def published(self, **facts: Any) -> None:
        """What a watch hears."""
        self.noted.append(facts)

    def gather(self, form: str | None = None) -> Callable[[], GatheredWeights]:
        self.gathered += 1
        masters = {"adamw": {"state": {}}, "masters": ["x"]}
        state = {"actor": {"w": self.digest()}, "critic": {"w": "y"}}
        all_state: Any = {**state, "actor_optimizer": masters, "critic_optimizer": masters}
        digests: Any = split_learned_state(all_state)[1]
        assert len(digests) == 4
        found = GatheredWeights(
            parts=[(("w", self.digest()),)], bytes=4, seconds=0.0, digests=digests
        )
        return lambda: found

    def raise_if_lost(self) -> None:
        if self.is_lost:
            raise RanksLost("rank 0 gave no sign of life for 121 s")

    def digest(self) -> str:
        return f"{FORM} {self.weight:016x}"


class Run:
    """What the roles do, step after step."""

    def __init__(self, change: Callable[[FakeReplica], None] = lambda _: None) -> None:
        self.fleet = Fleet(change)
        self.engines = RayEngines(self.fleet, replicas=2, timeouts=TimeoutsConfig(progress_s=10))
        self.ranks: Any = FakeRanks()
        self.weight_sync = WeightSync(self.ranks, self.engines.replica_pool, self.ranks.watch)

    def learn(self) -> None:
        self.ranks.weight += 1
        self.weight_sync.change()

    def publish(self, version: int, way: str = "in turn") -> None:
        if way == "beside others":
            asyncio.run(self.weight_sync.publish_extra(version, keep=[version - 1]))
        else:
            self.weight_sync.begin(version).wait()

    def held(self) -> list[dict[str, str] | None]:
        return [replica.digests for replica in self.fleet.living()]


def test_weights_are_gathered_and_sent_once_for_each_publication():
    run = Run()
    run.publish(0)
    run.learn()
    coming = run.weight_sync.begin(1)
    coming.wait()
    coming.wait()
    assert run.held() == [{"w": f"{FORM} {2:016x}"}] * 2
    assert run.ranks.gathered == 2
    assert [(one["version"], one["size"], one["parameters"]) for one in run.ranks.noted] == [
        (0, 4, 1),
        (1, 4, 1),
    ]


def test_weights_that_ranks_gather_already_are_not_gathered_again():
    run = Run()
    run.weight_sync.change(run.ranks.gather())
    run.weight_sync.begin(0).wait()
    assert run.ranks.gathered == 1
    assert run.held() == [{"w": run.ranks.digest()}] * 2


def test_digests_are_those_of_the_newest_publication_until_the_ranks_take_a_step():
    run = Run()
    assert run.weight_sync.digests is None
    run.publish(0)
    assert run.weight_sync.digests is not None
    assert run.weight_sync.digests["actor/w"] == run.ranks.digest()
    run.learn()
    assert run.weight_sync.digests is None
    for _ in range(2):  # asking again publishes nothing
        assert run.weight_sync.digests is None
    assert run.ranks.gathered == 1


def test_only_the_version_that_was_published_may_be_generated_with():
    run = Run()
    with pytest.raises(AssertionError, match="no weights were published"):
        run.weight_sync.demand(0)
    run.publish(0)
    run.weight_sync.demand(0)
    run.learn()
    coming = run.weight_sync.begin(1)
    run.weight_sync.demand(1)
    with pytest.raises(AssertionError, match="version 1 was published, not 0"):
        run.weight_sync.demand(0)
    coming.wait()
    run.weight_sync.demand(1)
    assert run.weight_sync.newest == 1


@pytest.mark.parametrize("way", ["in turn", "beside others"])
def test_weights_that_nobody_can_get_any_more_are_a_lost_rank_and_no_lost_replica(
    way: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("luyen.runtime.ray.replica_pool._POLL_S", 0.0)
    run = Run()
    run.publish(0)
    for replica in run.fleet.begun:
        replica.unanswered = {"load", "load_last", "confirm"}
    run.ranks.is_lost = True
    run.learn()
    with pytest.raises(RanksLost, match="rank 0 gave no sign of life"):
        run.publish(1, way)
    with pytest.raises(RanksLost, match="rank 0"):
        run.engines.advance()
    assert run.engines.replica_pool.restarts == 0


def test_a_checkpoint_makes_every_version_unknown():
    run = Run()
    run.publish(3)
    run.ranks.weight = 9
    run.weight_sync.forget()
    with pytest.raises(AssertionError, match="no weights were published"):
        run.weight_sync.demand(3)
    run.publish(3)
    assert run.held() == [{"w": run.ranks.digest()}] * 2


def test_a_replica_that_got_something_else_stops_the_run_before_anything_is_drawn():
    def deaf(replica: FakeReplica) -> None:
        if replica.index == 1:
            replica.on_load = lambda *_: None
            replica.digests = {"w": f"{FORM} {1:016x}"}

    run = Run(deaf)
    run.publish(0)
    run.learn()
    with pytest.raises(UserError, match="replica 1 does not hold"):
        run.publish(1)


def test_a_replica_that_is_lost_on_the_way_gets_them_when_it_is_back():
    run = Run()
    run.publish(0)
    run.learn()
    coming = run.weight_sync.begin(1)
    run.fleet.begun[0].is_dead = True
    coming.wait()
    members = run.engines.replica_pool.members
    run.engines.replica_pool.wait_until(lambda: all(member.is_ready for member in members))
    assert len(run.fleet.begun) == 3
    assert run.fleet.begun[2].digests == {"w": run.ranks.digest()}


def test_replicas_that_begin_again_while_weights_arrive_are_signs_of_life_of_the_run():
    run = Run()
    run.publish(0)
    run.learn()
    coming = run.weight_sync.begin(1)
    for replica in run.fleet.begun:
        replica.is_dead = True
    before = HEART.count
    coming.wait()
    assert HEART.count - before >= 3, "one begins, says who it is, and holds the weights"


def test_requests_of_weights_on_their_way_say_which_they_wait_for():
    run = Run()
    run.publish(0)
    run.learn()
    run.weight_sync.begin(1)
    run.engines.submit(Request(id="a", tokens=(1,), keys=(3,), sampling=SAMPLING, weights=1))
    run.engines.send()
    submits = [call for replica in run.fleet.begun for call in replica.calls if call[0] == "submit"]
    assert [call[3] for call in submits] == [run.engines.replica_pool.publication_of(1)]
    assert run.engines.replica_pool.publication_of(1) == run.engines.replica_pool.publication == 2
