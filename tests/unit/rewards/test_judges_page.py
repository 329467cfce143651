"""What docs/judges.md says about judges is what they are."""

import re
from pathlib import Path

import pytest

from luyen.config.check import check
from luyen.config.schema.reward import JudgeConfig
from luyen.rewards import pool
from luyen.rewards.cache import FILE
from luyen.rewards.llm_judge import faults
from luyen.rewards.llm_judge.faults import JudgeFault
from luyen.rewards.llm_judge.judge_reward import MOST_BYTES
from luyen.rewards.rules.all import rule_rewards
from tests.architecture.pages import blocks, sections
from tests.architecture.tree import ROOT
from tests.optional import needs

TEXT = (ROOT / "docs" / "judges.md").read_text()
PAGE = sections(TEXT)


def rows(section: str) -> list[list[str]]:
    lines = [line for line in PAGE[section].split("\n") if line.startswith("| `")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


@needs("math_verify")
@pytest.mark.parametrize("block", blocks(TEXT, "yaml"))
def test_every_setting_of_the_page_passes_the_check(block: str, tmp_path: Path, monkeypatch):
    monkeypatch.setenv("JUDGE_API_KEY", "as the page says: it has to be set")
    file = tmp_path / "page.yaml"
    file.write_text(block)
    report = check([ROOT / "recipes" / "quickstart.yaml", file])
    assert [p for p in report.problems if p.severity == "error"] == []


def test_the_page_lists_every_key_with_its_default():
    written = {
        name.strip("`"): default.strip("`") for name, _, default in rows("Configuring a judge")
    }
    assert list(written) == list(JudgeConfig.model_fields)
    for name, default in written.items():
        actual = JudgeConfig.model_fields[name].default
        if isinstance(actual, str | int | float) and actual != "":
            assert default == (f"{actual:g}" if isinstance(actual, float) else str(actual)), name


def test_the_page_lists_every_fault_and_when_it_is_tried_again():
    kinds = {v for n, v in vars(faults).items() if n.isupper() and not n.startswith("_")}
    written = {name.strip("`"): again for name, _, again in rows("When a judge fails")}
    assert set(written) == {*kinds, "http_NNN"}
    for kind in kinds:
        fault = JudgeFault(kind, "")
        said = {(True, True): "yes", (False, True): "at a temperature above 0"}
        again = fault.may_pass(temperature=0.0), fault.may_pass(temperature=1.0)
        assert written[kind] == said[again]
    tried = [n for n in range(300, 600) if JudgeFault(f"http_{n}", "").may_pass(temperature=0.0)]
    assert tried == [408, 409, 425, 429, *range(500, 600)]


def test_the_page_names_the_limits_and_files_that_there_are():
    assert MOST_BYTES == pool.MOST_OUTPUT == 2**20
    assert f"more than {pool.MOST_PROCESSES} processes" in TEXT
    assert f"`{FILE}`" in TEXT
    isolated = {n for n in rule_rewards if rule_rewards.facts(n).get("isolated")}
    first = PAGE["Verifiers that misbehave"].split(")")[0]
    built_in = {n for n in isolated if rule_rewards.get(n).__module__.startswith("luyen.")}
    assert set(re.findall(r"`(\w+)`", first)) == built_in
