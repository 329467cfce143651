"""Every rule has a configuration that triggers it and one that does not."""

from pathlib import Path

import pytest

from luyen.config.check import check
from luyen.config.machine import Machine
from luyen.config.problem import Problem
from luyen.config.rules.all import RULES
from tests.unit.config.rule_cases import CASES

LAPTOP = Machine(cpus=2, ram_bytes=16 * 1024**3)
ROWS = "data.train_files=arithmetic://sum"


@pytest.fixture
def places(tmp_path: Path) -> dict[str, str]:
    tools = tmp_path / "tools.yaml"
    tools.write_text("tools:\n  - builtin: calculator\n")
    broken = tmp_path / "broken.yaml"
    broken.write_text("tools:\n  - bulitin: calculator\n")
    plugin = tmp_path / "plugin.py"
    plugin.write_text("class MySampler: ...\n\n\ndef score(): ...\n")
    empty = tmp_path / "empty"
    empty.mkdir()
    saved = tmp_path / "saved"
    for step in (9, 10):
        (saved / "luyen" / "run" / "checkpoints" / f"step_{step}").mkdir(parents=True)
    named = {"TOOLS": tools, "BROKEN": broken, "PLUGIN": plugin, "HERE": empty, "SAVED": saved}
    return {word: str(path) for word, path in named.items()}


def problems(overrides: tuple[str, ...], places: dict[str, str]) -> list[Problem]:
    words = [ROWS, *overrides]
    for word, path in places.items():
        words = [text.replace(f"={word}", f"={path}") for text in words]
    version = (2, 10) if "OLD" in words else (5, 19)
    report = check(
        [],
        [word for word in words if word != "OLD"],
        machine=LAPTOP,
        installed=lambda package: False,
        versions=lambda package: version if package == "transformers" else (2, 13),
    )
    return list(report.problems)


def test_the_table_covers_every_rule() -> None:
    assert set(CASES) == set(RULES)


def test_there_are_at_least_thirty_rules() -> None:
    assert len(RULES) >= 30


@pytest.mark.parametrize("name", sorted(CASES))
def test_rule_is_triggered(name: str, places: dict[str, str]) -> None:
    found = [p for p in problems(CASES[name][0], places) if p.id == name]
    assert found, f"{name} did not trigger"
    for problem in found:
        assert problem.severity == RULES[name].severity
        assert problem.why
        assert problem.fix


@pytest.mark.parametrize("name", sorted(CASES))
def test_rule_stays_quiet(name: str, places: dict[str, str]) -> None:
    assert name not in {p.id for p in problems(CASES[name][1], places)}


def test_resuming_names_the_newest_checkpoint_by_number(places: dict[str, str]) -> None:
    found = [p for p in problems(CASES["S08"][0], places) if p.id == "S08"]
    assert "step_10" in found[0].why


def test_divisibility_shows_its_arithmetic(places: dict[str, str]) -> None:
    found = [p for p in problems(("data.train_batch_size=300",), places) if p.id == "B02"]
    assert "300 prompts = 1 x 256 + 44" in found[0].why


def test_a_pass_holds_a_whole_conversation(places: dict[str, str]) -> None:
    wide, talks = "actor_rollout_ref.rollout.max_num_batched_tokens=", "multi_turn.enable=true"
    talks = f"actor_rollout_ref.rollout.{talks}"
    assert not [p for p in problems((f"{wide}1000",), places) if p.id == "R10"]
    [found] = [p for p in problems((f"{wide}1000", talks), places) if p.id == "R10"]
    assert "all that was said" in found.why
    assert not [p for p in problems((f"{wide}1023", talks), places) if p.id == "R10"]
