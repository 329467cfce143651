"""Coroutines over one engine: together where prompts are equal, apart in everything else."""

import asyncio

from luyen.base.errors import UserError
from luyen.rollout.client import EngineClient
from luyen.rollout.protocol import Completion, Sampling
from tests.talk import TOKENIZER, ScriptedEngine

SAMPLING = Sampling(max_new_tokens=50, stop_ids=TOKENIZER.stop_ids)


def ask(engine, *asked, deadline: float | None = None):
    """Answers to (text, key) pairs, all asked at once; errors are given back."""

    async def together():
        client = EngineClient(engine)
        until = None if deadline is None else asyncio.get_running_loop().time() + deadline
        async with client.running():
            draws = (
                client.generate(
                    tuple(TOKENIZER.encode(text)), key=key, sampling=SAMPLING, deadline=until
                )
                for text, key in asked
            )
            return await asyncio.gather(*draws, return_exceptions=True)

    return asyncio.run(together())


def echo(text: str, key: int) -> str:
    return f"{text}{key}<|im_end|>"


def said(completion: Completion) -> str:
    return TOKENIZER.decode(completion.tokens)


def test_everyone_gets_their_own_answer():
    asked = [("a", 1), ("b", 2), ("a", 3), ("c", 4), ("a", 5)]
    engine = ScriptedEngine(echo)
    assert [said(c) for c in ask(engine, *asked)] == ["a1", "b2", "a3", "c4", "a5"]
    assert sorted(len(request.keys) for request in engine.requests) == [1, 1, 3]


def test_answers_arrive_as_they_finish():
    finished: list[str] = []

    async def talk():
        client = EngineClient(ScriptedEngine(lambda text, _: "x" * int(text) + "<|im_end|>"))

        async def one(count: str) -> None:
            await client.generate(tuple(TOKENIZER.encode(count)), key=0, sampling=SAMPLING)
            finished.append(count)

        async with client.running():
            await asyncio.gather(one("9"), one("2"), one("5"))

    asyncio.run(talk())
    assert finished == ["2", "5", "9"]


def test_a_newcomer_is_served_while_others_run():
    order: list[str] = []

    async def talk():
        engine = ScriptedEngine(lambda text, _: "x" * int(text) + "<|im_end|>")
        client = EngineClient(engine)
        sampling = Sampling(max_new_tokens=500, stop_ids=TOKENIZER.stop_ids)

        async def one(count: str) -> None:
            await client.generate(tuple(TOKENIZER.encode(count)), key=0, sampling=sampling)
            order.append(count)

        async with client.running():
            long = asyncio.create_task(one("400"))
            while engine.passes < 3:
                await asyncio.sleep(0)
            await one("5")
            await long

    asyncio.run(talk())
    assert order == ["5", "400"]


def test_at_the_deadline_there_is_what_was_drawn():
    class Slow(ScriptedEngine):
        def advance(self):
            import time

            time.sleep(0.01)
            return super().advance()

    quick, slow = ask(
        Slow(lambda text, _: ("y" if text == "q" else "x" * 40) + "<|im_end|>"),
        ("q", 0),
        ("s", 0),
        deadline=0.1,
    )
    assert (said(quick), quick.reason) == ("y", "stop")
    assert slow.reason == "aborted"
    assert 0 < len(slow.tokens) < 40


def test_one_sample_of_a_request_can_be_withdrawn():
    async def talk():
        engine = ScriptedEngine(lambda _, key: "x" * 30 + f"{key}<|im_end|>")
        client = EngineClient(engine)
        async with client.running():
            tasks = [
                asyncio.create_task(client.generate((5, 6), key=key, sampling=SAMPLING))
                for key in range(3)
            ]
            while engine.passes < 4:
                await asyncio.sleep(0)
            tasks[1].cancel()
            return await asyncio.gather(*tasks, return_exceptions=True)

    first, gone, last = asyncio.run(talk())
    assert isinstance(gone, asyncio.CancelledError)
    assert [said(first)[-1], said(last)[-1]] == ["0", "2"]


def test_a_refused_request_fails_alone():
    class Picky(ScriptedEngine):
        def submit(self, request):
            if len(request.tokens) > 3:
                raise UserError("request", len(request.tokens), "too long", "shorten it")
            super().submit(request)

    fine, refused = ask(Picky(echo), ("a", 1), ("abcdef", 2))
    assert said(fine) == "a1"
    assert isinstance(refused, UserError)


def test_a_failing_engine_fails_everyone():
    class Failing(ScriptedEngine):
        def advance(self):
            raise MemoryError("no pages")

    assert [type(found) for found in ask(Failing(echo), ("a", 1), ("b", 2))] == [MemoryError] * 2


def test_an_engine_that_fails_while_an_answer_is_withdrawn_fails_everyone():
    class Failing(ScriptedEngine):
        def abort(self, request, sample=None):
            raise MemoryError("no pages")

    async def talk():
        engine = Failing(lambda *_: "x" * 40)
        client = EngineClient(engine)
        pump = asyncio.create_task(client._pump())
        others = [
            asyncio.create_task(client.generate((5,), key=k, sampling=SAMPLING)) for k in (0, 1)
        ]
        while engine.passes < 2:
            await asyncio.sleep(0)
        others[0].cancel()
        found = await asyncio.gather(*others, return_exceptions=True)
        pump.cancel()
        return found, client.failure

    found, failure = asyncio.run(talk())
    assert isinstance(failure, MemoryError)
    assert found == [failure, failure]


def test_leaving_stops_what_is_still_asked_for():
    async def talk():
        engine = ScriptedEngine(lambda *_: "x" * 40)
        client = EngineClient(engine)
        async with client.running():
            task = asyncio.create_task(client.generate((5,), key=0, sampling=SAMPLING))
            while engine.passes < 2:
                await asyncio.sleep(0)
            task.cancel()
        return engine.is_idle

    assert asyncio.run(talk())
