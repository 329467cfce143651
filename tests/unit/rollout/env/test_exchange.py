"""A program that calls the policy and a conversation that calls its world take turns."""

import asyncio

import pytest

from luyen.base.boundary import ForeignExit
from luyen.rollout.env.verifiers_env import Exchange


def say(text: str):
    return [{"role": "user", "content": text}]


def test_the_two_sides_take_turns_and_the_end_is_known():
    async def talk():
        exchange, heard = Exchange(), []

        async def program():
            heard.append(await exchange.ask(say("a")))
            heard.append(await exchange.ask(say("b")))

        asked = [await exchange.start(program())]
        asked.append(await exchange.tell(say("1")))
        asked.append(await exchange.tell(say("2")))
        await exchange.finish()
        await exchange.close()
        return asked, heard

    asked, heard = asyncio.run(talk())
    assert asked == [say("a"), say("b"), None]
    assert heard == [say("1"), say("2")]


def test_a_program_that_still_waits_is_told_once_that_nobody_answers():
    async def talk(*, asks_on: bool):
        exchange, heard = Exchange(), []

        async def program():
            heard.append(await exchange.ask(say("a")))
            if asks_on:
                await exchange.ask(say("b"))

        await exchange.start(program())
        try:
            await exchange.finish()
        finally:
            await exchange.close()
        return heard

    assert asyncio.run(talk(asks_on=False)) == [None]
    with pytest.raises(RuntimeError, match="asks on"):
        asyncio.run(talk(asks_on=True))


@pytest.mark.parametrize("before", [True, False])
def test_what_the_program_raises_is_raised_where_the_conversation_waits(before: bool):
    async def talk():
        exchange = Exchange()

        async def program():
            if not before:
                await exchange.ask(say("a"))
            raise ValueError("broken")

        try:
            await exchange.start(program())
            await exchange.tell(say("1"))
        finally:
            await exchange.close()

    with pytest.raises(ValueError, match="broken"):
        asyncio.run(talk())


def test_closing_ends_a_program_wherever_it_is():
    async def talk():
        exchange, ended = Exchange(), []

        async def program():
            try:
                await exchange.ask(say("a"))
            finally:
                ended.append(1)

        await exchange.start(program())
        await exchange.close()
        await Exchange().close()
        return ended

    assert asyncio.run(talk()) == [1]


@pytest.mark.parametrize("fault", [SystemExit(0), KeyboardInterrupt(), GeneratorExit()])
def test_a_program_that_would_end_the_process_ends_only_itself(fault):
    async def talk():
        exchange = Exchange()

        async def program():
            await exchange.ask(say("a"))
            raise fault

        await exchange.start(program())
        with pytest.raises(ForeignExit) as caught:
            await exchange.tell(say("1"))
        await exchange.close()
        return caught.value.raised

    assert asyncio.run(talk()) is fault
