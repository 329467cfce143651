"""Who reads weights in the memory of a rank, for how long, and what everybody else gets."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from luyen.config.schema.trainer import TimeoutsConfig
from luyen.runtime.gpu_memory import MappedWeights, MemoryProbe
from luyen.runtime.ray.engines import RayEngines
from luyen.runtime.ray.messages import ProcessDied
from luyen.runtime.ray.replica import Replica
from luyen.runtime.ray.roles import share_memory
from luyen.runtime.weight_sync import WeightSync
from luyen.runtime.weights import GatheredWeights
from tests.unit.runtime.ray.fakes import FakeReplica, Fleet

FORM = "float32 [1]"


class Mapped(dict[str, str]):
    """Weights in the memory of the ranks: a replica reads what they have when it looks."""


class OneRank:
    """A rank on a GPU, whose weight is a number; `forms` are those it was asked for."""

    def __init__(self, probe: MemoryProbe | str | None) -> None:
        self.weight = 1
        self.forms: list[str] = []
        self.form: Callable[[], Any] = lambda: "bytes"
        self.watch = self
        self.ways: list[str] = []
        self._probe = probe

    def probe(self) -> MemoryProbe | str | None:
        return self._probe

    def published(self, *, way: str, **_: Any) -> None:
        self.ways.append(way)

    def digests(self) -> dict[str, str]:
        return {"w": f"{FORM} {self.weight:016x}"}

    def gather(self, form: str | None = None) -> Callable[[], GatheredWeights]:
        wanted = form or self.form()
        self.forms.append(wanted)
        part, mapped = tuple(self.digests().items()), Mapped(self.digests())
        found = GatheredWeights(
            parts=[part] if wanted != "mapped" else [],
            bytes=4,
            seconds=0.0,
            digests={f"actor/{name}": text for name, text in self.digests().items()},
            mapped=mapped if wanted != "bytes" else None,  # type: ignore[arg-type]
        )
        return lambda: found

    def raise_if_lost(self) -> None:
        """It lives."""


def probe_of(gpu: str) -> MemoryProbe:
    nothing = MappedWeights(gpu=gpu, allocations=(), tensors=(), bytes=0)
    return MemoryProbe(weights=nothing, secret="")


class Run:
    """A rank on GPU-0 and a replica on each of these GPUs."""

    def __init__(self, *gpus: str, probe: MemoryProbe | str | None = None) -> None:
        self.gpus = list(gpus)
        self.fleet = Fleet(self._place)
        timeouts = TimeoutsConfig(progress_s=10)
        self.engines = RayEngines(self.fleet, replicas=len(gpus), timeouts=timeouts)
        self.pool = self.engines.replica_pool
        self.rank: Any = OneRank(probe_of("GPU-0") if probe is None else probe)
        self.sync = WeightSync(self.rank, self.pool, self.rank)
        share_memory(self.rank, self.pool)

    def _place(self, replica: FakeReplica) -> None:
        replica.gpu = self.gpus[replica.index]

    def publish(self, version: int) -> None:
        self.sync.release()
        self.sync.change()
        self.rank.weight += 1
        self.sync.begin(version).wait()

    def loads(self) -> list[str]:
        """Per replica, how it got its last weights."""
        return [
            next((type(c[4]).__name__ for c in reversed(one.calls) if c[0] == "load_last"), "-")
            for one in self.fleet.begun
        ]

    def lose(self, index: int) -> FakeReplica:
        """End the newest process of a replica, and wait until another one has started."""
        count = len(self.fleet.begun)
        next(r for r in reversed(self.fleet.begun) if r.index == index).is_dead = True
        member = self.pool.members[index]
        self.pool.call(member, Replica.fingerprint, then=lambda *_: None)
        self.pool.wait_until(lambda: len(self.fleet.begun) > count)
        return self.fleet.begun[-1]


@pytest.mark.parametrize(
    ("gpus", "form", "ways", "said"),
    [
        (("GPU-0", "GPU-0"), "mapped", ["Mapped", "Mapped"], "gpu"),
        (("GPU-0", "GPU-1"), "both", ["Mapped", "tuple"], "gpu and host"),
        (("GPU-1", "GPU-2"), "bytes", ["tuple", "tuple"], "host"),
    ],
)
def test_replicas_on_the_gpu_of_the_rank_read_there_and_the_rest_get_bytes(
    gpus: tuple[str, ...], form: str, ways: list[str], said: str
):
    run = Run(*gpus)
    run.publish(1)
    run.publish(2)
    assert run.loads() == ways
    assert [one.digests for one in run.fleet.begun] == [run.rank.digests()] * 2
    assert (run.rank.forms, run.rank.ways) == ([form] * 2, [said] * 2)


def test_memory_that_cannot_be_shared_is_said_and_everybody_gets_bytes(
    capsys: pytest.CaptureFixture[str],
):
    run = Run("GPU-0", probe="cuIpcGetMemHandle answered CUDA_ERROR_INVALID_VALUE")
    run.publish(1)
    assert run.loads() == ["tuple"]
    said = " ".join("".join(capsys.readouterr()).split())
    assert "through the host" in said
    assert "cuIpcGetMemHandle answered CUDA_ERROR_INVALID_VALUE" in said
    assert "expandable_segments" in said


def test_a_replica_that_is_back_before_the_next_step_reads_what_is_still_there():
    run = Run("GPU-0", "GPU-0")
    run.publish(1)
    again = run.lose(0)
    run.pool.wait_until(lambda: all(member.is_ready for member in run.pool.members))
    assert again.digests == run.rank.digests()
    assert run.loads() == ["Mapped"] * 3
    assert run.rank.forms == ["mapped"], "nothing was gathered for it"


def test_a_replica_that_is_back_elsewhere_gets_bytes_that_nobody_needed_before():
    run = Run("GPU-0", "GPU-0")
    run.publish(1)
    run.gpus[0] = "GPU-5"
    again = run.lose(0)
    run.pool.wait_until(lambda: all(member.is_ready for member in run.pool.members))
    assert again.digests == run.rank.digests()
    assert run.loads() == ["Mapped", "Mapped", "tuple"]
    assert run.rank.forms == ["mapped", "bytes"]
    run.publish(2)
    assert run.rank.forms == ["mapped", "bytes", "both"]


def test_a_replica_that_is_back_in_the_middle_of_a_step_waits_for_the_next_weights():
    run = Run("GPU-0", "GPU-0")
    run.publish(1)
    run.sync.release()
    run.sync.change()
    run.rank.weight += 1
    again = run.lose(0)
    assert not run.pool.members[0].is_ready
    assert [call[0] for call in again.calls] == ["facts"], "these weights are nowhere any more"
    run.sync.begin(2).wait()
    run.pool.wait_until(lambda: all(member.is_ready for member in run.pool.members))
    assert [r.digests for r in run.fleet.living()] == [run.rank.digests()] * 2


@pytest.mark.parametrize("end", ["it confirms", "it is lost"])
def test_no_step_begins_while_a_replica_reads(end: str):
    run = Run("GPU-0", "GPU-0")
    run.publish(1)
    held: list[tuple[tuple[Any, ...], Any]] = []

    def slow(replica: FakeReplica) -> None:
        call = replica.call
        replica.gpu = "GPU-0"

        def hold(method: str, *arguments: Any, reply: Any = None) -> None:
            if method == "load_last" and not held:
                held.append((arguments, reply))
            else:
                call(method, *arguments, reply=reply)

        replica.call = hold

    run.fleet._change = slow
    late = run.lose(0)
    run.pool.wait_until(lambda: bool(held))
    assert run.pool.members[0].reading == {1}
    looked, receive = list[float](), run.pool.receive

    def answer(wait_s: float) -> None:
        looked.append(wait_s)
        ((arguments, reply),) = held
        if len(looked) == 3 and end == "it confirms":
            reply(late.on_load_last(*arguments), None)
        elif len(looked) == 3:
            reply(None, ProcessDied("it was killed"))
        receive(wait_s if len(looked) >= 3 else 0.0)

    run.pool.receive = answer
    run.sync.release()
    assert len(looked) == 3
    assert run.pool.members[0].reading == set()
    if end == "it is lost":
        assert [call[0] for call in run.fleet.begun[-1].calls] == ["facts"]
    run.publish(2)
    assert run.rank.ways[-1] == "gpu"


def test_weights_that_are_kept_while_others_are_generated_with_are_bytes():
    run = Run("GPU-0")
    asyncio.run(run.sync.publish_extra(1, keep=()))
    assert (run.rank.forms, run.loads(), run.rank.ways) == (["bytes"], ["tuple"], ["host"])
