"""A coroutine that will not end costs its own score and a bounded time, under `naive`."""

import time
from pathlib import Path
from typing import Any

import pytest

from luyen.base import boundary
from luyen.base.errors import UserError
from tests.unit.rewards.builders import config, own, prompt, scores

HEAD = """
import asyncio
async def deaf():
    while True:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            pass
async def compute_score(data_source, solution_str, ground_truth, extra_info):
"""


KEPT: list[list[Any]] = []
"""Tasks of all tests: when one is collected, asyncio says that it was pending."""


@pytest.fixture(autouse=True)
def nothing_abandoned(monkeypatch: pytest.MonkeyPatch) -> None:
    KEPT.append([])
    monkeypatch.setattr(boundary, "_abandoned", KEPT[-1])
    monkeypatch.setattr(boundary, "_GRACE_S", 0.1)


def found(folder: Path, body: str, *texts: str, timeout_s: float = 0.2) -> list[Any]:
    block = own(folder / "mine.py", HEAD + body)
    settings = config(custom_reward_function=block, timeout_s=timeout_s)
    return scores(settings, prompt("4", "mine"), *texts)


def test_a_coroutine_that_swallows_its_cancellation_is_a_fault(tmp_path: Path):
    start = time.monotonic()
    body = "    return 1.0 if solution_str == '4' else await deaf()\n"
    first, second, third = found(tmp_path, body, "4", "hang", "4")
    assert (first.value, second.value, third.value) == (1.0, None, 1.0)
    assert second.error == "no score within 0.2 s (reward.timeout_s)"
    assert time.monotonic() - start < 5
    assert boundary.abandoned_count() == 1


def test_tasks_that_a_coroutine_leaves_behind_are_not_waited_for(tmp_path: Path):
    start = time.monotonic()
    body = "    asyncio.ensure_future(deaf())\n    await asyncio.sleep(0)\n    return 1.0\n"
    assert [score.value for score in found(tmp_path, body, "4", "5")] == [1.0, 1.0]
    assert time.monotonic() - start < 5
    assert boundary.abandoned_count() == 2


def test_too_many_of_them_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("luyen.rewards.calls.MOST_ABANDONED", 2)
    body = "    return await deaf()\n"
    found(tmp_path, body, "4", "4")
    with pytest.raises(UserError, match="2 coroutines of the reward went on") as caught:
        found(tmp_path, body, "4")
    assert "prime" in str(caught.value.fix)


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ("    raise SystemExit(0)\n", "SystemExit: 0"),
        ("    raise asyncio.CancelledError\n", "CancelledError"),
        ("    asyncio.current_task().cancel()\n    await asyncio.sleep(9)\n", "cancelled itself"),
        ("    raise KeyboardInterrupt\n", "KeyboardInterrupt"),
    ],
)
def test_what_a_coroutine_raises_is_its_own_fault(tmp_path: Path, body: str, error: str):
    [score] = found(tmp_path, body, "4")
    assert error in (score.error or "")


LEAVE = "    asyncio.get_running_loop().{way}()\n    await asyncio.sleep(0.01)\n    return 1.0\n"


def test_a_stopped_event_loop_ends_the_run_with_the_cause(tmp_path: Path):
    with pytest.raises(UserError, match="stopped the event loop"):
        found(tmp_path, LEAVE.format(way="stop"), "4")


def test_a_running_event_loop_cannot_be_closed(tmp_path: Path):
    [score] = found(tmp_path, LEAVE.format(way="close"), "4")
    assert "RuntimeError: Cannot close a running event loop" in (score.error or "")
