"""A run directory that an earlier version left: today's code resumes it, replays it and reads it.

`tests/data/old_run` is a quickstart of a tiny random model on an ARM CPU that was to train 4 steps.
It has a checkpoint after step 2, and was killed with SIGKILL in step 4. It must stay as it is: to
make it anew with later code would prove nothing.
"""

import json
import platform
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from luyen.base.digests import read_digests
from luyen.base.process_setup import is_promised
from luyen.cli.main import app
from luyen.telemetry.metrics import read_metrics
from luyen.telemetry.rollout_files import read_rollouts
from tests.architecture.tree import ROOT

OLD = ROOT / "tests" / "data" / "old_run"
CLOSE = 1e-4
"""How far the numbers of another processor may be from those of the old run, relatively."""


def repeats_bits() -> bool:
    """Whether this machine gives the bits of the one that the old run was made on."""
    made = json.loads((OLD / "manifest.json").read_text())
    is_like = platform.machine() == made["hardware"]["machine"] and is_promised("float32")
    return is_like and torch.__version__ == made["versions"]["torch"]


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the old run, in the place that its configuration gives relatively."""
    monkeypatch.chdir(tmp_path)
    return Path(shutil.copytree(OLD, tmp_path / "runs" / "luyen" / "old_run"))


def call(*words: str | Path) -> tuple[int, str]:
    done = CliRunner().invoke(app, [str(word) for word in words])
    return done.exit_code, f"{done.output} {done.exception or ''}"


def test_the_old_run_is_resumed_and_its_chain_goes_on(root: Path):
    code, said = call("train", "--resume", root, "--trust")
    assert code == 0, said
    # Reading verifies that each line follows from the one before.
    before, after = (read_digests(run / "digests.jsonl") for run in (OLD, root))
    assert [line.step for line in before] == [1, 2, 3]
    assert [line.step for line in after] == [1, 2, 3, 4]
    assert after[:2] == before[:2]
    assert after[2].previous == before[1].chain
    if repeats_bits():
        assert after[2] == before[2]
    metrics = read_metrics(root / "metrics.jsonl")
    assert [line.step for line in metrics] == [1, 2, 3, 4]
    assert metrics[:2] == read_metrics(OLD / "metrics.jsonl")[:2]
    assert metrics[3].values["actor/grad_norm"] > 0
    resumed = json.loads((root / "resumptions.json").read_text())
    assert len(resumed["resumptions"]) == 1
    assert sorted(path.name for path in (root / "checkpoints").iterdir())[-1] == "step_000004"
    rollouts = [len(read_rollouts(root / f"rollouts/step_{n:06d}.parquet")) for n in (1, 2, 3, 4)]
    assert rollouts == [16, 16, 16, 16]


@pytest.mark.parametrize("step", [1, 3])
def test_a_step_of_the_old_run_is_replayed(step: int, root: Path):
    """Step 1 from the beginning, step 3 from the checkpoint."""
    done = CliRunner().invoke(app, ["replay", str(root), "--step", str(step), "--trust", "--json"])
    page: dict[str, Any] = json.loads(done.stdout)
    numbers = page["numbers"]
    assert {"actor/pg_loss", "actor/grad_norm", "actor/entropy"} <= set(numbers)
    # Which tokens agree to the bit is a fact of the processor that drew them.
    bits = () if repeats_bits() else ("parity/exact_fraction",)
    for name, number in numbers.items():
        if name in bits:
            continue
        assert number["after"] == pytest.approx(number["before"], rel=CLOSE, abs=CLOSE), name
    if repeats_bits():
        assert (done.exit_code, page["equal"], page["parting"]) == (0, True, None)


def test_a_report_of_the_old_run_is_written(root: Path):
    page = root.parent / "page.html"
    code, said = call("report", root, "--out", page)
    assert code == 0, said
    text = page.read_text()
    assert "old_run" in text
    assert "reward/mean" in text
    made = json.loads((OLD / "manifest.json").read_text())
    assert made["run_id"] in text


def test_the_old_run_is_diagnosed_evaluated_and_exported(root: Path):
    code, said = call("doctor", root)
    assert code == 0, said
    rows = "arithmetic://sum?digits=1&size=8"
    code, said = call("eval", root, "--data", rows, "--trust", "--json")
    assert code == 0, said
    code, said = call("export", root, root.parent / "exported", "--trust")
    assert code == 0, said
    shapes = json.loads((root.parent / "exported" / "config.json").read_text())
    assert shapes["hidden_size"] == 32
