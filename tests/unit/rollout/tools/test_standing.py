"""Tools that stand: one session for all rollouts, which nobody opens, asks or lets go."""

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from luyen.base.records import CallStatus, Prompt, ToolCall, make_prompt
from luyen.rollout.parsers.protocol import WrittenCall
from luyen.rollout.tools.protocol import SharedSession, Tool, ToolLimits, ToolReply, ToolSession
from luyen.rollout.tools.python_tools import tool
from luyen.rollout.tools.registry import ToolRegistry
from luyen.rollout.tools.user_code import ToolFault

PROMPT = make_prompt([{"role": "user", "content": "Hi"}])


class Recorded:
    """A tool, and its session, that writes down what is done to it."""

    limits = ToolLimits()

    def __init__(self, name: str, *, is_broken: bool = False) -> None:
        self.name = name
        self.schema = {"type": "function", "function": {"name": name}}
        self.is_broken = is_broken
        self.done: list[str] = []

    async def open(self, prompt: Prompt, key: int) -> ToolSession:
        self.done.append("open")
        if self.is_broken:
            raise OSError("no server")
        return self

    async def call(self, arguments: Mapping[str, Any]) -> ToolReply:
        self.done.append("call")
        return ToolReply(text=f"{self.name} says")

    async def score(self) -> float | None:
        self.done.append("score")
        return 0.5

    async def release(self) -> None:
        self.done.append("release")

    async def close(self) -> None:
        self.done.append("close")


class Stands(Recorded, SharedSession):
    """One whose session is there before it is opened."""

    @property
    def session(self) -> ToolSession:
        return self


def rollout_of(
    box: ToolRegistry, *called: str, **more: Any
) -> tuple[list[ToolCall], dict[str, float], list[str]]:
    """The calls, scores and problems of one rollout."""

    async def run() -> tuple[list[ToolCall], dict[str, float], list[str]]:
        tools = await box.open(PROMPT, 0, **more)
        try:
            made = [await tools.call(WrittenCall(name=name, arguments={}), 0) for name in called]
            return made, await tools.score(), tools.problems
        finally:
            await tools.release()

    return asyncio.run(run())


def test_a_standing_tool_is_called_and_nothing_else_is_done_to_it():
    stands = Stands("stands")
    box = ToolRegistry([stands])
    for _ in range(3):
        [made], scores, problems = rollout_of(box, "stands")
        assert (made.status, made.result) == (CallStatus.OK, "stands says")
        assert (scores, problems) == ({}, [])
    assert stands.done == ["call"] * 3
    asyncio.run(box.close())
    assert stands.done == ["call"] * 3 + ["close"], "the run still lets it go"


def shout() -> str:
    """Shout."""
    return "HA"


@pytest.mark.parametrize("in_process", [False, True])
def test_a_function_stands(in_process: bool):
    stands, session = tool(in_process=in_process)(shout), Recorded("shout")
    assert isinstance(stands, SharedSession)
    assert asyncio.run(stands.open(PROMPT, 0)) is stands.session
    stands.session = session
    [made], scores, _ = rollout_of(ToolRegistry([stands]), "shout")
    assert (made.result, scores) == ("shout says", {})
    assert session.done == ["call"]


def test_a_function_with_other_limits_stands_as_well():
    first = tool(timeout_s=2.0)(shout)
    other = first.with_limits(unless_own={"retries": 3}, above={"concurrency": 1})
    assert isinstance(other, SharedSession)
    assert other.session is not first.session
    [made], _, _ = rollout_of(ToolRegistry([other]), "shout")
    assert made.result == "HA"


def test_a_tool_with_a_state_beside_it_is_opened_asked_and_let_go():
    stands, stateful = Stands("stands"), Recorded("stateful")
    box = ToolRegistry([stands, stateful])
    for _ in range(2):
        made, scores, _ = rollout_of(box, "stateful", "stands")
        assert [call.result for call in made] == ["stateful says", "stands says"]
        assert scores == {"stateful": 0.5}
    assert stands.done == ["call"] * 2
    assert stateful.done == ["open", "call", "score", "release"] * 2


@pytest.mark.parametrize("marks", ["srs", "rsr", "rrs", "ssr"])
def test_tools_keep_their_order_however_kinds_are_mixed(marks: str):
    kinds = {"s": Stands, "r": Recorded}
    tools: list[Tool] = [
        kinds[mark](name) for mark, name in zip(marks, ("one", "two", "six"), strict=True)
    ]
    [missing], scores, _ = rollout_of(ToolRegistry(tools), "zebra")
    assert missing.result.endswith("the tools are: `one`, `two`, `six`")
    assert list(scores) == [made.name for made in tools if not isinstance(made, SharedSession)]


def test_those_of_a_world_come_last_and_stand_too():
    stands, stateful = Stands("one"), Recorded("two")
    brought = [Stands("six"), Recorded("ten")]
    box = ToolRegistry([stateful, stands])
    [missing, made], scores, _ = rollout_of(box, "zebra", "six", extra=brought)
    assert missing.result.endswith("the tools are: `two`, `one`, `six`, `ten`")
    assert (made.result, scores) == ("six says", {"two": 0.5, "ten": 0.5})
    assert [brought[0].done, stands.done] == [["call"], []]
    assert stateful.done == brought[1].done == ["open", "score", "release"]


def test_where_another_tool_cannot_be_opened_a_standing_one_is_left_alone():
    stands, sound, broken = Stands("stands"), Recorded("sound"), Recorded("bad", is_broken=True)
    with pytest.raises(ToolFault, match="no server"):
        rollout_of(ToolRegistry([stands, broken, sound], on_error="fault"))
    assert (stands.done, sound.done) == ([], ["open", "release"])


def test_only_tools_that_are_chosen_are_there():
    stands, stateful = Stands("stands"), Recorded("stateful")
    [made], scores, _ = rollout_of(ToolRegistry([stands, stateful]), "stateful", names=["stands"])
    assert (made.status, scores) == (CallStatus.UNKNOWN_TOOL, {})
    assert stateful.done == []
