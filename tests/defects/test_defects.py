"""A part of the planted-defect score; `make defects` has all of it."""

from pathlib import Path

import pytest

from luyen.studio.doctor.diagnose import RULES
from tests.defects.edits import EDITS
from tests.defects.parts import SABOTAGED, WITH_TOOLS
from tests.defects.table import edited, healthy, sabotaged

QUICK = (
    "a constant reward",
    "a reward for the wrong thing",
    "an inverted mask",
    "an optimizer that writes nothing",
    "an engine with old weights",
    "a tool that always fails",
)


def test_every_rule_has_a_defect_of_its_own():
    named = [rule for rule, *_ in (*EDITS.values(), *SABOTAGED.values(), *WITH_TOOLS.values())]
    assert set(named) == set(RULES)
    assert len(named) >= 20


def test_defects_in_the_files_of_a_run_are_named_and_only_they(tmp_path: Path):
    table = edited(tmp_path)
    assert len(table) == 1 + len(EDITS)
    assert [row for row in table if not row.is_right] == []


@pytest.mark.parametrize("name", QUICK)
def test_a_sabotaged_run_is_found_out(name: str, tmp_path: Path):
    row = sabotaged(name, tmp_path)
    assert row.is_right, row


@pytest.mark.parametrize("name", ["dapo", "supervised", "tools"])
def test_a_healthy_run_is_left_in_peace(name: str, tmp_path: Path):
    assert healthy(name, tmp_path).found == ()
