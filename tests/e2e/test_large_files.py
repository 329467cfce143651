"""A file larger than the memory that a process may have is trained on to its end."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from luyen.telemetry.metrics import read_metrics
from tests.architecture.tree import ROOT

MIB = 2**20
MOST_MIB = 700
"""What the process may have of memory of its own (RLIMIT_DATA): a run of 1 MB has 460."""
FILE_MIB = 800
JOB = """
import resource, sys
from luyen.base.system import peak_bytes
from luyen.cli.main import app
limit = int(sys.argv.pop(1))
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
try:
    app()
finally:
    print("peak", peak_bytes())
"""


def write_rows(path: Path, num_bytes: int) -> str:
    """Questions whose rows carry 80 kB that no stage reads."""
    page = "x" * 80_000
    with path.open("w") as file:
        for number in range(num_bytes // len(page)):
            row = {"question": f"{number}+1=", "answer": str(number + 1), "page": page}
            file.write(json.dumps(row) + "\n")
    return str(path)


def peak_bytes(folder: Path, rows: str, stage: str) -> int:
    """Most memory that a whole run on the file had at once; the run ends with its third step."""
    given = {
        "data": {"train_files": rows, "train_batch_size": 4, "max_response_length": 8},
        "actor_rollout_ref": {"model": {"path": "builtin://arithmetic"}},
        "trainer": {
            **{"stage": stage, "device": "cpu", "total_training_steps": 3, "seed": 3},
            **{"project_name": "p", "experiment_name": "r", "default_local_dir": str(folder)},
        },
    }
    if stage == "rl":
        given["actor_rollout_ref"]["rollout"] = {"n": 4}
        given["reward"] = {"components": {"answer": {"rule": "exact"}}}
    (folder / "run.yaml").write_text(json.dumps(given))
    done = subprocess.run(
        [sys.executable, "-c", JOB, str(MOST_MIB * MIB), "train", str(folder / "run.yaml")],
        env=os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    metrics = folder / "p" / "r" / "metrics.jsonl"
    assert [line.step for line in read_metrics(metrics)][-1] == 3
    return int(done.stdout.rpartition("peak ")[2])


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["rl", "sft"])
def test_a_file_larger_than_memory_is_trained_to_its_end(stage: str, tmp_path: Path):
    rows = write_rows(tmp_path / "rows.jsonl", FILE_MIB * MIB)
    size = Path(rows).stat().st_size
    assert size > MOST_MIB * MIB
    # Libraries that are mapped from files count here, and not for the limit.
    assert peak_bytes(tmp_path, rows, stage) < size
    Path(rows).unlink()  # pytest keeps folders of the last runs
