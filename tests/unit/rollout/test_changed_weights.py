"""Weights that change in the middle of an answer: each token knows who drew it, and how likely."""

import asyncio
from dataclasses import replace

import pytest
import torch

from luyen.rollout.client import EngineClient, PartialCompletion
from luyen.rollout.engines import VersionedEngines
from luyen.rollout.protocol import Completion, Ending, Request, Sampling
from luyen.runtime.weights import copy_into
from tests.generation import native, packed_logps, prompt
from tests.tiny_models import tiny_policy

LONG = Sampling(max_new_tokens=24, ignore_stop=True)


def weights(seed: int):
    return dict(tiny_policy(seed=seed).named_parameters())


def client_over(engines: VersionedEngines) -> EngineClient:
    return EngineClient(engines)


async def place(engines: VersionedEngines, version: int) -> None:
    held = engines.hold(version).fingerprint()
    assert held is not None
    copy_into(held.weights, weights(version))


def answers(swaps: int, *, sampling: Sampling = LONG, count: int = 3) -> list[Completion]:
    """Answers to prompts, while the weights change so many times."""

    async def run() -> list[Completion]:
        engines = VersionedEngines(lambda: native(tiny_policy(seed=9)), versions=1)
        client = client_over(engines)
        async with client.running():
            await client.change_weights(0, place(engines, 0))
            asked = [
                asyncio.ensure_future(client.generate(prompt(7, seed=i), key=i, sampling=sampling))
                for i in range(count)
            ]
            for version in range(1, swaps + 1):
                for _ in range(80):
                    await asyncio.sleep(0)
                await client.change_weights(version, place(engines, version))
            return await asyncio.gather(*asked)

    return asyncio.run(run())


def test_each_token_has_the_log_probability_of_the_weights_that_drew_it():
    found = answers(2)
    assert {v for one in found for v in one.versions} == {0, 1, 2}
    for i, one in enumerate(found):
        assert len(one.tokens) == len(one.logps) == len(one.versions) == LONG.max_new_tokens
        assert list(one.versions) == sorted(one.versions)
        for version in set(one.versions):
            said = packed_logps(tiny_policy(seed=version), [(prompt(7, seed=i), one)])
            drawn = [k for k, v in enumerate(one.versions) if v == version]
            assert torch.equal(said[drawn], torch.tensor([one.logps[k] for k in drawn]))


def test_without_a_change_an_answer_is_what_the_engine_draws():
    changed = answers(0)

    async def run() -> list[Completion]:
        client = EngineClient(native(tiny_policy(seed=0)))
        async with client.running():
            asked = [client.generate(prompt(7, seed=i), key=i, sampling=LONG) for i in range(3)]
            return await asyncio.gather(*asked)

    for one, other in zip(changed, asyncio.run(run()), strict=True):
        assert (one.tokens, one.logps) == (other.tokens, other.logps)
        assert set(one.versions) == {0}


def test_an_answer_that_a_text_may_end_begins_anew():
    sampling = replace(LONG, stop_strings=("never said",))
    for one in answers(1, sampling=sampling):
        assert set(one.versions) == {1}
        assert len(one.tokens) == LONG.max_new_tokens


def test_the_rest_of_an_answer_has_other_random_numbers_and_less_room():
    whole = PartialCompletion(5, LONG)
    part = Completion(request="a", sample=0, tokens=(1, 2), logps=(-1.0, -2.0), reason="aborted")
    whole.continue_after(part, 3)
    assert whole.key != 5
    assert whole.sampling.max_new_tokens == 22
    assert whole.finish(replace(part, reason="length"), 4).versions == (3, 3, 4, 4)


def test_a_version_that_is_not_here_draws_nothing():
    engines = VersionedEngines(lambda: native(tiny_policy(seed=0)), versions=2)
    engines.hold(4)
    with pytest.raises(AssertionError, match="version 3 of the weights is not here"):
        engines.engine(3)
    engines.hold(5, keep={4})
    with pytest.raises(AssertionError, match="leave no room for 6"):
        engines.hold(6, keep={4, 5})
    assert engines.hold(6, keep={5}) is not engines.engine(5)
    assert engines.versions == (5, 6)


class Remote:
    """An engine elsewhere: while it stops one answer another ends, and it tells of that later."""

    is_batch_invariant = True

    def __init__(self) -> None:
        self.asked: dict[str, Request] = {}
        self.finished: list[Completion] = []

    @property
    def is_idle(self) -> bool:
        return not self.asked and not self.finished

    def submit(self, request: Request) -> None:
        self.asked[request.id] = request

    def advance(self) -> list[Completion]:
        told, self.finished = self.finished, []
        return told

    def abort(self, request: str, sample: int | None = None) -> list[Completion]:
        if self.asked.pop(request, None) is None:
            return []
        self.finished += [said(name, "stop") for name in self.asked]
        self.asked.clear()
        return [said(request, "aborted")]


def said(request: str, reason: Ending) -> Completion:
    return Completion(request=request, sample=0, tokens=(1, 2), logps=(-1.0, -2.0), reason=reason)


def test_an_answer_that_ends_while_others_are_stopped_is_neither_lost_nor_of_the_new_weights():
    async def nothing() -> None:
        """There is nothing to write."""

    async def run() -> list[Completion]:
        engine = Remote()
        client = EngineClient(engine)  # type: ignore[arg-type]
        async with client.running(), asyncio.timeout(5.0):
            await client.change_weights(0, nothing())
            asked = [
                asyncio.ensure_future(client.generate(prompt(7, seed=i), key=i, sampling=LONG))
                for i in range(3)
            ]
            while len(engine.asked) < 3:
                await asyncio.sleep(0)
            await client.change_weights(1, nothing())
            while not engine.asked:
                await asyncio.sleep(0)
            engine.finished = [said(name, "length") for name in engine.asked]
            engine.asked.clear()
            return await asyncio.gather(*asked)

    first, *others = asyncio.run(run())
    assert (first.versions, first.reason) == ((0, 0, 1, 1), "length")
    assert [(one.versions, one.reason) for one in others] == [((0, 0), "stop")] * 2


def test_a_least_length_holds_over_changes_of_weights():
    stops = frozenset(range(30))
    sampling = Sampling(max_new_tokens=24, stop_ids=stops, min_new_tokens=20)
    found = answers(2, sampling=sampling)
    assert {v for one in found for v in one.versions} == {0, 1, 2}
    for one in found:
        assert len(one.tokens) > 20
        assert not stops.intersection(one.tokens[:20])
        assert len(one.kept_mass) == len(one.tokens) == len(one.logps)
        assert max(one.kept_mass[:20]) < 1.0 - 1e-6
