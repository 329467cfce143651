"""Every logger holds every metric of every step, and tables of rollouts, by its own reader."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from luyen.base.rundir import RunDirectory
from luyen.telemetry.metrics import read_metrics
from luyen.telemetry.rollout_files import read_rollouts
from luyen.telemetry.rollout_tables import COLUMNS
from tests.architecture.tree import ROOT
from tests.loggers.readers import (
    Tables,
    Values,
    close_to,
    read_mlflow,
    read_tensorboard,
    read_trackio,
    read_wandb,
)
from tests.runs import TINY

# Loggers warn of what their own dependencies will drop one day.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
ALL = ("console", "tensorboard", "wandb", "mlflow", "trackio")
VALIDATION = (
    "data.val_files=arithmetic://sum?digits=1&split=held-out",
    "trainer.test_freq=2",
)
NAMED = ("trainer.experiment_name=one", "trainer.save_freq=1")


class Ran(NamedTuple):
    """A run in a folder of its own."""

    folder: Path
    root: Path
    said: str

    def lines(self) -> Values:
        return {line.step: dict(line.values) for line in read_metrics(self.root / "metrics.jsonl")}

    @property
    def run_id(self) -> str:
        return RunDirectory(self.root).run_id


def train(
    folder: Path, loggers: Sequence[str], *words: str, env: Mapping[str, str] | None = None
) -> Ran:
    """`luyen train` in a process of its own, as a user would start it."""
    (folder / "run.yaml").write_text("trainer: {seed: 1}\n")
    command = [
        sys.executable,
        "-m",
        "luyen",
        "train",
        "run.yaml",
        *TINY,
        *VALIDATION,
        *NAMED,
        *words,
    ]
    command += [f"trainer.logger=[{', '.join(loggers)}]", "trainer.default_local_dir=runs"]
    variables = {
        **os.environ,
        "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}",
        "WANDB_MODE": "offline",
        "WANDB_SILENT": "true",
        "TRACKIO_DIR": str(folder / "trackio"),
        **(env or {}),
    }
    done = subprocess.run(
        command, cwd=folder, env=variables, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return Ran(folder, folder / "runs" / "luyen" / "one", done.stdout + done.stderr)


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """All loggers at once; two steps, and two more in another process."""
    folder = tmp_path_factory.mktemp("all")
    train(folder, ALL, "trainer.total_training_steps=2")
    return train(folder, ALL, "trainer.total_training_steps=4")


def require_tables(tables: Tables, ran: Ran) -> None:
    """Every step and every validation has its table."""
    steps = {step for name, step in tables if name == "rollouts/train"}
    assert steps == {1, 2, 3, 4}
    assert {step for name, step in tables if name == "rollouts/validation"} == {0, 2, 4}


def rewards_of(ran: Ran, step: int) -> list[float | None]:
    """Rewards of the eight rollouts that are shown of a step, by its rollout file."""
    file = RunDirectory(ran.root).rollouts(step)
    rollouts = sorted((one.rollout for one in read_rollouts(file)), key=lambda r: r.key)
    chosen = [rollouts[i * len(rollouts) // 8] for i in range(8)]
    return [None if r.score is None else r.score.value for r in chosen]


def test_no_logger_complains(resumed: Ran):
    assert "training goes on without it" not in resumed.said


def test_tensorboard_reads_every_metric_and_table(resumed: Ran):
    values, tables = read_tensorboard(resumed.root / "tensorboard")
    assert close_to(values, resumed.lines(), single=True) == []
    require_tables(tables, resumed)
    lines = tables["rollouts/train", 3].splitlines()
    assert lines[0] == f"| {' | '.join(COLUMNS)} |"
    assert len(lines) == 2 + 8


def test_wandb_has_every_metric_and_table(resumed: Ran):
    values, tables = read_wandb(resumed.root)
    assert close_to(values, resumed.lines()) == []
    require_tables(tables, resumed)
    table = tables["rollouts/train", 3]
    assert table["columns"] == list(COLUMNS)
    assert [row[3] for row in table["data"]] == rewards_of(resumed, 3)


def test_mlflow_in_its_default_store_has_every_metric_and_table(resumed: Ran):
    store = f"sqlite:///{resumed.folder / 'mlflow.db'}"
    values, tables = read_mlflow(store, resumed.run_id)
    renamed = {
        step: {name.replace("@", "_"): value for name, value in metrics.items()}
        for step, metrics in resumed.lines().items()
    }
    assert close_to(values, renamed) == []
    require_tables(tables, resumed)
    shown = [row["reward"] for row in tables["rollouts/train", 3]]
    # MLflow writes its tables with ten decimals.
    assert shown == pytest.approx(rewards_of(resumed, 3), abs=1e-10, rel=0)


def test_trackio_has_every_metric_and_table(resumed: Ran, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TRACKIO_DIR", str(resumed.folder / "trackio"))
    values, tables = read_trackio(f"one-{resumed.run_id}")
    assert close_to(values, resumed.lines()) == []
    require_tables(tables, resumed)
    assert [row["reward"] for row in tables["rollouts/train", 3]] == rewards_of(resumed, 3)


def test_prompts_of_a_table_are_what_the_policy_read(resumed: Ran):
    _, tables = read_wandb(resumed.root)
    first, later = (
        tables["rollouts/validation", 0]["data"],
        tables["rollouts/validation", 4]["data"],
    )
    assert [row[1] for row in first] == [row[1] for row in later]
    assert all("+" in row[1] for row in first)


@pytest.mark.parametrize("loggers", [("wandb",), ("mlflow", "tensorboard"), ("trackio", "wandb")])
def test_metrics_of_the_run_directory_do_not_depend_on_the_loggers(
    loggers: tuple[str, ...], resumed: Ran, tmp_path: Path
):
    ran = train(tmp_path, loggers, "trainer.total_training_steps=4")
    one, other = (read_metrics(r.root / "metrics.jsonl") for r in (ran, resumed))
    assert [line.timeless() for line in one] == [line.timeless() for line in other]


def test_mlflow_takes_names_below_other_names_in_a_store_of_files(tmp_path: Path):
    store = f"file:{tmp_path / 'mlruns'}"
    env = {"MLFLOW_TRACKING_URI": store, "MLFLOW_ALLOW_FILE_STORE": "true"}
    with pytest.MonkeyPatch.context() as patched:
        for name, value in env.items():
            patched.setenv(name, value)
        words = ("reward.components={right: {rule: exact}, brief: {rule: length, weight: 0.1}}",)
        words += ("reward.custom_reward_function.path=null", "trainer.total_training_steps=1")
        ran = train(tmp_path, ("mlflow",), *words, env=env)
        assert "training goes on without it" not in ran.said
        names = {name for line in ran.lines().values() for name in line}
        assert any(one.startswith(f"{other}/") for one in names for other in names)
        values, _ = read_mlflow(store, ran.run_id)
    renamed = {
        step: {name.replace("@", "_").replace("/", "."): v for name, v in metrics.items()}
        for step, metrics in ran.lines().items()
    }
    assert close_to(values, renamed) == []
