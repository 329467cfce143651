"""A replica of two ranks on Ray: what it generates, and the loss of one of its ranks."""

from collections.abc import Iterator
from importlib import import_module
from typing import Any, TypeAlias

import pytest
import torch

from luyen.models.weights import Fingerprint, trained_parameters
from luyen.rollout.protocol import Completion, finish, generate
from luyen.runtime.ray.cluster import connect
from luyen.runtime.ray.engines import RayEngines
from luyen.runtime.ray.messages import ReplicaState
from tests.generation import native, request
from tests.tiny_models import tiny_policy
from tests.unit.runtime.ray.factories import begin_publication, split_tiny_engine

Answers: TypeAlias = dict[tuple[str, int], Completion]
REQUESTS = [
    request(7, 9, samples=2),
    request(12, 60, samples=3),
    request(5, 40, name="greedy", temperature=0.0),
]


@pytest.fixture(scope="module")
def engines(cluster_address: str) -> Iterator[RayEngines]:
    connection = connect(cluster_address, threads=1)
    from luyen.runtime.ray.actors import start_split_engines

    found = start_split_engines(split_tiny_engine, ranks=2, places=[{"num_cpus": 0.5}] * 2)
    yield found
    found.stop()
    connection.disconnect()


def collect(engines: RayEngines) -> Answers:
    """All answers to what was submitted."""
    found: Answers = {}
    finish(engines, lambda one: found.update({(one.request, one.sample): one}))
    return found


def demand_answers(found: Answers, policy: Any) -> None:
    whole = generate(native(policy), REQUESTS)
    assert found.keys() == whole.keys()
    for key, completion in whole.items():
        assert found[key].tokens == completion.tokens
        gap = torch.tensor(found[key].logps) - torch.tensor(completion.logps)
        assert gap.abs().max() <= 1e-4


def test_two_ranks_are_one_replica_that_takes_whole_weights(engines: RayEngines):
    assert len(engines.replica_pool.members) == 1
    demand_answers(generate(engines, REQUESTS), tiny_policy("llama"))
    other = tiny_policy("llama", seed=3)
    begin_publication(engines, trained_parameters(other), version=1).wait()
    demand_answers(generate(engines, REQUESTS), other)
    held = engines.fingerprint()
    assert held is not None
    assert held.first_difference(Fingerprint.of(other)) is None


@pytest.mark.parametrize("rank", [1, 0])
def test_a_lost_rank_costs_unfinished_answers_only(
    engines: RayEngines, rank: int, monkeypatch: pytest.MonkeyPatch
):
    other = tiny_policy("llama", seed=4 + rank)
    begin_publication(engines, trained_parameters(other), version=2 + rank).wait()
    pool, reasons = engines.replica_pool, list[str]()
    [member], restarts, replace = pool.members, pool.restarts, pool._replace

    def replaced(one: ReplicaState, why: str) -> None:
        reasons.append(why)
        replace(one, why)

    monkeypatch.setattr(pool, "_replace", replaced)
    before: Any = member.handle
    for one in REQUESTS:
        engines.submit(one)
    first = engines.advance()
    import_module("ray").kill(before._actors[rank])
    found = collect(engines)
    demand_answers(found | {(one.request, one.sample): one for one in first}, other)
    assert pool.restarts == restarts + 1
    assert member.handle is not before
    assert ("rank 1 of it is gone" in reasons[0]) == (rank == 1), reasons
