"""A replica copies weights from the memory of a rank on the same GPU: both are Ray actors."""

import os
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from luyen.base.digests import read_digests
from luyen.config.schema.actor_rollout_ref import OptimConfig
from luyen.engine.actor import ActorEngine
from luyen.engine.batch import MicroBatching
from luyen.engine.optim import build_optimizer
from luyen.rollout.protocol import RolloutEngine, generate
from luyen.runtime.ray.cluster import connect
from luyen.runtime.weight_sync import WeightSync
from luyen.runtime.worker import TrainWorker
from luyen.studio.timeline import read_processes
from tests.generation import native, request
from tests.runs import MODEL, Ran, same_weights, train
from tests.tiny_models import DEVICE, tiny_policy

pytest.importorskip("ray", reason="the extra `ray` is not installed")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        DEVICE != "cuda" or not torch.cuda.is_available(),
        reason="needs a GPU and LUYEN_TEST_DEVICE=cuda",
    ),
]
PLACE = {"num_cpus": 1, "num_gpus": 0.3}
EXPANDABLE = {"env_vars": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}}
STEP = 1.25
REQUESTS = [request(7, 9, samples=2), request(12, 5, samples=3)]


class Stepping:
    """A rank that makes a step of its own."""

    def __init__(self, worker: TrainWorker) -> None:
        self.weights = worker.weights
        self.weight_sums = worker.weight_sums
        self.weights_in_place = worker.weights_in_place
        self._policy = worker.actor.policy

    def step(self) -> None:
        with torch.no_grad():
            for parameter in self._policy.parameters():
                parameter.mul_(STEP)


def make_rank(rank: int, *_: object) -> Any:
    """A tiny policy in bf16 with its optimizer."""
    policy = tiny_policy("llama", seed=3).to(torch.bfloat16)
    optimizer = build_optimizer(policy, OptimConfig(lr=1e-6))
    actor = ActorEngine(policy, optimizer, MicroBatching(max_tokens=512), temperature=1.0)
    return Stepping(TrainWorker(actor=actor, reference=None, critic=None, rank=rank))


def make_replica(index: int, *, seed: int = 9) -> RolloutEngine:
    """The same shape with other weights."""
    return native(tiny_policy("llama", seed=seed + index).to(torch.bfloat16))


class Noted:
    """Keeps the ways of publications."""

    def __init__(self) -> None:
        self.ways: list[str] = []

    def published(self, *, way: str, **_: Any) -> None:
        self.ways.append(way)


class Run:
    """A rank and some replicas on one GPU."""

    def __init__(self, replicas: int = 1, *, rank_place: dict[str, Any] | None = None) -> None:
        from luyen.runtime.ray.actors import start_engines
        from luyen.runtime.ray.ranks import RankGroup
        from luyen.runtime.ray.roles import share_memory

        self.ranks: Any = RankGroup(make_rank, places=[{**PLACE, **(rank_place or {})}])
        self.engines = start_engines(
            partial(make_replica), replicas=replicas, places=[PLACE] * replicas
        )
        self.pool = self.engines.replica_pool
        noted: Any = Noted()
        self.ways: list[str] = noted.ways
        self.sync = WeightSync(self.ranks, self.pool, noted)
        share_memory(self.ranks, self.pool)
        self.version = 0

    def publish(self) -> dict[str, str]:
        """Make a step and publish; the digests of the rank, which all replicas have too."""
        self.sync.release()
        self.ranks.all(Stepping.step)
        self.sync.change()
        self.version += 1
        self.sync.begin(self.version).wait()
        assert self.sync.digests is not None
        found = self.engines.fingerprint()
        assert found is not None
        wanted = {n.removeprefix("actor/"): d for n, d in self.sync.digests.items()}
        assert found.weights == {n: d for n, d in wanted.items() if n in found.weights}
        return dict(self.sync.digests)

    def stop(self) -> None:
        self.pool.stop()
        self.ranks.stop()


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    connection = connect(cpus=4)
    yield
    connection.disconnect()


@pytest.mark.usefixtures("cluster")
def test_replicas_read_in_place_what_others_get_through_the_host(
    capsys: pytest.CaptureFixture[str],
):
    run = Run(2)
    in_place = [run.publish(), run.publish()]
    drawn = generate(run.engines, REQUESTS)
    assert run.ways == ["gpu", "gpu"]
    assert in_place[0] != in_place[1]

    # A replica that is killed comes back and reads what is still there.
    os.kill(run.pool.members[0].facts.pid, signal.SIGKILL)  # type: ignore[union-attr]
    run.pool.wait_until(lambda: run.pool.restarts == 1)
    run.pool.wait_until(lambda: all(member.is_ready for member in run.pool.members))
    assert all(member.facts.reads_ranks for member in run.pool.members if member.facts)
    assert generate(run.engines, REQUESTS) == drawn

    # One that is killed and back after the step has begun waits for the next weights.
    os.kill(run.pool.members[1].facts.pid, signal.SIGKILL)  # type: ignore[union-attr]
    run.publish()
    run.pool.wait_until(lambda: all(member.is_ready for member in run.pool.members))
    run.publish()
    assert run.ways == ["gpu"] * 4
    run.stop()

    host = Run(1)
    host.ranks.form = lambda: "bytes"
    assert [host.publish(), host.publish()] == in_place
    assert generate(host.engines, REQUESTS) == drawn
    assert host.ways == ["host", "host"]
    host.stop()

    segments = Run(1, rank_place={"runtime_env": EXPANDABLE})
    assert [segments.publish(), segments.publish()] == in_place
    assert generate(segments.engines, REQUESTS) == drawn
    assert segments.ways == ["host", "host"]
    assert "expandable_segments" in "".join(capsys.readouterr())
    segments.stop()


WORDS = ("trainer.device=cuda", "trainer.total_training_steps=3")
KINDS = {"all weights": (), "an adapter": (f"{MODEL}.lora_rank=4",)}


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_learns_the_same_whichever_way_weights_are_published(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    words = (*WORDS, *KINDS[kind])
    here = train(tmp_path / "here", *words)
    monkeypatch.setenv("RAY_ADDRESS", "local")
    found = {"gpu": train(tmp_path / "gpu", *words, "trainer.runtime=ray")}
    if kind == "all weights":
        monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
        found["host"] = train(tmp_path / "host", *words, "trainer.runtime=ray")
    for way, ran in found.items():
        assert ways_of(ran) == {way}
        assert same_weights(ran, here), way
        assert chain(ran) == chain(here), way


def ways_of(ran: Ran) -> set[str]:
    """How the weights of a run were published."""
    controller, *_ = read_processes(ran.root)
    return {span.facts["way"] for span in controller.spans if "way" in span.facts}


def chain(ran: Ran) -> list[str]:
    return [digest.chain for digest in read_digests(ran.root / "digests.jsonl")]
