"""Many replicas as one engine: who gets what, and what happens when one of them is lost."""

from collections.abc import Callable

import pytest

from luyen.base.errors import UserError
from luyen.config.schema.trainer import TimeoutsConfig
from luyen.rollout.protocol import Completion, Request, Sampling, generate
from luyen.runtime.ray.engines import RayEngines
from luyen.runtime.ray.messages import RemoteError
from tests.unit.runtime.ray.fakes import FakeReplica, Fleet, drawn

EIGHT = Sampling(max_new_tokens=8)


def ask(name: str, *, samples: int = 4, length: int = 5) -> Request:
    start = sum(map(ord, name))
    tokens = tuple((start + i) % 90 for i in range(length))
    keys = tuple(start * 10 + i for i in range(samples))
    return Request(id=name, tokens=tokens, keys=keys, sampling=EIGHT)


def answers(*requests: Request) -> dict[tuple[str, int], Completion]:
    """What every engine must give."""
    return {(r.id, i): drawn(r, i) for r in requests for i in range(len(r.keys))}


def finish_all(engines: RayEngines, fleet: Fleet) -> dict[tuple[str, int], Completion]:
    found: dict[tuple[str, int], Completion] = {}
    for _ in range(1000):
        found |= {(c.request, c.sample): c for c in engines.advance()}
        if engines.is_idle:
            return found
        for replica in fleet.living():
            replica.finish()
    raise AssertionError("it never ends")


def test_samples_stay_together_and_work_is_spread():
    fleet = Fleet()
    engines = RayEngines(fleet, replicas=4)
    requests = [ask(f"r{i}") for i in range(8)]
    for request in requests:
        engines.submit(request)
    engines.advance()
    held = [{request.id for request, _ in replica.open} for replica in fleet.begun]
    assert [len(names) for names in held] == [2, 2, 2, 2]
    assert len(set().union(*held)) == 8
    submits = [call for replica in fleet.begun for call in replica.calls if call[0] == "submit"]
    assert len(submits) == 4, "one message for each replica"
    assert finish_all(engines, fleet) == answers(*requests)
    assert engines.is_idle


def test_a_later_turn_meets_the_replica_of_the_earlier_one():
    fleet = Fleet()
    engines = RayEngines(fleet, replicas=3)
    first = [ask(f"r{i}", length=70, samples=1) for i in range(3)]
    for request in first:
        engines.submit(request)
    engines.advance()
    homes = {r.open[0][0].id: r.index for r in fleet.begun}
    finish_all(engines, fleet)
    for request in reversed(first):
        longer = (*request.tokens, *range(50))
        engines.submit(
            Request(id=f"{request.id}+", tokens=longer, keys=request.keys, sampling=EIGHT)
        )
    engines.advance()
    assert {r.open[0][0].id.removesuffix("+"): r.index for r in fleet.begun} == homes


def test_what_a_lost_replica_had_not_finished_is_drawn_by_others():
    fleet = Fleet()
    engines = RayEngines(fleet, replicas=2)
    requests = [ask(f"r{i}", samples=5) for i in range(6)]
    for request in requests:
        engines.submit(request)
    engines.advance()
    fleet.begun[0].finish(3)
    found = {(c.request, c.sample): c for c in engines.advance()}
    assert len(found) == 3
    fleet.begun[0].die()
    found |= finish_all(engines, fleet)
    assert dict(sorted(found.items())) == answers(*requests)
    assert (engines.replica_pool.restarts, engines.resubmitted) == (1, 12)
    assert len(fleet.begun) == 3
    assert fleet.begun[2].index == 0


def publish_seven(engines: RayEngines) -> None:
    pool, weights = engines.replica_pool, {"w": "float32 [1] 07"}
    pool.begin_publication(1)
    pool.send_all([weights], weights)
    pool.wait_until(lambda: pool.is_published)


def test_a_replica_that_begins_again_gets_the_current_weights():
    fleet = Fleet()
    engines = RayEngines(fleet, replicas=2)
    publish_seven(engines)
    engines.submit(ask("a", samples=1))
    engines.advance()
    holder = next(replica for replica in fleet.begun if replica.open)
    holder.die()
    assert finish_all(engines, fleet) == answers(ask("a", samples=1))
    engines.replica_pool.wait_until(
        lambda: all(member.is_ready for member in engines.replica_pool.members)
    )
    assert fleet.begun[2].digests == {"w": "float32 [1] 07"}
    found = engines.fingerprint()
    assert found is not None
    assert found.weights == {"w": "float32 [1] 07"}


def test_a_replica_that_does_not_hold_what_was_published_stops_the_run():
    def deaf(replica: FakeReplica) -> None:
        if replica.index == 1:
            replica.on_load = lambda *_: None

    engines = RayEngines(Fleet(deaf), replicas=2)
    with pytest.raises(UserError, match=r"replica 1 does not hold .* w has other values"):
        publish_seven(engines)
    with pytest.raises(UserError, match="replica 1"):
        engines.advance()


def test_replicas_that_disagree_are_told_apart():
    def other(replica: FakeReplica) -> None:
        if replica.index == 2:
            replica.digests = {"w": "float32 [1] 01"}

    with pytest.raises(UserError, match="replicas 0 and 2 hold different weights: w has"):
        RayEngines(Fleet(other), replicas=3).fingerprint()


def test_three_losses_in_a_row_end_the_run_with_the_reason():
    fleet = Fleet()
    engines = RayEngines(fleet, replicas=1)
    engines.submit(ask("a"))
    engines.advance()
    until = failing_passes(engines, fleet, lambda replica: replica.die())
    with pytest.raises(UserError, match="3 replicas were lost in succession"):
        until()
    assert len(fleet.begun) == 3


