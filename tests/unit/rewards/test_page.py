"""What `check` knows and what docs/rewards.md says about the rules is what the rules are."""

import ast
import inspect
import re
from pathlib import Path

import pytest

from luyen.config.check import check
from luyen.config.reward_components import RULE_REWARDS, RuleFacts
from luyen.rewards.build import BUILT_IN
from luyen.rewards.leaf import rule_kwargs
from luyen.rewards.reward_managers import reward_managers
from luyen.rewards.rules.all import rule_rewards
from luyen.rewards.user_functions import load_module
from tests.architecture.pages import blocks, sections
from tests.architecture.tree import ROOT
from tests.unit.rewards.builders import config, own, prompt, scores

TEXT = (ROOT / "docs" / "rewards.md").read_text()
PAGE = sections(TEXT)
FUNCTION = blocks(PAGE["Your own function"], "python")[0]
RULES = [n for n in rule_rewards if rule_rewards.get(n).__module__.startswith("luyen.")]
REQUIRED = inspect.Parameter.empty


def facts_of(name: str) -> RuleFacts:
    hparams = rule_kwargs(rule_rewards.get(name))
    facts = rule_rewards.facts(name)
    return RuleFacts(
        hparams=tuple(hparams),
        required=tuple(hparam for hparam, default in hparams.items() if default is REQUIRED),
        package=facts.get("package"),
        extra=facts.get("extra"),
    )


def test_the_catalog_of_check_is_the_registry():
    assert {name: facts_of(name) for name in RULES} == RULE_REWARDS


def test_the_page_lists_every_rule_with_its_knobs():
    rows = re.findall(r"^\| `(\w+)` \|[^|]*\| ([^|]*) \|$", PAGE["Rules"], re.MULTILINE)
    written = {name: dict(re.findall(r"`(\w+)(?:=([^`]*))?`", hparams)) for name, hparams in rows}
    actual = {name: rule_kwargs(rule_rewards.get(name)) for name in RULES}
    read = {
        name: {hparam: ast.literal_eval(v) if v else REQUIRED for hparam, v in hparams.items()}
        for name, hparams in written.items()
    }
    assert read == actual


def test_the_page_lists_every_route_and_every_manager():
    rows = re.findall(
        r"^\| `([^`]+)` \| `(\w+)` \|$", PAGE["Which rule judges a row"], re.MULTILINE
    )
    assert dict(rows) == dict(BUILT_IN)
    own = [n for n in reward_managers if reward_managers.get(n).__module__.startswith("luyen.")]
    named = re.findall(r"^\| `(\w+)` \|", PAGE["Reward managers"], re.MULTILINE)
    assert sorted(named) == own


@pytest.mark.parametrize("block", blocks(TEXT, "yaml"))
def test_every_setting_of_the_page_passes_the_check(block: str, tmp_path: Path):
    function, file = tmp_path / "my_reward.py", tmp_path / "page.yaml"
    function.write_text(FUNCTION)
    file.write_text(block.replace("my_reward.py", str(function)))
    report = check([ROOT / "recipes" / "quickstart.yaml", file])
    assert [p for p in report.problems if p.severity == "error"] == []


def test_the_function_of_the_page_scores_as_it_says(tmp_path: Path):
    settings = config(custom_reward_function=own(tmp_path / "my_reward.py", FUNCTION))
    found = scores(settings, prompt("12", "mine"), "Please take 12", "13", "")
    assert [score.flat() for score in found] == [
        {"reward": 1.1, "reward/score": 1.1, "reward/acc": 1.0, "reward/polite": 1.0},
        {"reward": 0.0, "reward/score": 0.0, "reward/acc": 0.0, "reward/polite": 0.0},
        {"reward": None, "reward/score": None},
    ]


def test_the_plugin_of_the_page_works_and_check_knows_it(tmp_path: Path):
    plugin = tmp_path / "plugin.py"
    plugin.write_text(blocks(PAGE["Adding a rule or a manager"], "python")[0])
    keys = ["reward.components={few: {rule: words, kwargs: {most: 1}}}"]
    keys += ["reward.reward_manager.name=centred", f"trainer.plugins={plugin}"]
    report = check([ROOT / "recipes" / "quickstart.yaml"], keys)
    assert [p for p in report.problems if p.severity == "error"] == []
    load_module(str(plugin), field="trainer.plugins")
    found = scores(report.config.reward, prompt("", "mine"), "one", "two words")
    assert [score.value for score in found] == [0.5, -0.5]
