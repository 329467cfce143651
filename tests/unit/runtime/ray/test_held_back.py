"""Answers that are finished and wait for their turn are not lost when somebody stops waiting."""

import asyncio
from dataclasses import replace

from luyen.rollout.client import EngineClient
from luyen.rollout.protocol import Sampling
from luyen.runtime.ray.engines import RayEngines
from tests.unit.runtime.ray.fakes import Fleet, drawn
from tests.unit.runtime.ray.test_engines import ask


def test_what_is_finished_is_given_when_it_is_stopped():
    fleet = Fleet()
    engines = RayEngines(fleet, replicas=1)
    request = ask("a", samples=40)
    engines.submit(request)
    engines.advance()
    fleet.begun[0].finish(40)
    told = {answer.sample for answer in engines.advance()}
    held_back = next(i for i in range(40) if i not in told)
    assert engines.abort("a", held_back) == [drawn(request, held_back)]
    rest = [answer.sample for answer in engines.advance()]
    assert sorted([*told, held_back, *rest]) == list(range(40))
    assert engines.is_idle


def test_a_deadline_loses_no_answer_that_is_there():
    fleet = Fleet()
    engines = RayEngines(fleet, replicas=1)

    async def run():
        client = EngineClient(engines)
        how = Sampling(max_new_tokens=8)
        soon = asyncio.get_running_loop().time() + 0.05
        asks = [
            asyncio.ensure_future(client.generate((1, 2, 3), key=k, sampling=how, deadline=soon))
            for k in range(40)
        ]
        await client.submit_ready()
        engines.send()
        fleet.begun[0].finish(40)
        for answer in engines.advance():  # one pass, and then nobody looks until it is too late
            client._deliver(answer)
        return await asyncio.gather(*asks)

    assert {answer.reason for answer in asyncio.run(run())} == {"length"}


def waiting_engines(replicas: int) -> tuple[Fleet, RayEngines]:
    """Replicas that hold requests of weights which have not come yet."""
    fleet = Fleet()
    engines = RayEngines(fleet, replicas=replicas)
    engines.replica_pool.begin_publication(1)
    for index in range(4 * replicas):
        engines.submit(replace(ask(f"r{index}"), weights=1))
    engines.send()
    return fleet, engines


def test_replicas_that_are_lost_before_the_weights_come_are_no_fault_of_the_requests():
    fleet, engines = waiting_engines(8)
    for lost in fleet.begun[:6]:
        lost.is_dead = True
    engines.replica_pool.send_all([(("w", "d"),)], {"w": "d"})
    members = engines.replica_pool.members
    engines.replica_pool.wait_until(lambda: all(m.is_ready and m.confirmed for m in members))
    assert len(fleet.begun) == 14
    assert sum(len(member.requests) for member in members) == 32


def test_what_is_dropped_is_asked_of_nobody():
    fleet, engines = waiting_engines(2)
    said = [len(replica.calls) for replica in fleet.begun]
    engines.drop()
    assert engines.is_idle
    assert engines.abort("r1") == []
    assert [len(replica.calls) for replica in fleet.begun] == said
