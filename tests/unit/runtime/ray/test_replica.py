"""A replica without Ray: an engine on its own thread behind asynchronous calls."""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from luyen.base.errors import UserError
from luyen.models.weights import tensor_digests, trained_parameters
from luyen.rollout.protocol import Completion, RolloutEngine, generate
from luyen.runtime.ray.messages import RemoteError
from luyen.runtime.ray.replica import Replica
from luyen.runtime.weights import pack
from tests.generation import native, request
from tests.tiny_models import tiny_policy
from tests.unit.runtime.ray.broken import broken_engine
from tests.unit.runtime.ray.factories import in_buckets, tiny_engine

REQUESTS = [request(7, 9, samples=2), request(12, 5, samples=3)]


def with_replica(
    work: Callable[[Replica], Coroutine[Any, Any, Any]],
    make: Callable[[int], RolloutEngine] = tiny_engine,
) -> Any:
    """What some calls of a replica give."""

    async def run() -> Any:
        return await work(Replica(make, 0, folder=".", node=lambda: "here"))

    return asyncio.run(run())


async def answers(replica: Replica, count: int) -> dict[tuple[str, int], Completion]:
    found: dict[tuple[str, int], Completion] = {}
    end = 0
    while len(found) < count:
        news = await replica.collect(end, 1.0)
        assert news.failure is None
        found |= {(c.request, c.sample): c for c in news.completions}
        end = news.end
    return dict(sorted(found.items()))


def test_it_draws_what_the_engine_draws_whatever_arrives_first():
    async def work(replica: Replica) -> Any:
        late = asyncio.create_task(replica.submit(1, REQUESTS[1:]))
        await asyncio.sleep(0)
        await replica.submit(0, REQUESTS[:1])
        await late
        return await answers(replica, 5)

    assert with_replica(work) == generate(tiny_engine(0), REQUESTS)


def test_news_are_told_again_until_they_are_known_to_have_arrived():
    async def work(replica: Replica) -> None:
        await replica.submit(0, REQUESTS[:1])
        while len((await replica.collect(0, 1.0)).completions) < 2:
            pass
        again = await replica.collect(1, 0.01)
        assert (len(again.completions), again.end) == (1, 2)
        assert (await replica.collect(2, 0.01)).completions == ()
        assert (await replica.collect(0, 0.01)).end == 2

    with_replica(work)


def test_an_abort_waits_for_its_request_and_returns_what_there_is():
    async def work(replica: Replica) -> None:
        long = replace(REQUESTS[0], sampling=replace(REQUESTS[0].sampling, max_new_tokens=1500))
        stopping = asyncio.create_task(replica.abort(1, long.id, 1, 0))
        await asyncio.sleep(0.05)
        assert not stopping.done()
        await replica.submit(0, [long])
        news = await stopping
        assert [(c.sample, c.reason) for c in news.completions] == [(1, "aborted")]
        news = await replica.abort(2, long.id, None, news.end)
        assert [(c.sample, c.reason) for c in news.completions] == [(0, "aborted")]

    with_replica(work)


def test_weights_arrive_in_any_order_and_are_confirmed():
    policy = tiny_policy("llama", seed=4)
    wanted = trained_parameters(policy)

    async def work(replica: Replica) -> Any:
        parts = [pack(bucket) for bucket in in_buckets(wanted, most_bytes=20_000)]
        assert len(parts) > 3
        confirming = asyncio.create_task(
            replica.confirm(1, None, len(parts), tensor_digests(wanted))
        )
        for part in reversed(parts):
            await replica.load(1, None, (), part)
        held = await confirming
        assert held.digests == tensor_digests(wanted)
        assert await replica.fingerprint() == held.digests
        await replica.submit(0, REQUESTS, 1)
        return await answers(replica, 5)

    assert with_replica(work) == generate(native(policy), REQUESTS)


def test_nothing_is_drawn_before_the_weights_are_found_to_be_what_they_should():
    policy = tiny_policy("llama", seed=4)
    wanted = trained_parameters(policy)

    async def work(replica: Replica) -> Any:
        await replica.submit(0, REQUESTS, 2)
        await replica.load(1, None, (), pack(wanted))
        held = await replica.confirm(1, None, 1, {**tensor_digests(wanted), "w": "another"})
        assert held.digests == tensor_digests(wanted)
        await replica.load(2, None, (), pack(wanted))
        assert (await replica.collect(0, 0.2)).passes == 0
        await replica.confirm(2, None, 1, held.digests)
        return await answers(replica, 5)

    assert with_replica(work) == generate(native(policy), REQUESTS)


def test_what_waits_for_weights_can_be_taken_back():
    policy = tiny_policy("llama", seed=4)
    wanted = trained_parameters(policy)
    first, *others = REQUESTS
    kept = next(request for request in others if len(request.keys) > 1)

    async def work(replica: Replica) -> Any:
        await replica.submit(0, [first, kept], 1)
        assert (await replica.abort(1, first.id, None, 0)).completions == ()
        assert (await replica.abort(2, kept.id, 1, 0)).completions == ()
        await replica.load_last(1, None, (), pack(wanted), 1, tensor_digests(wanted))
        return await answers(replica, len(kept.keys) - 1)

    everything = generate(native(policy), [kept])
    assert with_replica(work) == {key: a for key, a in everything.items() if key[1] != 1}


