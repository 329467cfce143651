"""Worlds, tools and parsers of others: what they raise, change and keep for themselves."""

import asyncio
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from luyen.base.errors import UserError
from luyen.base.records import CallStatus, StopReason, make_prompt
from luyen.config.schema.actor_rollout_ref import EnvironmentConfig, MultiTurnConfig
from luyen.rollout.build import EnvSelector, build_tool_environment, envs
from luyen.rollout.conversation_config import ending_s
from luyen.rollout.env.protocol import Observation
from luyen.rollout.multi_turn import Conversations
from luyen.rollout.protocol import Sampling
from luyen.rollout.tools.python_tools import tool, tool_class
from tests.talk import KEEP, TOKENIZER, ScriptedEngine, World, call, draws, play, setting

FAULTS = (
    SystemExit(0),
    KeyboardInterrupt(),
    GeneratorExit(),
    asyncio.CancelledError(),
    type("Odd", (BaseException,), {})("odd"),
)


def says(line: str) -> ScriptedEngine:
    """An engine whose policy says this, and `done` once a tool has answered."""
    return ScriptedEngine(
        lambda text, _: "done<|im_end|>" if "<tool_response>" in text else f"{line}<|im_end|>"
    )


@pytest.mark.parametrize("place", ["making", "open", "act", "score", "close", "parser"])
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: type(fault).__name__)
def test_whatever_a_world_or_a_parser_raises_is_a_fault_of_its_rollout(place, fault):
    async def raises(self, *_):
        raise fault

    def parser(text):
        raise fault

    broken = type("Broken", (World,), {} if place in ("making", "parser") else {place: raises})

    def make(prompt):
        if place == "making" and prompt.extra_info:
            raise fault
        return broken() if prompt.extra_info else World()

    more = {"parser": parser} if place == "parser" else {}
    how = setting(env=make, **more)
    [group] = play(says("x"), how, "q", bad=1)
    assert group.rollouts[0].stop == StopReason.FAULT
    assert type(fault).__name__ in (group.rollouts[0].fault or "")
    if place != "parser":
        [sound] = play(says("x"), how, "q")
        assert sound.rollouts[0].fault is None


def test_a_world_that_cannot_be_made_at_the_start_is_an_error():
    envs.register("test_leaves")(lambda: sys.exit(0))
    worlds = EnvSelector({"mine": EnvironmentConfig(kind="test_leaves")}, default="mine")
    with pytest.raises(UserError, match="making it failed: SystemExit: 0"):
        worlds.tools_of(make_prompt([]))


