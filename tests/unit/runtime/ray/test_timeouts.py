"""The keys of `trainer.timeouts` reach what waits, and what waits too long says so."""

from pathlib import Path
from typing import Any

import pytest

from luyen.base.errors import UserError
from luyen.config.schema.run import RunConfig
from luyen.config.schema.trainer import TimeoutsConfig
from luyen.runtime.ray.engines import RayEngines
from luyen.runtime.ray.pools import PoolFacts, plan_pools
from tests.runs import report_of
from tests.unit.runtime.ray.fakes import FakeReplica, Fleet

pytest.importorskip("ray", reason="the extra `ray` is not installed")
SET = TimeoutsConfig(devices_s=11, start_s=12, silence_s=13, progress_s=14, collective_s=15)
WORDS = [f"trainer.timeouts.{name}={value}" for name, value in SET.model_dump().items()]


class Seen(Exception):
    """What a part was built with."""


def config(folder: Path, *words: str) -> RunConfig:
    return report_of(folder, "trainer.runtime=ray", *WORDS, *words).config


def raise_timeouts(*_: Any, timeouts: Any, **__: Any) -> Any:
    raise Seen(timeouts)


class Connected:
    """A cluster of one node, which others started."""

    is_own = False

    def nodes(self) -> tuple[Any, ...]:
        from luyen.runtime.ray.pools import NodeOffer

        return (NodeOffer(name="here", cpus=8, gpus=0),)

    def disconnect(self) -> None:
        """Nothing is connected."""


class Placed:
    def options(self, slot: Any) -> dict[str, Any]:
        return {}

    def free(self) -> None:
        """Nothing is reserved."""


class Ranks:
    watch = None

    def stop(self) -> None:
        """Nothing runs."""


class Engines:
    def close(self) -> None:
        """Nothing runs."""


@pytest.mark.parametrize("waiting", ["PlacedPools", "RankGroup", "start_engines", "RayScorer"])
def test_every_part_of_a_cluster_gets_the_keys(
    waiting: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    import luyen.runtime.ray.roles  # noqa: F401 - its annotations name what is replaced below
    from luyen.train.builders import ray as builder
    from luyen.train.builders.run import learning_rules

    made = {
        "PlacedPools": ("actors", Placed()),
        "RankGroup": ("ranks", Ranks()),
        "start_engines": ("actors", Engines()),
        "RayScorer": ("reward_model", None),
    }
    for name, (module, part) in made.items():
        build = raise_timeouts if name == waiting else lambda *_, part=part, **__: part
        monkeypatch.setattr(f"luyen.runtime.ray.{module}.{name}", build)
    monkeypatch.setattr(builder, "connect", lambda **_: Connected())
    report = report_of(tmp_path, "trainer.runtime=ray", *WORDS, "reward.reward_model.enable=true")
    needs: Any = learning_rules(report.config).needs
    with pytest.raises(Seen) as caught:
        builder.build_ray_roles(report.config, Any, needs, report.plan.where)  # type: ignore[arg-type]
    assert caught.value.args == (SET,)


def test_ranks_wait_for_each_other_as_long_as_the_key_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from luyen.train.builders import ray as builder

    def joined(*_: Any, timeout_s: float, **__: Any) -> Any:
        raise Seen(timeout_s)

    monkeypatch.setattr("luyen.runtime.training.join_ranks", joined)
    needs: Any = None
    with pytest.raises(Seen) as caught:
        builder.make_rank(config(tmp_path), needs, "cpu", ("actor",), 0, 2, "file:///nowhere")
    assert caught.value.args == (15,)


def test_a_run_without_a_ready_replica_ends_after_the_seconds_of_the_key(
    monkeypatch: pytest.MonkeyPatch,
):
    def mute(replica: FakeReplica) -> None:
        replica.unanswered = {"facts"}

    monkeypatch.setattr("luyen.runtime.ray.replica_pool._POLL_S", 0.0)
    with pytest.raises(UserError, match="no replica was ready within 0 s"):
        RayEngines(Fleet(mute), replicas=1, timeouts=TimeoutsConfig(start_s=0.1))


def test_devices_that_are_not_free_are_waited_for_as_long_as_the_key_says(
    monkeypatch: pytest.MonkeyPatch,
):
    from luyen.runtime.ray import actors

    class Group:
        def wait(self, timeout_seconds: float) -> bool:
            waited.append(timeout_seconds)
            return False

    waited: list[float] = []
    monkeypatch.setattr(actors, "placement_group", lambda *_, **__: Group())
    monkeypatch.setattr(actors, "remove_placement_group", lambda _: None)
    monkeypatch.setattr(actors.ray, "available_resources", dict)
    facts = PoolFacts(device="cpu", nnodes=1, per_node=2, replicas=1)
    pools = plan_pools(facts, Connected().nodes())
    with pytest.raises(UserError, match="was not free within 11 s"):
        actors.PlacedPools(pools, timeouts=SET)
    assert waited == [11]


class Growing:
    """A cluster with one node more, of two cores, each time that it is looked at."""

    def __init__(self, *, is_own: bool = False) -> None:
        self.is_own = is_own
        self.looks = 0

    def nodes(self) -> tuple[Any, ...]:
        from luyen.runtime.ray.pools import NodeOffer

        self.looks += 1
        return tuple(NodeOffer(name=f"n{i}", cpus=2) for i in range(self.looks))


TWO_NODES = PoolFacts(device="cpu", nnodes=2, per_node=2, replicas=4)


def test_nodes_that_are_not_there_yet_are_waited_for_and_the_user_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    from luyen.runtime.ray import actors

    monkeypatch.setattr(actors, "_NODES_POLL_S", 0.0)
    growing: Any = Growing()
    nodes = actors.wait_for_nodes(TWO_NODES, growing, SET)
    assert plan_pools(TWO_NODES, nodes).slots["actor"]
    assert growing.looks == 2
    words = capsys.readouterr()
    assert "waiting up to 11 s (trainer.timeouts.devices_s) for nodes" in words.out + words.err


def test_nodes_are_not_waited_for_beyond_the_key_nor_in_a_cluster_that_cannot_grow(
    monkeypatch: pytest.MonkeyPatch,
):
    from luyen.runtime.ray import actors

    monkeypatch.setattr(actors, "_NODES_POLL_S", 0.0)
    one: Any = Growing(is_own=True)
    assert len(actors.wait_for_nodes(TWO_NODES, one, SET)) == 1
    fixed: Any = Connected()
    short = TimeoutsConfig(devices_s=0.05)
    nine = PoolFacts(device="cpu", nnodes=1, per_node=9, replicas=9)
    with pytest.raises(UserError, match="the cluster has too few cores"):
        plan_pools(nine, actors.wait_for_nodes(nine, fixed, short))