def test_weights_that_never_come_hold_nothing_else_up():
    first, *others = REQUESTS

    async def work(replica: Replica) -> Any:
        await replica.submit(0, [first], 7)
        await replica.submit(1, others, 0)
        return await answers(replica, sum(len(request.keys) for request in others))

    found = with_replica(work)
    assert {request for request, _ in found} == {request.id for request in others}


def test_a_version_that_a_newer_publication_has_ended_comes_too_late_and_stops_nothing():
    """A replica that begins again is sent all versions, while the next one may be on its way."""
    old, new = (trained_parameters(tiny_policy("llama", seed=seed)) for seed in (4, 5))

    async def work(replica: Replica) -> None:
        confirming = asyncio.create_task(replica.confirm(1, 7, 2, tensor_digests(old)))
        first, *_ = parts = [pack(bucket) for bucket in in_buckets(old, most_bytes=20_000)]
        await replica.load(1, 7, {7}, first)
        await replica.load(2, 8, {8}, pack(new))
        await replica.load(1, 7, {7}, parts[1])
        assert (await confirming).digests == {}
        assert (await replica.confirm(2, 8, 1, tensor_digests(new))).digests == tensor_digests(new)

    with_replica(work)


def test_parts_of_a_version_that_was_published_anew_come_too_late():
    old, new = (trained_parameters(tiny_policy("llama", seed=seed)) for seed in (4, 5))

    async def work(replica: Replica) -> None:
        first, second = (pack(bucket) for bucket in in_buckets(old, most_bytes=160_000))
        await replica.load(1, 7, {7}, first)
        await replica.load(2, 7, {7}, pack(new))
        await replica.load(1, 7, {7}, second)
        assert (await replica.confirm(1, 7, 2, tensor_digests(old))).digests == {}
        assert (await replica.confirm(2, 7, 1, tensor_digests(new))).digests == tensor_digests(new)

    with_replica(work)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda w: w | {"other": torch.ones(1)}, "no such parameter"),
        (lambda w: {n: t.double() for n, t in w.items()}, "came as float64"),
        (lambda w: dict(list(w.items())[1:]), "came without it"),
    ],
)
def test_weights_that_do_not_fit_are_refused(change: Callable[..., Any], said: str):
    weights = trained_parameters(tiny_policy("llama"))

    async def work(replica: Replica) -> None:
        loading = asyncio.gather(
            replica.load(1, None, (), pack(change(dict(weights)))), return_exceptions=True
        )
        with pytest.raises(UserError, match=said):
            await replica.confirm(1, None, 1, {})
        await loading

    with_replica(work)


def test_an_engine_that_shows_no_parameters_takes_none():
    async def work(replica: Replica) -> None:
        with pytest.raises(UserError, match="cannot say which weights"):
            await replica.load(1, None, (), pack({"w": torch.ones(1)}))

    with_replica(work, partial(broken_engine, how="idles"))


def test_an_engine_that_breaks_says_so_with_its_traceback():
    async def work(replica: Replica) -> None:
        await replica.submit(0, REQUESTS)
        failure = (await replica.collect(0, 5.0)).failure
        assert isinstance(failure, RemoteError)
        assert "in _divided" in failure.text
        assert "ZeroDivisionError" in str(failure)
        with pytest.raises(RemoteError):
            await replica.facts()

    with_replica(work, partial(broken_engine, how="breaks"))


@pytest.mark.parametrize(
    ("how", "said"), [("user error", "it is wrong"), ("refuses", "it is too long")]
)
def test_what_the_user_can_mend_stays_so(how: str, said: str):
    async def work(replica: Replica) -> None:
        await replica.submit(0, REQUESTS)
        failure = (await replica.collect(0, 5.0)).failure
        assert isinstance(failure, UserError)
        assert failure.why == said
        assert "broken.py" in failure.__notes__[0]

    with_replica(work, partial(broken_engine, how=how))


def test_a_request_for_weights_that_are_not_here_is_told_and_not_waited_for():
    async def work(replica: Replica) -> Any:
        await replica.submit(0, [replace(REQUESTS[0], weights=7)])
        return (await replica.collect(0, 30.0)).failure

    failure = with_replica(work)
    assert isinstance(failure, RemoteError)
    assert "version 7 of the weights is not here" in str(failure)


def test_a_request_that_was_taken_back_leaves_no_mark_on_the_next_of_its_name():
    policy = tiny_policy("llama", seed=4)
    wanted = trained_parameters(policy)
    request = next(one for one in REQUESTS if len(one.keys) > 1)

    async def work(replica: Replica) -> Any:
        await replica.submit(0, [request], 1)
        await replica.abort(1, request.id, 1, 0)
        await replica.abort(2, request.id, None, 0)
        await replica.load_last(1, None, (), pack(wanted), 1, tensor_digests(wanted))
        await replica.submit(3, [request], 1)
        return await answers(replica, len(request.keys))

    assert with_replica(work) == generate(native(policy), [request])
