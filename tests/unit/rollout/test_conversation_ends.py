"""However a conversation ends: nothing of it goes on, nothing is held, all of it is on record."""

import asyncio
import signal
import threading
import time

import pytest

from luyen.base.errors import UserError
from luyen.base.records import CallStatus, StopReason
from luyen.rollout.conversation_state import TurnLimits
from luyen.rollout.multi_turn import Conversations, FaultPolicy, faulty_rollouts
from luyen.rollout.protocol import Sampling
from luyen.rollout.tools.protocol import ToolReply
from luyen.rollout.tools.python_tools import tool, tool_class
from luyen.rollout.tools.registry import ToolRegistry
from luyen.train.interrupt import Interruption
from luyen.train.metrics import turn_metrics
from tests.talk import KEEP, TOKENIZER, ScriptedEngine, World, call, converse, draws, play, setting
from tests.unit.train.conversations import talk

SAMPLING = Sampling(max_new_tokens=400, stop_ids=TOKENIZER.stop_ids)
ADDRESS = {"seed": 0, "purpose": "rollout", "version": 0}


def says(line: str):
    """An engine whose policy says this, and `done` once a tool has answered."""
    return ScriptedEngine(
        lambda text, _: "done<|im_end|>" if "<tool_response>" in text else f"{line}<|im_end|>"
    )


def watched(log: list[str], *, takes_s: float):
    """A tool that writes down when it works and when it is let go."""

    @tool_class(name="slow")
    class Slow:
        async def call(self, a: int) -> str:
            """Take some time."""
            log.append("begins")
            await asyncio.sleep(takes_s)
            log.append("ends")
            return str(a)

        async def release(self) -> None:
            log.append("released")

    return Slow


@tool
async def boom(a: int) -> str:
    """Break."""
    raise RuntimeError("broken")


def test_a_world_that_cancels_itself_breaks_only_its_own_conversation():
    class Cancelled(World):
        async def act(self, messages):
            raise asyncio.CancelledError

    def make(prompt):
        return Cancelled() if prompt.messages[0]["content"] == "bad" else World()

    bad, good = play(says("x"), setting(env=make), "bad", "good")
    assert "CancelledError" in bad.rollouts[0].fault
    assert good.rollouts[0].stop == StopReason.ENVIRONMENT_DONE


def test_calls_beside_a_broken_one_end_before_their_tools_are_released():
    log: list[str] = []
    box = ToolRegistry([boom, watched(log, takes_s=0.05)], on_error="fault")
    [group] = play(says(call("slow", a=1) + call("boom", a=1)), setting(box=box), "q")
    [rollout] = group.rollouts
    assert rollout.stop == StopReason.FAULT
    assert log == ["begins", "ends", "released"]
    assert [c.status for c in rollout.calls] == [CallStatus.OK, CallStatus.FAILED]


def test_what_was_done_before_the_time_was_up_is_on_record():
    @tool
    async def fast(a: int) -> ToolReply:
        """Answer at once."""
        return ToolReply(text=str(a), reward=0.5, metrics={"hits": 3})

    line = call("fast", a=1) + call("slow", a=1) + "<tool_call>{"
    tools = [fast, watched([], takes_s=60)]
    [group] = play(says(line), setting(tools, budget_s=0.1), "q")
    [rollout] = group.rollouts
    assert rollout.stop == StopReason.TIME_BUDGET
    statuses = [c.status for c in rollout.calls]
    assert statuses == [CallStatus.OK, CallStatus.TIMED_OUT, CallStatus.MALFORMED]
    assert rollout.given == ((0, 0.5),)
    assert turn_metrics([rollout], is_multi_turn=True)["tools/fast/hits"] == 3.0


def test_calls_that_are_refused_are_valid_only_if_they_could_have_been_made():
    lines = [call("slow", a=1), call("slow", a=2), call("slwo", a=3), call("slow", b=4)]
    how = setting([watched([], takes_s=0)], limits=TurnLimits(max_parallel_calls=1))
    [group] = play(says("".join(lines)), how, "q")
    [rollout] = group.rollouts
    assert [c.status for c in rollout.calls] == [
        CallStatus.OK,
        CallStatus.REFUSED,
        CallStatus.UNKNOWN_TOOL,
        CallStatus.INVALID_ARGUMENTS,
    ]
    assert turn_metrics([rollout], is_multi_turn=True)["tools/valid_fraction"] == 0.5


def test_tools_that_were_opened_are_released_when_another_does_not_open_in_time():
    log: list[str] = []

    @tool_class
    class Never:
        async def create(self) -> None:
            await asyncio.sleep(60)

        async def call(self, a: int) -> str:
            """Nothing."""
            return str(a)

        async def release(self) -> None:
            log.append("never opened")

    tools = [watched(log, takes_s=0), Never]
    [group] = play(says("x"), setting(tools, budget_s=0.1), "q")
    assert group.rollouts[0].stop == StopReason.FAULT
    assert sorted(log) == ["never opened", "released"]


