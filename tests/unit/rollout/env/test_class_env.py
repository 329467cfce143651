"""Worlds from classes: what is a tool, what the row gives, and what goes wrong."""

import asyncio
from pathlib import Path

import pytest

from luyen.base.errors import UserError
from luyen.base.records import StopReason, make_prompt
from luyen.config.schema.actor_rollout_ref import EnvironmentConfig
from luyen.rollout.build import EnvSelector, envs
from luyen.rollout.env.class_env import blueprint_of
from tests.talk import ScriptedEngine, call, play, setting

FILE = str(Path(__file__).with_name("worlds_of_classes.py"))
ASKED = make_prompt(
    [{"role": "user", "content": "Go."}],
    data_source="counting",
    ground_truth="3",
    extra_info={"target": 2},
)


def world(name: str, **kwargs):
    return envs.get("class")(path=FILE, name=name, kwargs=kwargs)


def test_every_public_method_is_a_tool_and_the_others_are_not():
    made = world("Counter")
    assert {tool.name for tool in made.tools} == {"add", "look"}
    add = next(tool for tool in made.tools if tool.name == "add")
    assert add.schema["function"]["description"] == "Count up."
    assert add.schema["function"]["parameters"]["properties"]["by"]["type"] == "integer"


def test_the_row_reaches_reset_and_what_it_says_joins_the_question():
    made = world("Counter", start=1)
    [message] = asyncio.run(made.open(ASKED, key=5))
    assert message == {"role": "user", "content": "Go.\n\nCount to 2."}
    assert made._made.row == {"target": 2, "ground_truth": "3", "data_source": "counting"}
    assert made._made.start == 1
    assert ASKED.messages[0]["content"] == "Go.", "the row itself stays as it is"


def test_what_reset_says_is_a_message_of_its_own_behind_another_role():
    prompt = make_prompt([{"role": "system", "content": "Be brief."}])
    said = asyncio.run(world("Counter").open(prompt, key=5))
    assert [m["role"] for m in said] == ["system", "user"]


def test_reset_is_given_only_what_it_names_and_the_key_if_it_asks():
    prompt = make_prompt(ASKED.messages, extra_info={"lines": ["a"], "more": 1})
    made = world("Talker")
    assert tuple(asyncio.run(made.open(prompt, key=5))) == prompt.messages
    assert (made._made.key, made._made.lines) == (5, ["a"])


def test_calls_of_one_turn_take_turns_and_worlds_share_nothing():
    """Two calls in one turn, four conversations: every count is right."""
    line = call("add", by=1) + call("add", by=1) + "<|im_end|>"

    def script(text: str, _: int) -> str:
        return "done<|im_end|>" if "<tool_response>" in text else line

    how = setting(env=lambda _: world("Counter"))
    [group] = play(ScriptedEngine(script), how, "Go.", samples=4, target=2)
    assert [[c.result for c in r.calls] for r in group.rollouts] == [["1", "2"]] * 4
    assert [r.given for r in group.rollouts] == [((1, 1.0),)] * 4
    assert {r.stop for r in group.rollouts} == {StopReason.ENVIRONMENT_DONE}


def test_respond_is_the_user_and_none_ends_it():
    how = setting(env=lambda _: world("Talker"))
    [group] = play(ScriptedEngine(lambda *_: "3<|im_end|>"), how, "Go.", lines=["And now?"])
    [rollout] = group.rollouts
    assert [m["role"] for m in rollout.messages] == ["assistant", "user", "assistant"]
    assert rollout.messages[1]["content"] == "And now?"
    assert (rollout.stop, rollout.given) == (StopReason.ENVIRONMENT_DONE, ())


@pytest.mark.parametrize("place", ["reset", "respond", "get_reward"])
@pytest.mark.parametrize("way", ["raises", "gives a list"])
def test_a_world_that_breaks_is_a_fault_with_a_clear_line_and_is_closed(place: str, way: str):
    closed = blueprint_of(FILE, "Broken").cls.closed
    closed.clear()
    how = setting(env=lambda _: world("Broken"))
    engine = ScriptedEngine(lambda *_: "3<|im_end|>")
    [group] = play(engine, how, "Go.", place=place, way=way)
    [rollout] = group.rollouts
    assert rollout.stop == StopReason.FAULT
    said = f"no {place} today" if way == "raises" else f"Broken.{place} gave"
    assert said in rollout.fault
    assert closed == [1]


def test_a_world_that_hangs_ends_with_the_time_of_its_conversation():
    broken = blueprint_of(FILE, "Broken").cls
    broken.closed.clear()
    how = setting(env=lambda _: world("Broken"), budget_s=0.2)
    row = {"place": "respond", "way": "hangs"}
    [group] = play(ScriptedEngine(lambda *_: "3<|im_end|>"), how, "Go.", **row)
    broken.gate.set()
    assert [r.stop for r in group.rollouts] == [StopReason.TIME_BUDGET]
    assert broken.closed == [1]


@pytest.mark.parametrize(
    ("path", "name", "said"),
    [
        (FILE, "Countr", "has no such class"),
        (FILE, "NUMBER", "has no such class"),
        (FILE, "NoReset", "no method `reset`"),
        (FILE, "Untyped", "has no type"),
        ("no_such_file.py", "Counter", "importing it failed"),
    ],
)
def test_what_is_wrong_with_the_class_is_said(path: str, name: str, said: str):
    with pytest.raises(UserError, match=said):
        blueprint_of(path, name)


def test_arguments_that_the_class_does_not_take_are_said():
    choice = EnvironmentConfig(
        kind="class", kwargs={"path": FILE, "name": "Counter", "kwargs": {"begin": 1}}
    )
    with pytest.raises(UserError, match="begin"):
        EnvSelector({"count": choice}, default="count").tools_of(ASKED)
