"""Environments of the verifiers package: the real one where it is installed, else a stand-in."""

import asyncio
import importlib.util
import sys
from pathlib import Path

import pytest

from luyen.base.errors import UserError
from luyen.base.records import StopReason
from luyen.rollout.build import envs
from luyen.rollout.conversation_state import TurnLimits
from luyen.rollout.env import verifiers_env
from tests.talk import ScriptedEngine, call, play, setting

HERE = Path(__file__).parent
TASKS = HERE / "tasks_of_verifiers.py"


@pytest.fixture(autouse=True, scope="module")
def package():
    """The stand-in takes the place of the package where that is not installed."""
    is_real = importlib.util.find_spec("verifiers") is not None
    folders = [str(HERE / "installed"), *([] if is_real else [str(HERE / "stand_in")])]
    sys.path[:0] = folders
    yield
    for folder in folders:
        sys.path.remove(folder)
    for name in list(sys.modules):
        if name == "small_sums" or (not is_real and name.partition(".")[0] == "verifiers"):
            del sys.modules[name]


def world(loader: str, **args):
    return envs.get("verifiers")(id=f"{TASKS}:{loader}", args=args)


def rollout(loader: str, line, *, limits=None, budget_s=None, args=None, **row):
    def script(text: str, _: int) -> str:
        return f"{line(text) if callable(line) else line}<|im_end|>"

    how = setting(
        env=lambda _: world(loader, **(args or {})),
        budget_s=budget_s,
        limits=limits or TurnLimits(max_parallel_calls=4),
    )
    [group] = play(ScriptedEngine(script), how, "unused", **{"task": 1, **row})
    return group.rollouts[0]


def test_the_task_asks_the_policy_answers_and_the_rewards_are_weighted():
    right, wrong = rollout("sums", "2"), rollout("sums", "5")
    assert (right.stop, right.given) == (StopReason.ENVIRONMENT_DONE, ((0, 2.0),))
    assert wrong.given == ((0, 0.0),)
    opened = asyncio.run(begun("sums", 2))
    assert opened == [
        {"role": "system", "content": "Add."},
        {"role": "user", "content": "2+1="},
    ]


async def begun(loader: str, number: int):
    from luyen.base.records import make_prompt

    made = world(loader)
    try:
        return list(await made.open(make_prompt([], extra_info={"task": number}), key=0))
    finally:
        await made.close()


def test_tools_of_a_toolset_become_ours_and_share_the_state_of_the_conversation():
    def line(text: str) -> str:
        if "<tool_response>" not in text:
            return call("lookup_fetch", place="here") + call("lookup_fetch", place="there")
        return "72"

    [tool] = world("secrets").tools
    assert tool.name == "lookup_fetch"
    assert tool.schema["function"]["parameters"]["required"] == ["place"]
    played = rollout("secrets", line, task=0)
    assert [c.result for c in played.calls] == ["71", "72"]
    assert played.given == ((1, 1.0),)


def test_a_program_that_drives_its_agent_is_the_user():
    played = rollout("played", "2", args={"kind": "Game", "rounds": 3})
    assert [m["content"] for m in played.messages] == ["2", "again", "2", "again", "2"]
    assert played.stop == StopReason.ENVIRONMENT_DONE
    assert played.given == ((2, 2.0 + 1.5 + 10.0),), "the task, the program, and its last word"


def test_a_conversation_cut_short_ends_the_program_and_is_judged():
    limits = TurnLimits(max_assistant_turns=2)
    played = rollout("played", "5", limits=limits, args={"kind": "Game", "rounds": 9})
    assert played.stop == StopReason.MAX_ASSISTANT_TURNS
    assert played.given == ((1, 0.0 + 1.0 + 10.0),)


@pytest.mark.parametrize(
    ("loader", "args", "said"),
    [
        ("broken", {}, "no verdict"),
        ("box", {}, "wants a runtime (`read`)"),
        ("played", {"kind": "Silent"}, "ran no agent"),
        ("played", {"kind": "Twice"}, "plays its agent twice"),
    ],
)
def test_a_world_that_breaks_is_a_fault_with_a_clear_line(loader: str, args, said: str):
    played = rollout(loader, "2", task=0, args=args)
    assert (played.stop, played.given) == (StopReason.FAULT, ())
    assert said in played.fault


def test_a_program_that_hangs_ends_with_the_time_of_its_conversation(monkeypatch):
    monkeypatch.setattr("luyen.rollout.env.verifiers_env._END_S", 0.1)
    played = rollout("played", "2", budget_s=0.3, args={"kind": "Hanging"})
    assert "did not end within" in played.fault, "no reward is known, so it is a fault"


@pytest.mark.parametrize(
    ("loader", "args", "number", "said"),
    [
        ("nothing", {}, 0, "not int"),
        ("sums", {"more": 1}, 0, "cannot be loaded"),
        ("nobody", {}, 0, "has no `nobody`"),
        ("sums", {}, 7, "has 3 tasks"),
        ("sums", {}, None, "names its task"),
        ("stopping", {}, 0, "hooks into model calls"),
        ("played", {"kind": "Duet"}, 0, "plays 2 agents"),
    ],
)
def test_what_is_wrong_with_the_environment_or_the_row_is_said(loader, args, number, said):
    with pytest.raises(UserError, match=said):
        rollout(loader, "2", args=args, task=number)


def test_an_installed_environment_is_found_by_its_id():
    made = envs.get("verifiers")(id="small-sums", args={"most": 1})
    assert isinstance(made, verifiers_env.VerifiersEnv)
    assert made._environment.task(0).data.prompt == "0+1="


def test_without_the_package_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "verifiers.v1", None)
    with pytest.raises(UserError, match="pip install"):
        envs.get("verifiers")(id="some-environment")
