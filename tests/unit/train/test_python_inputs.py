"""Files that stand for Python objects: in another process they mean what they mean in this one."""

import asyncio
import linecache
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

from luyen.base.errors import UserError
from luyen.base.records import Score
from luyen.rewards.calls import InlineExecutor, function_of
from luyen.rewards.custom import BatchReward, CustomReward
from luyen.rollout.tools.tool_file import file_tools
from luyen.train.builders.python_inputs import PythonObjects
from tests.unit.rewards.builders import group, prompt

SCRIPT = """
import luyen

def score(data_source, solution_str, ground_truth, extra_info):
    return float(solution_str == ground_truth)

def weighted_sum(completions, **columns):
    return [float(len(text)) for text in completions]

def from_row(data_source, solution_str, ground_truth, extra_info):
    return extra_info["answer"] + float("given" in extra_info)

def _found(text: str) -> str:
    return text

def second(text: str) -> str:
    '''Find a text.

    Args:
        text: What to find.
    '''
    return _found(text)

def first(text: str) -> str:
    '''Find it twice.

    Args:
        text: What to find.
    '''
    return second(second(text))

@luyen.tool(timeout_s=7.0)
def third(text: str) -> str:
    '''Find it otherwise.

    Args:
        text: What to find.
    '''
    return text

class Counter:
    def call(self, by: int = 1) -> int:
        '''Count up.'''
        return by

find = luyen.tool(name="find", timeout_s=2.0)(second)
count = luyen.tool_class(name="count")(Counter)
"""


@pytest.fixture
def script(tmp_path: Path) -> dict[str, Any]:
    """The names of a script that was run as the main program."""
    (tmp_path / "script.py").write_text(SCRIPT)
    linecache.checkcache()
    return runpy.run_path(str(tmp_path / "script.py"), run_name="__main__")


def forget_objects() -> None:
    """Let this process be another one, which never had the objects."""
    for name in [n for n in sys.modules if n.startswith("luyen_file_")]:
        del sys.modules[name]
    function_of.cache_clear()


def scores(keys: dict[str, Any], *, whole: bool) -> list[Score]:
    path, name = (keys[f"reward.custom_reward_function.{n}"] for n in ("path", "name"))
    if whole:
        reward: Any = BatchReward(path, name, {}, timeout_s=5.0)
    else:
        reward = CustomReward(path, name, {}, executor=InlineExecutor(timeout_s=5.0))
    asked, rollouts = group(prompt(truth="42", answer=3.0), "42", "abc")
    return asyncio.run(reward(asked, rollouts))


@pytest.mark.parametrize("whole", [False, True])
def test_names_of_the_sum_are_no_names_of_its_parts(
    script: dict[str, Any], tmp_path: Path, whole: bool
):
    rewards = [(script["score"], 0.25), (script["weighted_sum"], 10.0)]
    keys = PythonObjects(reward=rewards).write(tmp_path / "inputs")
    here = scores(keys, whole=whole)
    assert [one.value for one in here] == [20.25, 30.0]
    assert {part.name for part in here[0].parts} == {"score", "score_2", "weighted_sum_2"}
    forget_objects()
    assert [one.value for one in scores(keys, whole=whole)] == [20.25, 30.0]


@pytest.mark.parametrize("whole", [False, True])
def test_a_function_in_a_sum_gets_the_info_of_the_row(
    script: dict[str, Any], tmp_path: Path, whole: bool
):
    alone = PythonObjects(reward=script["from_row"]).write(tmp_path / "alone")
    in_sum = PythonObjects(reward=[(script["from_row"], 0.5)]).write(tmp_path / "sum")
    assert [one.value for one in scores(alone, whole=False)] == [3.0, 3.0]
    assert [one.value for one in scores(in_sum, whole=whole)] == [1.5, 1.5]


def test_tools_are_the_same_in_another_process(script: dict[str, Any], tmp_path: Path):
    tools = [script["first"], script["count"], script["find"], script["third"]]
    keys = PythonObjects(tools=tools).write(tmp_path / "inputs")
    path = keys["actor_rollout_ref.rollout.multi_turn.function_tool_path"]

    def found() -> list[Any]:
        return [(one.name, one.schema, one.limits) for one in file_tools(path)]

    here = found()
    assert [name for name, _, _ in here] == ["first", "count", "find", "third"]
    forget_objects()
    assert found() == here


def test_two_tools_of_one_function_are_refused(script: dict[str, Any], tmp_path: Path):
    with pytest.raises(UserError, match="two tools are functions or classes of this name"):
        PythonObjects(tools=[script["find"], script["second"]]).write(tmp_path / "inputs")
