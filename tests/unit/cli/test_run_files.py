"""Commands do not overwrite what a run recorded, whatever file is named for their output."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from luyen.base.errors import UserError
from luyen.cli.common import refuse_run_file
from luyen.cli.main import app


@pytest.fixture
def run(tmp_path: Path) -> Path:
    root = tmp_path / "run"
    root.mkdir()
    for name in ("manifest.json", "config.yaml", "metrics.jsonl", "report.html"):
        (root / name).write_text("recorded")
    (root / "checkpoints").mkdir()
    (root / "checkpoints" / "complete").write_text("recorded")
    return root


COMMANDS = (
    ("report", "--out"),
    ("timeline", "--out"),
    ("eval", "--out"),
    ("eval", "--samples-out"),
)


@pytest.mark.parametrize(("command", "option"), COMMANDS)
@pytest.mark.parametrize("name", ["metrics.jsonl", "config.yaml", "checkpoints/complete"])
def test_a_file_of_the_run_is_no_output(run: Path, command: str, option: str, name: str):
    done = CliRunner().invoke(app, [command, str(run), option, str(run / name)])
    assert isinstance(done.exception, UserError)
    assert done.exception.field == option
    assert "it is a file of the run" in done.exception.why
    assert (run / name).read_text() == "recorded"


def test_pages_new_files_links_and_files_elsewhere_are_outputs(run: Path, tmp_path: Path):
    link = tmp_path / "link"
    link.symlink_to(run / "metrics.jsonl")
    (tmp_path / "old.html").write_text("old")
    for out in (run / "report.html", run / "new.html", tmp_path / "old.html", link, None):
        refuse_run_file(out)
