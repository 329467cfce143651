"""The boundary to code of others: what is its fault, what comes from outside, and copies."""

import asyncio
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

from luyen.base.boundary import ForeignExit, boundary, last_line, own_copy, run_with_daemon_threads
from luyen.base.records import GroupId, Rollout, Source, StopReason, make_prompt


class Odd(BaseException):
    """No Exception, and none of Python's own."""


class Unprintable(BaseException):
    def __str__(self) -> str:
        raise SystemExit(0)


def raising(fault: BaseException) -> Callable[[], None]:
    def call() -> None:
        raise fault

    return call


def leave_in_a_library() -> None:
    os.fspath(type("Path", (), {"__fspath__": lambda self: sys.exit(0)})())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("call", "line"),
    [
        (raising(SystemExit(0)), "SystemExit: 0 (test_foreign.py:"),
        (raising(SystemExit()), "SystemExit (test_foreign.py:"),
        (raising(KeyboardInterrupt()), "KeyboardInterrupt (test_foreign.py:"),
        (raising(GeneratorExit()), "GeneratorExit (test_foreign.py:"),
        (raising(asyncio.CancelledError()), "CancelledError (test_foreign.py:"),
        (raising(StopIteration(1)), "StopIteration: 1 (test_foreign.py:"),
        (raising(Odd("odd")), "Odd: odd (test_foreign.py:"),
        (raising(Unprintable()), "Unprintable: it cannot be printed (test_foreign.py:"),
        (raising(BaseExceptionGroup("two", [SystemExit(1), Odd()])), "BaseExceptionGroup: two"),
        (raising(MemoryError()), "MemoryError (test_foreign.py:"),
        (leave_in_a_library, "SystemExit: 0 (test_foreign.py:"),
    ],
)
def test_whatever_is_raised_is_a_fault_that_can_be_raised_again(call, line):
    faults: list[BaseException] = []
    with boundary(faults):
        call()
    assert last_line(faults[0]).startswith(line)
    assert isinstance(faults[0], Exception)


def interrupted() -> None:
    signal.raise_signal(signal.SIGINT)


def interrupted_while_it_computes() -> None:
    timer = threading.Timer(0.05, lambda: os.kill(os.getpid(), signal.SIGINT))
    timer.start()
    while True:
        time.sleep(0.001)


def leaves_when_interrupted() -> None:
    try:
        interrupted()
    except KeyboardInterrupt:
        sys.exit(0)


def says_it_anew() -> None:
    try:
        interrupted()
    except KeyboardInterrupt:
        raise KeyboardInterrupt("by me") from None


@pytest.mark.parametrize(
    "call", [interrupted, interrupted_while_it_computes, leaves_when_interrupted, says_it_anew]
)
def test_an_interrupt_of_the_user_passes_whatever_foreign_code_makes_of_it(call):
    faults: list[BaseException] = []
    with pytest.raises(KeyboardInterrupt), boundary(faults):
        call()
    assert faults == []


async def guarded(faults: list[BaseException], work: Callable[[], Any]) -> None:
    with boundary(faults):
        await work()


def test_a_cancellation_from_outside_passes_and_one_of_its_own_is_a_fault():
    async def play() -> list[BaseException]:
        outside: list[BaseException] = []
        waiting = asyncio.create_task(guarded(outside, lambda: asyncio.sleep(60)))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(guarded(outside, lambda: asyncio.sleep(60)), 0.01)
        assert outside == []
        own: list[BaseException] = []

        async def cancels_itself() -> None:
            raise asyncio.CancelledError

        await guarded(own, cancels_itself)
        return own

    [fault] = asyncio.run(play())
    assert isinstance(fault, ForeignExit)


def test_a_coroutine_that_is_closed_does_not_go_on():
    faults: list[BaseException] = []
    coroutine = guarded(faults, lambda: asyncio.sleep(0))
    coroutine.send(None)
    coroutine.close()
    assert faults == []


def test_a_thread_that_hangs_keeps_no_loop_from_closing():
    gate = threading.Event()

    async def play() -> str:
        try:
            async with asyncio.timeout(0.05):
                await asyncio.to_thread(gate.wait)
        except TimeoutError:
            return "late"
        return "in time"

    start = time.monotonic()
    assert run_with_daemon_threads(play()) == "late"
    assert time.monotonic() - start < 5
    gate.set()


def rollout(notes: dict[str, float]) -> Rollout:
    return Rollout(
        group=GroupId(step=0, draw=0, uid="a"),
        sample=0,
        tokens=(1, 2),
        sources=(Source.PROMPT, Source.SAMPLED),
        turns=(0, 0),
        logps=(None, -0.5),
        versions=(None, 0),
        stop=StopReason.ANSWERED,
        text="ok",
        messages=({"role": "assistant", "content": [{"text": "ok"}]},),
        notes=notes,
    )


def test_changing_a_copy_changes_nothing_of_ours():
    ours = {
        "row": {"tests": [{"in": [1]}], "set": {1}, "pair": ([1],)},
        "array": np.zeros(2),
        "view": MappingProxyType({"deep": [1]}),
        "prompt": make_prompt([{"role": "user", "content": ["?"]}], extra_info={"n": [1]}),
        "rollout": rollout({"seconds": 1.0}),
    }
    before = repr(ours)
    given: Any = own_copy(ours)
    assert given["rollout"] == ours["rollout"]
    given["row"]["tests"][0]["in"].append(2)
    given["row"]["set"].add(2)
    given["row"]["pair"][0].append(2)
    given["array"][0] = 9
    given["view"]["deep"].append(2)
    given["prompt"].messages[0]["content"].append("!")
    given["prompt"].extra_info["n"].append(2)
    given["rollout"].messages[0]["content"][0]["text"] = "no"
    given["rollout"].notes["seconds"] = 2.0
    assert repr(ours) == before


def test_a_copy_shares_what_nobody_can_change_and_keeps_what_was_one():
    shared = [1]
    ours = {"tokens": tuple(range(1000)), "a": shared, "b": shared, "lock": threading.Lock()}
    given = own_copy(ours)
    assert given["tokens"] is ours["tokens"]
    assert given["lock"] is ours["lock"]
    assert given["a"] is given["b"] is not shared
