"""Sessions of a box: opened once, scored, released exactly once, whatever breaks."""

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from luyen.base.errors import UserError
from luyen.base.records import CallStatus, Prompt, ToolCall, make_prompt
from luyen.rollout.parsers.protocol import WrittenCall
from luyen.rollout.tools.protocol import Tool, ToolLimits, ToolReply, ToolSession
from luyen.rollout.tools.registry import ToolRegistry
from luyen.rollout.tools.rollout_tools import RolloutTools
from luyen.rollout.tools.user_code import ToolFault

PROMPT = make_prompt([{"role": "user", "content": "Hi"}])


class Recorded:
    """A tool that writes down what is done to it, and breaks where it is told to."""

    limits = ToolLimits(timeout_s=0.05)

    def __init__(self, name: str, breaks: str = "", score: Any = None) -> None:
        self.name = name
        self.schema = {"type": "function", "function": {"name": name}}
        self.breaks = breaks
        self.given = score
        self.done: list[str] = []

    async def _do(self, what: str) -> None:
        self.done.append(what)
        if self.breaks == what:
            raise RuntimeError(f"{what} broke")
        if self.breaks == f"hang in {what}":
            await asyncio.sleep(1000)

    async def open(self, prompt: Prompt, key: int) -> ToolSession:
        await self._do("open")
        return self

    async def call(self, arguments: Mapping[str, Any]) -> ToolReply:
        await self._do("call")
        return ToolReply(text="ok")

    async def score(self) -> float | None:
        await self._do("score")
        return self.given

    async def release(self) -> None:
        await self._do("release")

    async def close(self) -> None:
        await self._do("close")


@pytest.mark.parametrize("breaks", ["call", "score", "release", "hang in release", "hang in score"])
def test_every_session_is_released_exactly_once(breaks: str):
    broken, sound = Recorded("broken", breaks), Recorded("sound", score=0.5)

    async def run() -> tuple[RolloutTools, dict[str, float]]:
        tools = await ToolRegistry([broken, sound], end_s=0.05).open(PROMPT, 0)
        scores: dict[str, float] = {}
        try:
            await tools.call(WrittenCall(name="broken", arguments={}), 0)
            scores = await tools.score()
        except ToolFault:
            scores = {"fault": 1.0}
        finally:
            await tools.release()
            await tools.release()
        return tools, scores

    tools, scores = asyncio.run(run())
    assert [t.done.count("release") for t in (broken, sound)] == [1, 1]
    assert scores == ({"fault": 1.0} if "score" in breaks else {"sound": 0.5})
    assert len(tools.problems) == ("release" in breaks)


def test_a_score_that_is_no_number_is_a_fault():
    async def run() -> dict[str, float]:
        return await (
            await ToolRegistry([Recorded("a", score=float("inf"))]).open(PROMPT, 0)
        ).score()

    with pytest.raises(ToolFault, match="its score is inf, no number"):
        asyncio.run(run())


@pytest.mark.parametrize("breaks", ["open", "hang in open"])
def test_a_tool_that_cannot_be_opened_fails_its_calls_or_the_rollout(breaks: str):
    broken, sound = Recorded("act", breaks), Recorded("sound")

    async def called() -> ToolCall:
        tools = await ToolRegistry([broken]).open(PROMPT, 0)
        return await tools.call(WrittenCall(name="act", arguments={}), 0)

    made = asyncio.run(called())
    assert (made.status, made.attempts) == (CallStatus.FAILED, 0)
    assert "start" in made.result
    with pytest.raises(ToolFault, match="start"):
        asyncio.run(ToolRegistry([sound, broken], on_error="fault").open(PROMPT, 0))
    assert sound.done == ["open", "release"]
    assert "release" not in broken.done


def test_names_choose_tools_and_worlds_bring_more():
    a, b, c = Recorded("a"), Recorded("b"), Recorded("c")
    box = ToolRegistry([a, b])

    def offered(*names: str, extra: tuple[Tool, ...] = ()) -> list[str]:
        return [s["function"]["name"] for s in box.schemas(names or None, extra=extra)]

    assert offered() == ["a", "b"]
    assert offered("b", extra=(c,)) == ["b", "c"]
    assert box.schemas([]) == ()
    with pytest.raises(UserError, match="no tool of this name"):
        box.schemas(["zebra"])
    with pytest.raises(UserError, match="two tools have this name"):
        offered(extra=(Recorded("a"),))
    with pytest.raises(UserError, match="two tools have this name"):
        ToolRegistry([a, Recorded("a")])

    async def run() -> ToolCall:
        tools = await box.open(PROMPT, 0, ["b"], extra=(c,))
        assert (await tools.call(WrittenCall(name="c", arguments={}), 0)).result == "ok"
        return await tools.call(WrittenCall(name="a", arguments={}), 0)

    assert asyncio.run(run()).status == CallStatus.UNKNOWN_TOOL


def test_close_closes_all_and_reports():
    broken, hanging, sound = Recorded("a", "close"), Recorded("b", "hang in close"), Recorded("c")
    said = asyncio.run(ToolRegistry([broken, hanging, sound], end_s=0.05).close())
    assert said == ["a: close: RuntimeError: close broke", "b: close took too long"]
    assert sound.done == ["close"]
