"""Conversations that are not begun early: what they open, and their time, begin when they do."""

import asyncio
import time

from luyen.base.records import StopReason
from luyen.rollout.multi_turn import Conversations
from luyen.rollout.protocol import Sampling
from luyen.rollout.tools.python_tools import tool_class
from tests.talk import KEEP, TOKENIZER, ScriptedEngine, call, draws, setting

SAMPLING = Sampling(max_new_tokens=400, stop_ids=TOKENIZER.stop_ids)
HERE = {"seed": 0, "purpose": "rollout", "version": 3}


def test_a_time_budget_begins_when_the_conversation_is_played():
    how = setting(budget_s=0.2)
    talks = Conversations(how, KEEP)
    asked = talks.begin(ScriptedEngine(lambda *_: "3<|im_end|>"), draws(how, "q"), SAMPLING, **HERE)
    time.sleep(0.3)  # the controller writes the step down
    [group] = asked()
    talks.close()
    [rollout] = group.rollouts
    assert (rollout.stop, rollout.text) == (StopReason.ANSWERED, "3")


def test_the_time_of_a_tool_that_opens_begins_when_the_conversation_is_played():
    @tool_class(timeout_s=0.2)
    class Slow:
        async def create(self) -> None:
            await asyncio.sleep(0.03)  # connects
            await asyncio.sleep(0.03)  # says hello

        async def call(self, a: int) -> str:
            """Nothing."""
            return str(a)

    how = setting([Slow])
    said = call("slow", a=1) + "<|im_end|>"
    engine = ScriptedEngine(lambda text, _: "3<|im_end|>" if "<tool_response>" in text else said)
    talks = Conversations(how, KEEP)
    asked = talks.begin(engine, draws(how, "q"), SAMPLING, **HERE)
    time.sleep(0.3)
    [group] = asked()
    talks.close()
    [made] = group.rollouts[0].calls
    assert made.result == "1"
