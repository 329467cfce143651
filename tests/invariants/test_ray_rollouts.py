"""Replicas on Ray draw what a local engine draws, to the bit, whatever happens to them."""

import os
import signal
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from luyen.base.errors import UserError
from luyen.models.policy import Policy
from luyen.models.weights import Fingerprint, trained_parameters
from luyen.rollout.protocol import Completion, Request, generate
from luyen.runtime.ray.cluster import Connection, connect
from luyen.runtime.ray.engines import RayEngines
from luyen.runtime.ray.messages import RemoteError
from luyen.train.loop import train_online
from luyen.train.run import OnlineRun
from tests.generation import native, request
from tests.runs import (
    CHATTY,
    MODEL,
    TINY,
    Ran,
    close,
    prepare,
    read_back,
    rollout_of,
    same_weights,
    train,
    worker_of,
)
from tests.tiny_models import tiny_policy
from tests.unit.runtime.ray.broken import broken_engine
from tests.unit.runtime.ray.factories import begin_publication, engine_of_run, tiny_engine

ray = pytest.importorskip("ray", reason="the extra `ray` is not installed")
REQUESTS = [request(6 + i, 60, name=f"r{i}", samples=3) for i in range(10)]


@pytest.fixture(scope="module")
def cluster(cluster_address: str) -> Iterator[Connection]:
    connection = connect(cluster_address, threads=1)
    yield connection
    connection.disconnect()


@pytest.fixture(scope="module")
def engines(cluster: Connection) -> Iterator[RayEngines]:
    """Two replicas of the tiny model; tests put the weights they want into them."""
    from luyen.runtime.ray.actors import start_engines

    found = start_engines(tiny_engine, replicas=2)
    yield found
    found.stop()


def put(engines: RayEngines, policy: Policy, *, version: int = 1) -> None:
    begin_publication(engines, trained_parameters(policy), version=version).wait()


def drawn_with(policy: Policy) -> Mapping[tuple[str, int], Completion]:
    """What a local engine draws."""
    return generate(native(policy), REQUESTS)


def test_two_replicas_draw_what_one_local_engine_draws(engines: RayEngines):
    policy = tiny_policy("llama", seed=0)
    assert engines.is_batch_invariant
    assert {member.index for member in engines.replica_pool.members} == {0, 1}
    assert len({member.facts.pid for member in engines.replica_pool.members if member.facts}) == 2
    assert generate(engines, REQUESTS) == drawn_with(policy)


def test_published_weights_are_confirmed_and_drawn_with(engines: RayEngines):
    for version, seed in enumerate((1, 2), 1):
        policy = tiny_policy("llama", seed=seed)
        put(engines, policy, version=version)
        pool = engines.replica_pool
        assert [member.confirmed for member in pool.members] == [{pool.publication}] * 2
        held = engines.fingerprint()
        assert held is not None
        assert held.first_difference(Fingerprint.of(policy)) is None
        assert generate(engines, REQUESTS) == drawn_with(policy)


def test_a_changed_parameter_is_found(engines: RayEngines):
    policy = tiny_policy("llama", seed=1)
    put(engines, policy)
    name, first = next(iter(trained_parameters(policy).items()))
    first.view(-1)[0] += 1.0
    held = engines.fingerprint()
    assert held is not None
    assert held.first_difference(Fingerprint.of(policy)) == f"{name} has other values"


def test_weights_that_are_not_those_of_the_digests_that_came_with_them_are_refused(
    cluster: Connection,
):
    from luyen.runtime.ray.actors import start_engines

    found = start_engines(tiny_engine, replicas=1, places=[{"num_cpus": 0}])
    sent, meant = (trained_parameters(tiny_policy("llama", seed=seed)) for seed in (6, 7))
    try:
        with pytest.raises(UserError, match="replica 0 does not hold what was published"):
            begin_publication(found, sent, version=1, meant=meant).wait()
    finally:
        found.stop()


def test_a_replica_that_is_killed_changes_nothing(engines: RayEngines):
    policy = tiny_policy("llama", seed=7)
    put(engines, policy)
    before = engines.replica_pool.restarts
    found = generate_and(engines, after=4, do=lambda: kill(engines, 0))
    assert found == drawn_with(policy)
    assert engines.replica_pool.restarts == before + 1
    engines.replica_pool.wait_until(
        lambda: all(member.is_ready for member in engines.replica_pool.members)
    )
    held = engines.fingerprint()
    assert held is not None
    assert held.first_difference(Fingerprint.of(policy)) is None