class Changing(World):
    """Changes what it is given, and later what it gave."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__()
        kwargs.get("settings", {"seen": []})["seen"].append(1)
        self.given: list[Any] = []

    async def open(self, prompt, key):
        prompt.extra_info["tests"][0].append(2)
        prompt.messages[0]["content"] += " changed"
        self.given.append({"role": "user", "content": "Go."})
        return self.given

    async def act(self, messages):
        messages[-1]["content"] = "changed"
        self.given[0]["content"] = "changed"
        said = {"role": "user", "content": "more"}
        self.given.append(said)
        seen = await super().act(messages)
        return seen if seen.is_done else Observation(messages=(said,))

    async def close(self):
        for message in self.given:
            message["content"] = "changed"


def test_a_world_changes_neither_the_row_nor_the_conversation():
    how = setting(env=lambda _: Changing())
    asked = draws(how, "q", tests=[[1]])
    talks = Conversations(how, KEEP)
    sampling = Sampling(max_new_tokens=400, stop_ids=TOKENIZER.stop_ids)
    [group] = talks.begin(says("x"), asked, sampling, seed=0, purpose="rollout", version=0)()
    talks.close()
    assert [m["content"] for m in group.rollouts[0].messages] == ["x", "more", "x"]
    assert asked[0].prompt.extra_info == {"tests": [[1]]}
    assert asked[0].prompt.messages[-1]["content"] == "q"


def test_a_world_does_not_change_its_settings_for_the_next_one():
    envs.register("test_changing")(lambda *, settings: Changing(settings=settings))
    choice = EnvironmentConfig(kind="test_changing", kwargs={"settings": {"seen": []}})
    worlds = EnvSelector({"mine": choice}, default="mine")
    for _ in range(2):
        worlds.make(make_prompt([]))
    assert choice.kwargs == {"settings": {"seen": []}}


@tool(retries=1, backoff_s=0.0)
def spoil(lines: list[str]) -> str:
    """Change the lines, and fail the first time."""
    lines.append("changed")
    if len(lines) == 2 and not spoiled:
        spoiled.append(1)
        raise ConnectionError("try again")
    return str(lines)


spoiled: list[int] = []


@tool_class
class Keeper:
    """Changes the prompt it is created with."""

    def create(self, prompt: Any) -> None:
        prompt.extra_info["tests"][0].append(2)

    def call(self) -> str:
        """Say something."""
        return "kept"


def test_tools_change_neither_their_call_nor_the_row():
    how = setting([spoil, Keeper])
    written = call("spoil", lines=["a"]) + call("keeper")
    asked = draws(how, "q", tests=[[1]])
    [group] = play(says(written), how, "q", tests=[[1]])
    first, second = group.rollouts[0].calls
    assert (first.status, first.attempts) == (CallStatus.OK, 2)
    assert first.result == "['a', 'changed']"
    assert dict(first.arguments) == {"lines": ["a"]}
    assert second.result == "kept"
    assert group.prompt.extra_info == asked[0].prompt.extra_info == {"tests": [[1]]}


SLOW = """
import threading
class Slow:
    gate = threading.Event()
    def reset(self, **row):
        return None
    def wait(self) -> str:
        \"\"\"Wait.\"\"\"
        self.gate.wait(20)
        return "late"
"""


def test_methods_of_worlds_have_the_time_of_the_run(tmp_path: Path):
    file = tmp_path / "slow.py"
    file.write_text(SLOW)
    multi_turn = MultiTurnConfig(enable=True, tool_timeout_s=0.1)
    box = build_tool_environment(multi_turn).tools
    how = setting(env=lambda _: envs.get("class")(path=str(file), name="Slow"), box=box)
    start = time.monotonic()
    [group] = play(says(call("wait")), how, "q")
    assert time.monotonic() - start < 15
    [made] = group.rollouts[0].calls
    assert (made.status, made.error) == (CallStatus.TIMED_OUT, "no answer within 0.1 s")


def test_scores_and_releases_have_as_long_again_as_the_conversation():
    assert [ending_s(s) for s in (0.5, 29.0, 31.0, None)] == [0.5, 29.0, 30.0, 30.0]

    class Slow(World):
        async def score(self):
            await asyncio.sleep(60)

        async def close(self):
            await asyncio.sleep(60)

    start = time.monotonic()
    [group] = play(says("x"), setting(env=lambda _: Slow(), budget_s=0.3), "q")
    assert "Slow.score took more than 0.3 s" in (group.rollouts[0].fault or "")
    assert time.monotonic() - start < 10


gate = threading.Event()


@tool(timeout_s=0.05)
async def stuck() -> str:
    """Wait on a thread of the loop."""
    await asyncio.to_thread(gate.wait, 60)
    return "late"


def test_a_tool_that_hangs_in_a_thread_of_the_loop_does_not_hold_up_closing():
    how = setting([stuck])
    talks = Conversations(how, KEEP)
    sampling = Sampling(max_new_tokens=400, stop_ids=TOKENIZER.stop_ids)
    begun = talks.begin(
        says(call("stuck")), draws(how, "q"), sampling, seed=0, purpose="rollout", version=0
    )
    [group] = begun()
    assert group.rollouts[0].calls[0].status == CallStatus.TIMED_OUT
    start = time.monotonic()
    talks.close()
    assert time.monotonic() - start < 20
    gate.set()
