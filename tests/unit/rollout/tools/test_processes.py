"""Tools in processes of their own: what hangs is killed, what dies fails."""

import asyncio
import os
from collections.abc import Iterator

import pytest

from luyen.base.errors import UserError
from luyen.base.records import CallStatus, ToolCall, make_prompt
from luyen.rollout.parsers.protocol import WrittenCall
from luyen.rollout.tools import tool
from luyen.rollout.tools.registry import ToolRegistry
from luyen.rollout.tools.tool_file import load_tools


@pytest.fixture(scope="module")
def box() -> Iterator[ToolRegistry]:
    path = str(__file__).replace("test_processes", "slow_tools")
    made = ToolRegistry(load_tools(function_tool_path=path))
    yield made
    assert asyncio.run(made.close()) == []


def call(box: ToolRegistry, name: str, **arguments: int) -> ToolCall:
    async def run() -> ToolCall:
        tools = await box.open(make_prompt([]), 0, [name])
        return await tools.call(WrittenCall(name=name, arguments=arguments), 0)

    return asyncio.run(run())


def test_a_call_runs_elsewhere(box: ToolRegistry):
    assert call(box, "double", number=21).result == "42"
    assert call(box, "where").result != str(os.getpid())


def test_what_hangs_is_killed_and_what_dies_fails(box: ToolRegistry):
    hung = call(box, "hang")
    assert (hung.status, hung.result) == (CallStatus.TIMED_OUT, "Error: no answer within 0.2 s")
    died = call(box, "die")
    assert (died.status, died.attempts) == (CallStatus.FAILED, 2)
    assert "exit code 7" in died.result


def test_what_the_tool_says_and_floods_come_through(box: ToolRegistry):
    said = call(box, "complain")
    assert (said.result, said.attempts) == ("Error: not this one", 1)
    assert call(box, "flood").result.count("x") == 256


def test_a_function_that_no_other_process_finds_is_refused():
    with pytest.raises(UserError, match="only at the top of a file"):

        @tool(in_process=True)
        def nested() -> str:
            """Hide."""
            return ""