def test_a_replica_that_is_killed_while_weights_arrive_gets_them_all_the_same(engines: RayEngines):
    policy = tiny_policy("llama", seed=8)
    pending = begin_publication(engines, trained_parameters(policy), version=1)
    kill(engines, 1)
    pending.wait()
    assert generate(engines, REQUESTS) == drawn_with(policy)


def generate_and(
    engines: RayEngines, *, after: int, do: Callable[[], None]
) -> dict[tuple[str, int], Completion]:
    """Answers to all requests; something is done once some of them are there."""
    found: list[Completion] = []

    def finished(completion: Completion) -> None:
        found.append(completion)
        if len(found) == after:
            do()

    return generate(engines, REQUESTS, finished=finished)


def kill(engines: RayEngines, index: int) -> None:
    facts = engines.replica_pool.members[index].facts
    assert facts is not None
    os.kill(facts.pid, signal.SIGKILL)


class Published:
    """Replicas that are given the trainer's weights whenever the loop asks for theirs."""

    def __init__(self, engines: RayEngines, policy: Policy) -> None:
        self._engines, self._policy = engines, policy
        self.advance, self.abort, self.close = engines.advance, engines.abort, engines.close

    @property
    def is_idle(self) -> bool:
        return self._engines.is_idle

    @property
    def is_batch_invariant(self) -> bool:
        return self._engines.is_batch_invariant

    def submit(self, request: Request) -> None:
        # They have the newest weights and no others.
        self._engines.submit(replace(request, weights=None))

    def fingerprint(self) -> Fingerprint | None:
        put(self._engines, self._policy)
        return self._engines.fingerprint()


def on_ray(folder: Path, words: tuple[str, ...]) -> Ran:
    """A run whose rollouts are drawn by two replicas, made from its configuration."""
    from luyen.runtime.ray.actors import start_engines

    run: OnlineRun = prepare(folder, *words)
    engines = start_engines(partial(engine_of_run, words=(*TINY, *words)), replicas=2)
    rollout_of(run).engine = Published(engines, worker_of(run).actor.policy)
    try:
        train_online(run)
        assert rollout_of(run).weight_checks == 2, "once before each generation"
    finally:
        close(run)
        engines.stop()
    return read_back(run.recorder.directory.root)


@pytest.mark.parametrize(
    "words",
    [
        (*CHATTY, f"{MODEL}.lora_rank=4"),
        pytest.param((), marks=pytest.mark.slow),
        pytest.param(CHATTY, marks=pytest.mark.slow),
    ],
    ids=["conversations with an adapter", "answers", "conversations"],
)
def test_a_run_whose_rollouts_come_from_replicas_is_the_same_run(
    words: tuple[str, ...], cluster: Connection, tmp_path: Path
):
    here, there = train(tmp_path / "here", *words), on_ray(tmp_path / "there", words)
    assert here.metrics == there.metrics
    assert same_weights(here, there)


@pytest.mark.parametrize(
    ("how", "kind", "said"),
    [
        ("breaks", RemoteError, "in _divided"),
        pytest.param("user error", UserError, "it is wrong", marks=pytest.mark.slow),
        pytest.param("cannot be made", RemoteError, "no such model", marks=pytest.mark.slow),
    ],
)
def test_the_first_error_arrives_with_the_remote_traceback(
    cluster: Connection, how: str, kind: type[Exception], said: str
):
    from luyen.runtime.ray.actors import start_engines

    def draw() -> None:
        found = start_engines(partial(broken_engine, how=how), replicas=1, places=[{"num_cpus": 0}])
        generate(found, [Request(id="a", tokens=(1,), keys=(1,), sampling=REQUESTS[0].sampling)])

    with pytest.raises(kind) as caught:
        draw()
    notes = caught.value.__notes__ if isinstance(caught.value, UserError) else ()
    text = "\n".join([str(caught.value), *notes])
    assert said in text
    assert "broken.py" in text
