"""Check, training, tools and report without what only Linux and its kin have.

A new process runs them with `blocked/sitecustomize.py`, which takes these things from Luyen. It is
no other system: libraries below are those of this one, and programs start as they do here.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.architecture.tree import ROOT, parsed, sources

BLOCKED = Path(__file__).parent / "blocked"
FEW = (
    "trainer.total_training_steps=1",
    "data.train_batch_size=4",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "trainer.device=cpu",
)
JOB = """
import json, sys
from typer.testing import CliRunner
from luyen.cli.main import app

for words in json.loads(sys.argv[1]):
    done = CliRunner().invoke(app, words)
    if done.exit_code:
        sys.exit(f"{words}: {done.exit_code} {done.output} {done.exception!r}")
"""
STUDIO = """
import sys
from pathlib import Path
from tests.unit.web.server import serving

with serving(Path(sys.argv[1])) as client:
    run = client.only_run()
    for path in ("/session", "/schema", f"/runs/{run}", f"/runs/{run}/rollouts"):
        client.get(path)
    [row] = client.get("/runs")["runs"]
    page = client.ask("/")
    assert page.status == 200 and b"<html" in page.body
    print(row)
"""
LINUX_ONLY = ("resource", "fcntl", "termios", "pwd", "grp")
MAY_IMPORT = (
    "src/luyen/base/system.py",
    "src/luyen/config/model_folder/chat_template_worker.py",
    "src/luyen/runtime/ray/",
    "src/luyen/sandbox/attacks.py",
    "src/luyen/sandbox/child/",
)
"""The one that asks for the rest, the one that imports nothing of Luyen, and what is for Linux."""


def in_blocked_process(folder: Path, commands: list[list[str]]) -> str:
    """Run commands one after the other in a process without Linux; what was refused there."""
    refused = folder / "refused.txt"
    path = os.pathsep.join([str(BLOCKED), *(entry for entry in sys.path if entry)])
    done = subprocess.run(
        [sys.executable, "-c", JOB, json.dumps(commands)],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": path, "LUYEN_REFUSED": str(refused)},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return refused.read_text()


def test_check_quickstart_tools_and_report_work_without_linux(tmp_path: Path):
    quickstart, tools = (
        str(ROOT / "recipes" / f"{n}.yaml") for n in ("quickstart", "tool_calling")
    )
    names = [f"trainer.experiment_name={name}" for name in ("sums", "tools")]
    refused = in_blocked_process(
        tmp_path,
        [
            ["check", quickstart],
            ["train", quickstart, *FEW, names[0]],
            ["report", "runs/luyen/sums"],
            ["train", tools, *FEW, names[1]],
            ["init", "mine"],
            ["train", "mine/config.yaml", "trainer.total_training_steps=1"],
        ],
    )
    assert {"resource", "fcntl", "/proc/cpuinfo"} <= set(refused.splitlines())
    for run in ("luyen/sums", "luyen/tools", "starter/first"):
        lines = (tmp_path / "runs" / run / "metrics.jsonl").read_text().splitlines()
        assert json.loads(lines[-1])["step"] == 1
    assert (tmp_path / "runs" / "luyen" / "sums" / "report.html").is_file()


def test_the_studio_works_without_linux(tmp_path: Path):
    """It reads a run that is there: the list, the run, its rollouts, and the page."""
    folder, refused = tmp_path / "runs", tmp_path / "refused.txt"
    shutil.copytree(ROOT / "tests" / "data" / "old_run", folder / "luyen" / "old_run")
    path = os.pathsep.join([str(BLOCKED), str(ROOT), *(entry for entry in sys.path if entry)])
    done = subprocess.run(
        [sys.executable, "-c", STUDIO, str(folder)],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": path, "LUYEN_REFUSED": str(refused)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "old_run" in done.stdout
    assert {"fcntl"} <= set(refused.read_text().splitlines())


def test_what_is_blocked_is_missed(tmp_path: Path):
    """The process of the test above really lacks these things."""
    code = (
        "import luyen.base.system as s; print(s.fcntl, s.resource, s.user(), s.flags('O_NOFOLLOW'))"
    )
    path = os.pathsep.join([str(BLOCKED), *(entry for entry in sys.path if entry)])
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.stdout.split() == ["None", "None", "None", "0"], done.stderr


@pytest.mark.parametrize("name", LINUX_ONLY)
def test_a_module_of_linux_has_few_importers(name: str):
    import ast

    wrong: list[str] = []
    for path, text in sources():
        for node in ast.walk(parsed(text)):
            named = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if name in named and not path.startswith(MAY_IMPORT):
                wrong.append(path)
    assert wrong == []
