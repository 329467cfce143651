"""Every configuration on the page about distillation is one that `luyen check` accepts."""

from pathlib import Path

import pytest

from luyen.config.check import check
from tests.architecture.pages import blocks
from tests.architecture.tree import ROOT

PAGE = (ROOT / "docs" / "distillation.md").read_text()
BASE = ROOT / "recipes" / "quickstart.yaml"
SHOWN = blocks(PAGE, "yaml")


@pytest.mark.parametrize("shown", SHOWN)
def test_a_shown_configuration_has_no_error(shown: str, tmp_path: Path):
    file = tmp_path / "shown.yaml"
    file.write_text(shown)
    report = check([BASE, file])
    assert [p for p in report.problems if p.severity == "error"] == []
    assert "teacher" in {role.name for role in report.plan.where.roles}


def test_the_page_shows_both_ways():
    assert len(SHOWN) == 3
