"""MCP servers, started for real."""

import asyncio
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from luyen.base.errors import UserError
from luyen.base.records import CallStatus, ToolCall, make_prompt
from luyen.rollout.parsers.protocol import WrittenCall
from luyen.rollout.tools.registry import ToolRegistry
from luyen.rollout.tools.rollout_tools import CallJournal
from luyen.telemetry.journal import WorkJournal

pytest.importorskip("mcp", reason="the extra `tools` is not installed")
from luyen.rollout.tools.mcp import McpTarget, mcp_tools

SERVER = str(Path(__file__).parent / "mcp_server.py")
STDIO = McpTarget(command=(sys.executable, SERVER, "stdio"))


def calls(box: ToolRegistry, *written: tuple[str, dict[str, object]]) -> list[ToolCall]:
    """Make calls one after the other, in a loop of their own."""

    async def run() -> list[ToolCall]:
        tools = await box.open(make_prompt([]), 0)
        made = [await tools.call(WrittenCall(name=n, arguments=a), 0) for n, a in written]
        await tools.release()
        return made

    return asyncio.run(run())


@pytest.fixture(scope="module")
def stdio() -> Iterator[ToolRegistry]:
    box = ToolRegistry(mcp_tools(STDIO))
    yield box
    assert asyncio.run(box.close()) == []


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_schemas_come_from_the_server(stdio: ToolRegistry):
    assert stdio.names == ("add", "fail", "die", "key", "pid")
    function = stdio.schemas(["add"])[0]["function"]
    assert function["description"] == "Add two numbers."
    assert function["parameters"]["required"] == ["a", "b"]


def test_calls_work_over_several_event_loops(stdio: ToolRegistry):
    first, wrong = calls(stdio, ("add", {"a": 2, "b": 3}), ("add", {"a": "x", "b": 3}))
    assert (first.status, first.result) == (CallStatus.OK, "5")
    assert wrong.status == CallStatus.INVALID_ARGUMENTS
    assert calls(stdio, ("add", {"a": 4, "b": 3}))[0].result == "7"


def test_an_error_that_the_server_reports_is_read_by_the_policy(stdio: ToolRegistry):
    (failed,) = calls(stdio, ("fail", {}))
    assert failed.status == CallStatus.FAILED
    assert failed.result.startswith("Error: ")
    assert "fail" in failed.result


def test_a_server_that_dies_fails_the_call_and_the_next_one_reconnects(stdio: ToolRegistry):
    before, died, after = calls(stdio, ("pid", {}), ("die", {}), ("pid", {}))
    assert died.status == CallStatus.FAILED
    assert after.status == CallStatus.OK
    assert before.result != after.result


def test_close_ends_the_process():
    box = ToolRegistry(mcp_tools(STDIO, select=["pid"], prefix="numbers_"))
    assert box.names == ("numbers_pid",)
    pid = int(calls(box, ("numbers_pid", {}))[0].result)
    assert is_alive(pid)
    assert asyncio.run(box.close()) == []
    assert not is_alive(pid)
    (late,) = calls(box, ("numbers_pid", {}))
    assert late.status == CallStatus.FAILED
    assert asyncio.run(box.close()) == []


def test_an_unknown_selection_and_a_broken_server_are_explained(tmp_path: Path):
    with pytest.raises(UserError, match=r"no tool of this name.*did you mean `add`"):
        mcp_tools(STDIO, select=["addd"])
    broken = tmp_path / "broken.py"
    broken.write_text("raise SystemExit('no licence')")
    with pytest.raises(UserError, match="it said: no licence"):
        mcp_tools(McpTarget(command=(sys.executable, str(broken))))
    with pytest.raises(UserError, match="does not answer"):
        mcp_tools(McpTarget(command=(str(tmp_path / "nowhere"),)))
    with pytest.raises(UserError, match="does not answer"):
        mcp_tools(McpTarget(url="http://127.0.0.1:9/mcp"))


FLOOD = """
import os, sys, threading
os.write(2, b"x" * 2**25 + b"\\nlast words\\n")
sys.path.insert(0, {folder!r})
if {is_broken}: raise SystemExit(1)
from mcp_server import server
server.run("stdio")
"""


def test_what_a_server_prints_without_end_takes_no_room(tmp_path: Path):
    file, folder = tmp_path / "flood.py", str(Path(SERVER).parent)
    file.write_text(FLOOD.format(folder=folder, is_broken=False))
    tools = mcp_tools(McpTarget(command=(sys.executable, str(file))), select=["add"])
    sizes = [os.fstat(int(one)).st_size for one in os.listdir("/proc/self/fd") if is_open(one)]
    asyncio.run(tools[0].close())
    assert max(sizes, default=0) < 2**25
    file.write_text(FLOOD.format(folder=folder, is_broken=True))
    with pytest.raises(UserError, match="it said: last words"):
        mcp_tools(McpTarget(command=(sys.executable, str(file))))


def is_open(handle: str) -> bool:
    """Whether it is an unlinked file of this process."""
    try:
        return os.readlink(f"/proc/self/fd/{handle}").endswith("(deleted)")
    except OSError:
        return False


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def started(port: int) -> subprocess.Popen[bytes]:
    """A server over HTTP, once it listens."""
    command = [sys.executable, SERVER, "http", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while True:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return process
        assert process.poll() is None, "the server ended"
        time.sleep(0.05)


def test_a_server_over_http_is_called_and_found_again_after_a_restart():
    port = free_port()
    process = started(port)
    box = ToolRegistry(
        mcp_tools(McpTarget(url=f"http://127.0.0.1:{port}/mcp", headers={"X-Key": "1"}))
    )
    try:
        assert calls(box, ("add", {"a": 2, "b": 3}))[0].result == "5"
        died, gone = calls(box, ("die", {}), ("add", {"a": 2, "b": 3}))
        assert died.status == gone.status == CallStatus.FAILED
        process.wait()
        process = started(port)
        assert calls(box, ("add", {"a": 4, "b": 3}))[0].result == "7"
    finally:
        process.kill()
        process.wait()
        assert asyncio.run(box.close()) == []


def test_a_server_is_told_the_key_of_a_call(stdio: ToolRegistry, tmp_path: Path):
    journal = WorkJournal(tmp_path, run_id="r")
    journal.begin(0, kind="work", basis=[])

    async def told(ledger: CallJournal | None) -> str:
        tools = await stdio.open(make_prompt([]), 0, ledger=ledger)
        made = await tools.call(WrittenCall(name="key", arguments={}), 0)
        await tools.release()
        return made.result

    ledger = CallJournal(journal, [1])
    assert asyncio.run(told(ledger)) == journal.call_key([1, 0, 0], "key", {})
    assert asyncio.run(told(None)) == "None"
    journal.close()
