"""Reward managers: the built-in ones, and one from a plugin file."""

import os
from pathlib import Path

import pytest

from luyen.base.errors import UserError
from luyen.config.plugins import REWARD_MANAGERS
from luyen.rewards.build import build_reward
from luyen.rewards.reward_managers import reward_managers
from luyen.rewards.user_functions import load_module
from tests.unit.rewards.builders import config, group, own, prompt, scored, scores

BUFFER = {"enable": True, "len": 4, "penalty_factor": 2.0}


def test_check_knows_the_managers_that_are_registered():
    own_names = [
        n for n in reward_managers if reward_managers.get(n).__module__.startswith("luyen.")
    ]
    assert sorted(REWARD_MANAGERS) == own_names


def test_dapo_adds_the_overlong_penalty():
    settings = config(reward_manager={"name": "dapo"}, overlong_buffer=BUFFER)
    [score] = scores(settings, prompt("12"), "12", longest=6)  # 4 tokens, 2 of them in the buffer
    assert score.flat() == {"reward": 0.0, "reward/exact": 1.0, "reward/overlong": -1.0}
    [score] = scores(settings, prompt("12"), "12", longest=8)
    assert score.flat() == {"reward": 1.0, "reward/exact": 1.0, "reward/overlong": 0.0}
    with build_reward(settings, max_response_length=8) as reward:
        assert reward.names[-1] == "overlong"


def test_dapo_without_the_buffer_is_naive():
    [score] = scores(config(reward_manager={"name": "dapo"}), prompt("12"), "12")
    assert score.flat() == {"reward": 1.0, "reward/exact": 1.0}


def test_dapo_shapes_a_custom_score_too(tmp_path):
    code = "def compute_score(data_source, solution_str, ground_truth, extra_info):\n    return 1\n"
    settings = config(
        reward_manager={"name": "dapo"},
        overlong_buffer=BUFFER,
        custom_reward_function=own(tmp_path / "dapo.py", code),
    )
    [score] = scores(settings, prompt("12", "mine"), "12", longest=5)
    assert score.flat() == {"reward": -0.5, "reward/score": 1.0, "reward/overlong": -1.5}


def test_a_buffer_longer_than_a_response_is_refused():
    settings = config(reward_manager={"name": "dapo"}, overlong_buffer=BUFFER)
    with pytest.raises(UserError, match="longer than a response"):
        build_reward(settings, max_response_length=3)


def test_batch_without_a_function_is_refused():
    with pytest.raises(UserError, match="none is named"):
        build_reward(config(reward_manager={"name": "batch"}), max_response_length=3)


def test_an_unknown_manager_is_refused_with_near_names():
    with pytest.raises(UserError, match="did you mean `naive`"):
        build_reward(config(reward_manager={"name": "naiv"}), max_response_length=3)


def test_prime_judges_in_other_processes_on_their_main_thread(tmp_path):
    code = """
import os, signal

def compute_score(data_source, solution_str, ground_truth, extra_info):
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # refused off the main thread
    return {"score": 1.0, "pid": os.getpid()}
"""
    block = own(tmp_path / "where.py", code)
    settings = config(custom_reward_function=block, reward_manager={"name": "prime"}, num_workers=2)
    found = scores(settings, prompt("12", "mine"), *["12"] * 6)
    pids = {score.flat()["reward/pid"] for score in found}
    assert len(pids) <= 2
    assert os.getpid() not in pids


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ("while True: pass", "no score within 0.5 s (reward.timeout_s)"),
        ("os._exit(3)", "the process that computed it ended (exit code 3)"),
        ("os.kill(os.getpid(), 9)", "the process that computed it ended (exit code -9)"),
    ],
)
def test_a_hang_and_a_crash_cost_one_score(tmp_path, body, error):
    code = f"""
import os

def compute_score(data_source, solution_str, ground_truth, extra_info):
    if solution_str == "bad":
        {body}
    return 1.0
"""
    settings = config(
        custom_reward_function=own(tmp_path / "crash.py", code),
        reward_manager={"name": "prime"},
        num_workers=1,
        timeout_s=0.5,
    )
    found = scores(settings, prompt("12", "mine"), "good", "bad", "good")
    assert [score.value for score in found] == [1.0, None, 1.0]
    assert found[1].error == error


PLUGIN = """
from luyen.base.records import Score
from luyen.rewards.reward_managers import reward_managers
from luyen.rewards.rules.rule import rule_rewards


@rule_rewards.register("test_vowels", isolated=True)
def vowels(prompt, answer, *, of: str = "aeiou") -> float:
    return float(sum(letter in of for letter in answer.text))


@reward_managers.register("test_best_of_group")
def best_of_group(given):
    judge = given.judge()

    class BestOfGroup:
        names = judge.names

        async def __call__(self, prompt, rollouts):
            scores = await judge(prompt, rollouts)
            best = max(score.value for score in scores)
            won = [float(score.value == best) for score in scores]
            return [Score(name="reward", value=w, parts=s.parts) for w, s in zip(won, scores)]

    return BestOfGroup()
"""


def test_a_plugin_file_adds_a_manager_and_a_rule(tmp_path: Path):
    file = tmp_path / "plugin.py"
    file.write_text(PLUGIN)
    load_module(str(file), field="trainer.plugins")
    load_module(str(file), field="trainer.plugins")  # a second time changes nothing
    settings = config(
        components={"vowels": {"rule": "test_vowels", "kwargs": {"of": "a"}}},
        reward_manager={"name": "test_best_of_group"},
        num_workers=1,
    )
    [done] = scored(settings, [group(prompt("", "mine"), "aa", "a", "eeee")])
    assert [score.value for score in done.scores] == [1.0, 0.0, 0.0]
    assert [score.parts[0].value for score in done.scores] == [2.0, 1.0, 0.0]


@pytest.mark.parametrize("manager", ["naive", "prime", "dapo", "test_best_of_group"])
def test_every_manager_judges_trees(tmp_path: Path, manager: str):
    file = tmp_path / "plugin.py"
    file.write_text(PLUGIN)
    if "test_best_of_group" not in reward_managers:
        load_module(str(file), field="trainer.plugins")
    style = {"parts": {"json": {"rule": "json"}, "brief": {"rule": "length"}}, "combine": "min"}
    settings = config(
        components={"right": {"rule": "numeric"}, "style": {**style, "gate": {"by": "right"}}},
        reward_manager={"name": manager},
        num_workers=1,
    )
    [done] = scored(settings, [group(prompt("12", "mine"), "12", "13")], longest=8)
    right, wrong = done.scores
    assert right.flat() == {
        "reward": 1.0 if manager == "test_best_of_group" else 0.5,
        "reward/right": 1.0,
        "reward/style": -0.5,
        "reward/style/json": 1.0,
        "reward/style/brief": -0.5,
    }
    assert wrong.flat() == {"reward": 0.0, "reward/right": 0.0, "reward/style": 0.0}
    assert wrong.parts[1].gated
