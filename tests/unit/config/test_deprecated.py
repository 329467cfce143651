"""Keys of earlier versions are read for one version, with a warning; stored files keep it true."""

from pathlib import Path

import pytest

import luyen
from luyen.config.check import check
from luyen.config.explain import explain
from luyen.config.fields import all_fields
from luyen.config.loader.deprecated import DEPRECATED, Deprecation, with_new_names
from luyen.config.loader.tree import ConfigTree
from luyen.config.machine import Machine
from luyen.config.problem import Origin
from luyen.config.rules.rule import value_at
from tests.architecture.tree import ROOT

LAPTOP = Machine(cpus=2, ram_bytes=16 * 1024**3)
STORED = sorted((ROOT / "tests" / "data" / "old_configs").glob("*.yaml"))
OLD, NEW = "trainer.sead", "trainer.seed"
TABLE = {OLD: Deprecation(new=NEW, ends="0.2")}


def tree(**trainer: object) -> ConfigTree:
    origins = {f"trainer.{name}": Origin(source="a.yaml", line=2) for name in trainer}
    return ConfigTree(values={"trainer": trainer}, origins=origins)


def test_an_old_key_is_read_under_its_new_name_with_a_warning():
    found = with_new_names(tree(sead=3), TABLE)
    assert found.values == {"trainer": {"seed": 3}}
    [warning] = found.problems
    assert (warning.id, warning.severity, warning.field) == ("A16", "warning", OLD)
    assert "0.2" in warning.why
    assert warning.fix == f"write {NEW}"
    assert found.origins[NEW] == warning.origin == Origin(source="a.yaml", line=2)


def test_two_names_with_two_values_are_an_error():
    [error] = with_new_names(tree(sead=3, seed=4), TABLE).problems
    assert (error.severity, error.fix) == ("error", f"keep {NEW}")
    [warning] = with_new_names(tree(sead=3, seed=3), TABLE).problems
    assert warning.severity == "warning"


def test_what_is_not_deprecated_stays():
    before = tree(seed=3)
    assert with_new_names(before, TABLE) is before


@pytest.mark.parametrize("old", DEPRECATED)
def test_a_deprecation_names_a_key_of_today_and_has_not_ended(old: str):
    entry = DEPRECATED[old]
    assert entry.new in all_fields()
    assert old not in all_fields()
    version = tuple(map(int, luyen.__version__.split(".")[:2]))
    assert version < tuple(map(int, entry.ends.split("."))), f"{old} ends with this version"


def test_an_old_key_is_explained():
    for old, entry in DEPRECATED.items():
        assert entry.new in explain(old)
        assert entry.ends in explain(old)


def test_the_page_lists_every_deprecation():
    page = (ROOT / "docs" / "compatibility.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    wanted = [f"| `{old}` | `{e.new}` | {e.ends} |" for old, e in DEPRECATED.items()]
    assert rows == wanted


@pytest.mark.parametrize("path", STORED, ids=lambda path: path.stem)
def test_a_stored_configuration_is_accepted(path: Path):
    found = check([path], [], machine=LAPTOP)
    assert [problem for problem in found.problems if problem.severity == "error"] == []


def test_a_stored_configuration_with_an_old_key_has_its_effect():
    [path] = [path for path in STORED if path.stem == "server"]
    found = check([path], [], machine=LAPTOP)
    assert [problem.id for problem in found.problems if problem.severity == "warning"] == ["A16"]
    assert value_at(found.config, "actor_rollout_ref.rollout.server.lora_format") == "adapter"