def test_an_object_that_cannot_be_created_is_released():
    log: list[str] = []

    @tool_class
    class Half:
        def create(self) -> None:
            raise OSError("no server")

        def call(self, a: int) -> str:
            """Nothing."""
            return str(a)

        def release(self) -> None:
            log.append("released")

    [group] = play(says(call("half", a=1)), setting([Half]), "q")
    assert "no server" in group.rollouts[0].calls[0].error
    assert log == ["released"]


def test_a_call_that_hangs_takes_no_score_and_no_release_from_others():
    let_go: list[int] = []
    wake = threading.Event()

    @tool_class(concurrency=1, timeout_s=0.05)
    class Deaf:
        def call(self, a: int) -> str:
            """Wait for nobody."""
            wake.wait(30)
            return str(a)

        def score(self) -> float:
            return 0.5

        def release(self) -> None:
            let_go.append(1)

    engine = ScriptedEngine(
        lambda text, _: (
            call("deaf", a=1) + "<|im_end|>"
            if "bad" in text and "<tool_response>" not in text
            else "x<|im_end|>"
        )
    )
    try:
        bad, good = play(engine, setting([Deaf]), "bad", "1" * 150)
    finally:
        wake.set()
    assert bad.rollouts[0].calls[0].status == CallStatus.TIMED_OUT
    assert [r.given for r in (*bad.rollouts, *good.rollouts)] == [((1, 0.5),), ((0, 0.5),)]
    assert len(let_go) == 2


def test_tools_that_do_not_let_go_are_counted():
    @tool_class
    class Sticky:
        def call(self, a: int) -> str:
            """Nothing."""
            return str(a)

        def release(self) -> None:
            raise OSError("still there")

    [group] = play(says("x"), setting([Sticky]), "q", samples=2)
    assert all(rollout.fault is None for rollout in group.rollouts)
    assert turn_metrics(group.rollouts, is_multi_turn=True)["turns/unreleased"] == 2.0


def test_an_engine_that_breaks_stops_the_run_though_some_have_ended():
    class Breaks(ScriptedEngine):
        def advance(self):
            if self.passes > 6:
                raise RuntimeError("illegal memory access")
            return super().advance()

    engine = Breaks(lambda text, _: "x<|im_end|>" if "short" in text else "1" * 40)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        play(engine, setting(), "short", "long", policy=FaultPolicy(on_fault="retry"))


def test_the_time_budget_holds_for_all_attempts_together():
    opened: list[float] = []

    class Shut(World):
        async def open(self, prompt, key):
            opened.append(time.perf_counter())
            await asyncio.sleep(60)

    policy = FaultPolicy(on_fault="retry", retries=5)
    how = setting(env=lambda _: Shut(), budget_s=0.1)
    [group] = play(says("x"), how, "q", policy=policy)
    assert group.rollouts[0].fault is not None
    assert len(opened) == 1


@tool(timeout_s=0.05)
async def stubborn(a: int) -> str:
    """Never end."""
    while True:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            continue


def test_closing_does_not_wait_for_code_that_will_not_end(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("luyen.rollout.multi_turn._LAST_S", 0.05)
    monkeypatch.setattr("luyen.rollout.tools.user_code._GRACE_S", 0.05)
    how = setting([stubborn])
    talks = Conversations(how, KEEP)
    [group] = talks.begin(says(call("stubborn", a=1)), draws(how, "q"), SAMPLING, **ADDRESS)()
    assert group.rollouts[0].calls[0].status == CallStatus.TIMED_OUT
    talks.close()
    talks.close()


def test_closing_ends_what_an_interrupt_left_behind():
    log: list[str] = []
    how = setting([watched(log, takes_s=60)])
    talks = Conversations(how, KEEP)

    class Interrupted(ScriptedEngine):
        def advance(self):
            if self.passes > 80:
                signal.raise_signal(signal.SIGINT)
                signal.raise_signal(signal.SIGINT)
            return super().advance()

    def script(text: str, _: int) -> str:
        return call("slow", a=1) + "<|im_end|>" if "calls" in text else "1" * 300

    with pytest.raises(KeyboardInterrupt), Interruption():
        talks.begin(Interrupted(script), draws(how, "calls", "talks"), SAMPLING, **ADDRESS)()
    talks.close()
    assert log == ["begins", "released", "released"]


def test_nothing_runs_on_after_a_step():
    async def left() -> int:
        how = setting([boom, watched([], takes_s=60)], budget_s=0.1)
        engine = says(call("slow", a=1) + call("boom", a=1))
        await converse(engine, how, draws(how, "q"), SAMPLING, policy=KEEP, **ADDRESS)
        return len(asyncio.all_tasks()) - 1

    assert asyncio.run(left()) == 0


def test_a_part_of_a_measurement_may_break_whole():
    class Breaks(World):
        async def act(self, messages):
            raise ConnectionError("no line")

    groups = play(says("x"), setting(env=lambda _: Breaks()), "q")
    assert faulty_rollouts(groups, KEEP, may_be_all=True) == list(groups[0].rollouts)
    with pytest.raises(UserError, match="1 of 1"):
        faulty_rollouts(groups, FaultPolicy(on_fault="fail"), may_be_all=True)


def test_lengths_count_every_branch_of_a_split_rollout():
    rollout = talk("pp00", "ppp11t11", "pppp2")
    assert (rollout.prompt_length, rollout.response_length) == (2, 2 + 5 + 1)
