"""The box: nothing that a tool does is raised, every call says what became of it."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import pytest

from luyen.base.records import CallStatus, ToolCall, make_prompt
from luyen.rollout.parsers.protocol import WrittenCall
from luyen.rollout.tools.protocol import Tool, ToolReply
from luyen.rollout.tools.python_tools import FunctionTool, tool
from luyen.rollout.tools.registry import ToolRegistry
from luyen.rollout.tools.user_code import InvalidArguments, ToolError, ToolFault

PROMPT = make_prompt([{"role": "user", "content": "Hi"}])


def acting(act: Callable[[], Any], **limits: float) -> FunctionTool:
    """A tool called `act` that does this."""

    @tool(**limits)
    async def act_() -> Any:
        """Do it."""
        done = act()
        return await done if isinstance(done, Awaitable) else done

    return FunctionTool(act_.function, name="act", limits=limits)


def one_call(
    made: Tool, name: str = "act", arguments: Mapping[str, Any] | None = None, **options: Any
) -> ToolCall:
    """A single call, made in a box of its own."""

    async def run() -> ToolCall:
        tools = await ToolRegistry([made], **options).open(PROMPT, 0)
        try:
            return await tools.call(WrittenCall(name=name, arguments=arguments or {}), 3)
        finally:
            await tools.release()

    return asyncio.run(run())


def raising(fault: BaseException) -> Callable[[], Any]:
    def act() -> Any:
        raise fault

    return act


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


def test_a_result_says_what_became_of_the_call():
    made = one_call(acting(lambda: {"a": [1, "é"]}))
    assert made == ToolCall(
        turn=3,
        name="act",
        status=CallStatus.OK,
        result='{"a": [1, "é"]}',
        attempts=1,
        seconds=made.seconds,
    )
    assert made.seconds > 0


def test_a_reply_carries_a_reward_and_metrics():
    async def run() -> tuple[ToolCall, dict[str, float]]:
        reply = ToolReply(text="ok", reward=0.5, metrics={"hits": 2})
        tools = await ToolRegistry([acting(lambda: reply)]).open(PROMPT, 0)
        await tools.call(WrittenCall(name="act", arguments={}), 0)
        return await tools.call(WrittenCall(name="act", arguments={}), 0), tools.metrics

    made, metrics = asyncio.run(run())
    assert made.reward == 0.5
    assert metrics == {"act/hits": 4.0}


@pytest.mark.parametrize(
    ("act", "result"),
    [
        (raising(ValueError("a\nb")), "Error: ValueError: a b"),
        (raising(SystemExit(3)), "Error: SystemExit: 3"),
        (raising(KeyboardInterrupt()), "Error: KeyboardInterrupt"),
        (raising(GeneratorExit()), "Error: GeneratorExit"),
        (raising(BaseException("odd")), "Error: BaseException: odd"),
        (raising(MemoryError()), "Error: MemoryError"),
        (raising(Unprintable()), "Error: Unprintable"),
        (raising(asyncio.CancelledError()), "Error: CancelledError"),
        (raising(TimeoutError("of its own")), "Error: TimeoutError: of its own"),
        (raising(StopIteration()), "Error: RuntimeError: coroutine raised StopIteration"),
        (raising(ToolError("no such page")), "Error: no such page"),
        (
            object,
            "Error: TypeError: it returned a object, which is no text and has no JSON form",
        ),
        (
            lambda: ToolReply(text="x", reward=float("nan")),
            "Error: TypeError: its reward is nan, no number",
        ),
    ],
)
def test_whatever_a_tool_raises_is_one_line_to_the_policy(act: Callable[[], Any], result: str):
    made = one_call(acting(act))
    assert (made.status, made.result) == (CallStatus.FAILED, result)
    assert made.error is not None


def test_the_recorded_error_says_where():
    assert "test_box.py:" in str(one_call(acting(raising(KeyError("k")))).error)


def test_the_policys_own_mistakes():
    made = acting(lambda: "ok")
    unknown = one_call(made, name="atc")
    assert unknown.status == CallStatus.UNKNOWN_TOOL
    assert unknown.result == "Error: there is no tool `atc`; did you mean `act`?"
    invalid = one_call(made, arguments={"x": 1})
    assert invalid.status == CallStatus.INVALID_ARGUMENTS
    assert invalid.result == "Error: unknown argument `x`; known: none"
    late = one_call(acting(raising(InvalidArguments("`x` must be a date")), retries=3))
    assert (late.status, late.attempts) == (CallStatus.INVALID_ARGUMENTS, 1)


def test_hangs_of_every_kind_time_out():
    async def stubborn() -> str:
        while True:
            try:
                await gone.wait()
            except asyncio.CancelledError:
                if enough.is_set():
                    raise
                enough.set()

    gone, enough = asyncio.Event(), asyncio.Event()
    for act in (lambda: asyncio.sleep(1000), stubborn):
        made = one_call(acting(act, timeout_s=0.02))
        assert made.status == CallStatus.TIMED_OUT
        assert made.result == "Error: no answer within 0.02 s"


def test_threads_that_hang_are_left_and_when_too_many_do_calls_are_refused():
    ended = threading.Event()

    @tool(timeout_s=0.02, concurrency=2)
    def act() -> str:
        """Hang."""
        ended.wait()
        return "late"

    async def run() -> list[ToolCall]:
        tools = await ToolRegistry([act]).open(PROMPT, 0)
        return [await tools.call(WrittenCall(name="act", arguments={}), 0) for _ in range(3)]

    made = asyncio.run(run())
    assert [call.status for call in made[:2]] == [CallStatus.TIMED_OUT] * 2
    assert made[2].result == "Error: RuntimeError: 2 earlier calls of it still hang"
    ended.set()


def test_failures_are_tried_again_with_growing_pauses(monkeypatch: pytest.MonkeyPatch):
    pauses: list[float] = []
    real = asyncio.sleep

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)
        await real(0)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    tries: list[int] = []

    def act() -> str:
        tries.append(1)
        if len(tries) < 4:
            raise ConnectionError("busy")
        return "done"

    made = one_call(acting(act, retries=5, backoff_s=0.25))
    assert (made.status, made.result, made.attempts) == (CallStatus.OK, "done", 4)
    assert pauses == [0.25, 0.5, 1.0]
    spent = one_call(acting(raising(ConnectionError("busy")), retries=2, backoff_s=0.0))
    assert (spent.status, spent.attempts) == (CallStatus.FAILED, 3)


def test_faults_where_that_is_the_policy():
    with pytest.raises(ToolFault, match="act: ValueError: broken"):
        one_call(acting(raising(ValueError("broken"))), on_error="fault")
    with pytest.raises(ToolFault, match="no answer within"):
        one_call(acting(lambda: asyncio.sleep(9), timeout_s=0.01), on_error="fault")
    for act in (raising(ToolError("no")), raising(InvalidArguments("no"))):
        assert one_call(acting(act), on_error="fault").result == "Error: no"
    assert one_call(acting(lambda: "x"), name="y", on_error="fault").status == "unknown tool"


def test_no_more_calls_run_at_once_than_a_tool_allows_over_all_rollouts_and_loops():
    running, most = 0, 0

    async def act() -> str:
        nonlocal running, most
        running += 1
        most = max(most, running)
        for _ in range(5):
            await asyncio.sleep(0)
        running -= 1
        return "ok"

    box = ToolRegistry([acting(act, concurrency=3)])

    async def run() -> list[ToolCall]:
        rollouts = [await box.open(PROMPT, key) for key in range(10)]
        written = WrittenCall(name="act", arguments={})
        return await asyncio.gather(*(r.call(written, 0) for r in rollouts for _ in range(2)))

    for _ in range(2):
        assert {call.status for call in asyncio.run(run())} == {CallStatus.OK}
    assert most == 3


def test_a_cancelled_call_passes_the_cancellation_on_and_stops_the_tool():
    heard: list[str] = []

    async def act() -> str:
        try:
            await asyncio.sleep(1000)
        except asyncio.CancelledError:
            heard.append("stop")
            raise
        return ""

    async def run() -> None:
        tools = await ToolRegistry([acting(act)]).open(PROMPT, 0)
        call = asyncio.create_task(tools.call(WrittenCall(name="act", arguments={}), 0))
        await asyncio.sleep(0.01)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call

    asyncio.run(run())
    assert heard == ["stop"]


def test_malformed_and_refused_calls():
    async def run() -> tuple[ToolCall, ToolCall]:
        tools = await ToolRegistry([acting(lambda: "done")]).open(PROMPT, 0)
        written = WrittenCall(name="act", arguments={})
        return tools.malformed("the JSON\nis broken", 2), tools.refused(written, "too many", 2)

    malformed, refused = asyncio.run(run())
    assert (malformed.status, malformed.name) == (CallStatus.MALFORMED, "")
    assert malformed.result == "Error: the JSON is broken"
    assert (refused.status, refused.arguments) == (CallStatus.REFUSED, {})
    assert refused.result == "Error: too many"