def test_a_replica_that_never_begins_ends_the_run_with_the_reason():
    fleet = Fleet(lambda replica: replica.die())
    with pytest.raises(UserError, match="replica 0 was lost 3 times in a row: it was killed"):
        RayEngines(fleet, replicas=1)
    assert len(fleet.begun) == 3


def failing_passes(
    engines: RayEngines, fleet: Fleet, act: Callable[[FakeReplica], None]
) -> Callable[[], None]:
    """Passes before each of which something is done to every living replica."""

    def passes() -> None:
        for _ in range(20):
            for replica in fleet.living():
                act(replica)
            engines.advance()

    return passes


def test_a_request_that_kills_whoever_draws_it_ends_the_run():
    fleet = Fleet()
    engines = RayEngines(fleet, replicas=6)
    for i in range(6):
        engines.submit(ask(f"r{i}", samples=40))
    engines.advance()

    def act(replica: FakeReplica) -> None:
        is_cursed = any(request.id == "r0" for request, _ in replica.open)
        replica.die() if is_cursed else replica.finish()

    until = failing_passes(engines, fleet, act)
    with pytest.raises(UserError, match="request r0 = 5: 3 replicas were lost"):
        until()


def test_a_replica_that_gets_nothing_done_is_taken_for_lost(monkeypatch: pytest.MonkeyPatch):
    fleet = Fleet()
    engines = RayEngines(fleet, replicas=2, timeouts=TimeoutsConfig(progress_s=0.01))
    monkeypatch.setattr("luyen.runtime.ray.replica_pool._POLL_S", 0.0)
    engines.submit(ask("a"))
    engines.advance()
    stuck = next(replica for replica in fleet.begun if replica.open)
    for _ in range(50):
        engines.advance()
        if stuck.is_dead:
            break
    assert stuck.is_dead
    assert finish_all(engines, fleet) == answers(ask("a"))


def test_the_first_error_is_raised_now_and_later():
    fleet = Fleet()
    engines = RayEngines(fleet, replicas=2)
    engines.submit(ask("a"))
    engines.advance()
    holder = next(replica for replica in fleet.begun if replica.open)
    holder.failure = RemoteError("replica 0", "Traceback: division by zero")
    holder.tell()
    for _ in range(2):
        with pytest.raises(RemoteError, match="division by zero"):
            engines.advance()
    assert [stopped.reason for stopped in engines.abort("a")] == ["aborted"] * 4
    engines.close()


def test_an_aborted_sample_gives_what_there_is_and_the_rest_goes_on():
    fleet = Fleet()
    engines = RayEngines(fleet, replicas=2)
    request = ask("a", samples=3)
    engines.submit(request)
    [stopped] = engines.abort("a", 1)
    assert (stopped.sample, stopped.reason, stopped.tokens) == (1, "aborted", (1,))
    wanted = answers(request)
    del wanted["a", 1]
    assert finish_all(engines, fleet) == wanted
    assert engines.abort("a") == []


def test_an_answer_that_finished_before_it_was_aborted_is_not_lost():
    fleet = Fleet()
    engines = RayEngines(fleet, replicas=1)
    engines.submit(ask("a", samples=2))
    engines.advance()
    fleet.begun[0].waiting = None
    fleet.begun[0].finish()
    first, second = engines.abort("a")
    assert (first.reason, second.reason) == ("length", "aborted")
    assert engines.is_idle


def test_what_is_stopped_after_a_loss_is_found_under_its_first_index():
    fleet = Fleet()
    engines = RayEngines(fleet, replicas=1)
    engines.submit(ask("a", samples=4))
    engines.advance()
    fleet.begun[0].finish(2)
    engines.advance()
    fleet.begun[0].die()
    engines.advance()
    engines.replica_pool.wait_until(lambda: engines.replica_pool.members[0].is_ready)
    [stopped] = engines.abort("a", 3)
    assert (stopped.sample, stopped.tokens) == (3, (1,))
    assert set(finish_all(engines, fleet)) == {("a", 2)}


def test_close_drops_what_runs_and_the_engines_go_on():
    fleet = Fleet()
    engines = RayEngines(fleet, replicas=2)
    engines.submit(ask("a"))
    engines.advance()
    engines.close()
    assert engines.is_idle
    engines.submit(ask("b"))
    assert finish_all(engines, fleet) == answers(ask("b"))
    engines.stop()
    assert fleet.living() == []


def test_answers_come_some_at_a_time_and_all_of_them_in_the_end():
    fleet = Fleet()
    engines = RayEngines(fleet, replicas=2)
    requests = [ask(name, samples=50) for name in ("a", "b")]
    for request in requests:
        engines.submit(request)
    engines.advance()
    for replica in fleet.begun:
        replica.finish(50)
    told: list[list[Completion]] = []
    while not engines.is_idle:
        told.append(engines.advance())
    assert [len(some) for some in told] == [32, 32, 32, 4]
    found = {(c.request, c.sample): c for some in told for c in some}
    assert found == answers(*requests)
    assert engines.advance() == []


def test_generate_works_on_them():
    class Busy(Fleet):
        def __call__(self, index: int) -> FakeReplica:
            replica = super().__call__(index)
            submit = replica.on_submit
            replica.on_submit = lambda *what: (submit(*what), replica.finish(99))
            return replica

    requests = [ask(f"r{i}") for i in range(9)]
    assert generate(RayEngines(Busy(), replicas=3), requests) == answers(*requests)
