"""Generations beside the caller: who waits for what, what is raised, and how it ends."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest

from luyen.base.errors import UserError
from luyen.rollout.client import EngineClient
from luyen.rollout.protocol import Request, Sampling
from luyen.rollout.single_turn import generate_groups
from luyen.runtime.generation import AsyncGeneration
from tests.talk import draws, setting

SHORT = Sampling(max_new_tokens=4, ignore_stop=True)
REFUSED = UserError("request", 1, "it can never be served", "ask for less")


class Scripted:
    """Stands for what makes rollouts: a draw is a coroutine that does something."""

    def __init__(self) -> None:
        self.has_ended = False

    async def converse(self, client: EngineClient, draws: Any, *_: Any, **__: Any) -> list[Any]:
        return [await one(client) for one in draws]

    async def wind_down(self) -> None:
        self.has_ended = True


class Refusing:
    """An engine that takes no request."""

    is_idle = is_batch_invariant = True

    def submit(self, request: Request) -> None:
        raise REFUSED

    def abort(self, request: str, sample: int | None = None) -> list[Any]:
        return []


async def placed(version: int, keep: Any) -> None:
    """The weights are there."""


def after(seconds: float, fault: BaseException | None = None) -> Callable[..., Any]:
    async def work(client: EngineClient) -> float:
        await asyncio.sleep(seconds)
        if fault is not None:
            raise fault
        return seconds

    return work


@pytest.fixture
def ahead():
    opened = AsyncGeneration(Refusing(), Scripted(), load_weights=placed)  # type: ignore[arg-type]
    yield opened
    opened.close()


def begin(ahead: AsyncGeneration, *work: Any, version: int = 0):
    ahead.publish(version).wait()
    return ahead.submit(work, SHORT, purpose="rollout", version=version)


def test_who_waits_for_one_generation_does_not_wait_for_others(ahead: AsyncGeneration):
    later, wanted = begin(ahead, after(5.0)), begin(ahead, after(0.1))
    start = time.monotonic()
    assert wanted.result() == [0.1]
    assert time.monotonic() - start < 0.6
    assert not later.done()


def test_an_error_of_any_generation_is_raised_wherever_the_caller_waits(ahead: AsyncGeneration):
    wanted = begin(ahead, after(5.0))
    begin(ahead, after(0.1, UserError("tools", 1, "it is broken", "mend it")))
    start = time.monotonic()
    with pytest.raises(UserError, match="it is broken"):
        wanted.result()
    assert time.monotonic() - start < 1.0


def test_an_error_of_any_generation_is_raised_to_who_only_looks(ahead: AsyncGeneration):
    wanted = begin(ahead, after(5.0))
    begin(ahead, after(0.0, UserError("tools", 1, "it is broken", "mend it")))
    time.sleep(0.2)
    with pytest.raises(UserError, match="it is broken"):
        wanted.done()


def test_a_refusal_of_the_engine_is_what_the_caller_gets():
    """Whoever catches it knows it by its kind, so it is in no group of errors."""
    how = setting()

    async def asked(client: EngineClient) -> Any:
        renderer = how.renderer
        return await generate_groups(
            client, renderer, draws(how, "?"), SHORT, seed=0, purpose="rollout", version=0
        )

    ahead = AsyncGeneration(Refusing(), Scripted(), load_weights=placed)  # type: ignore[arg-type]
    try:
        with pytest.raises(UserError, match="never be served"):
            begin(ahead, asked).result()
    finally:
        ahead.close()


def test_nobody_waits_for_a_thread_that_has_ended(ahead: AsyncGeneration):
    wanted = begin(ahead, after(60.0))
    ahead._loop.call_soon_threadsafe(ahead._loop.stop)
    start = time.monotonic()
    with pytest.raises(RuntimeError, match="has ended"):
        wanted.result()
    assert time.monotonic() - start < 3.0
    ahead._loop.run_until_complete(ahead._leave())
    ahead._loop.close()


def test_closing_ends_what_still_runs():
    script = Scripted()
    ahead = AsyncGeneration(Refusing(), script, load_weights=placed)  # type: ignore[arg-type]
    begin(ahead, after(60.0))
    start = time.monotonic()
    ahead.close()
    ahead.close()
    assert time.monotonic() - start < 2.0
    assert script.has_ended


def test_a_version_that_was_not_published_generates_nothing(ahead: AsyncGeneration):
    ahead.publish(0).wait()
    with pytest.raises(AssertionError, match="version 1 of the weights was not published"):
        ahead.submit((), SHORT, purpose="rollout", version=1)


def test_a_failed_publication_is_raised_where_it_is_waited_for():
    async def refused(version: int, keep: Any) -> None:
        raise REFUSED

    ahead = AsyncGeneration(Refusing(), Scripted(), load_weights=refused)  # type: ignore[arg-type]
    try:
        with pytest.raises(UserError, match="never be served"):
            ahead.publish(0).wait()
    finally:
        ahead.close()


def test_a_version_is_kept_as_long_as_it_is_needed():
    seen: list[tuple[int, set[int]]] = []

    async def load_weights(version: int, keep: Any) -> None:
        seen.append((version, set(keep)))

    ahead = AsyncGeneration(Refusing(), Scripted(), load_weights=load_weights)  # type: ignore[arg-type]
    try:
        for version, needed in ((0, {0}), (1, {1}), (2, set())):
            begin(ahead, after(0.0), version=version).result()
            ahead.keep_weights(needed)
    finally:
        ahead.close()
    assert seen == [(0, set()), (1, {0}), (2, {1})]
