"""Every run configuration in the repository passes `check`."""

from pathlib import Path

import pytest

from luyen.config.check import check
from luyen.config.pipeline import check_pipeline, is_pipeline, read_pipeline
from tests.architecture.tree import PACKAGE, ROOT

NOT_A_RUN: dict[str, str] = {
    "recipes/tools/calculator.yaml": "a list of tools",
    "recipes/tools/orders.yaml": "a list of tools",
}
"""Path -> what the file is, for YAML below src/ or recipes/ that configures no run."""

FILES = sorted(
    path
    for folder in (PACKAGE, "recipes")
    for path in (ROOT / folder).rglob("*.y*ml")
    if path.relative_to(ROOT).as_posix() not in NOT_A_RUN
)


def violations(path: Path) -> list[str]:
    """The errors that `check` reports for one file."""
    if is_pipeline([path]):
        pipeline = read_pipeline([path], [])
        found = [p for stage in check_pipeline(pipeline) for p in stage.report.problems]
        found += pipeline.problems
    else:
        found = [*check([path]).problems]
    return [f"{p.id} {p.field}: {p.why}" for p in found if p.severity == "error"]


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_a_committed_run_configuration_has_no_error(path: Path):
    assert violations(path) == []


def test_the_quick_start_is_among_them():
    assert ROOT / "recipes" / "quickstart.yaml" in FILES


def test_every_exemption_is_a_file():
    assert [name for name in NOT_A_RUN if not (ROOT / name).is_file()] == []


def test_a_misspelt_key_is_caught(tmp_path: Path):
    planted = tmp_path / "planted.yaml"
    text = (ROOT / PACKAGE / "builtin" / "quickstart.yaml").read_text()
    assert text.count("\ntrainer:") == 1
    planted.write_text(text.replace("\ntrainer:", "\ntrianer:"))
    assert any("trianer" in problem for problem in violations(planted))
