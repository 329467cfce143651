"""`luyen sweep`: which runs a grid and a list make, and that finished ones are not run again."""

import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from luyen.base.errors import UserError
from luyen.cli.sweep import run_sweep
from luyen.config.check import check
from luyen.config.sweep import Variant, variants
from luyen.train.start import run_training


def test_a_grid_has_every_combination_and_a_list_its_own():
    shared, runs = variants(["a.n=1,2", "b.m=x,y", "c=3"], [])
    assert shared == ["c=3"]
    assert [run.words for run in runs] == [
        ("a.n=1", "b.m=x"),
        ("a.n=1", "b.m=y"),
        ("a.n=2", "b.m=x"),
        ("a.n=2", "b.m=y"),
    ]
    _, runs = variants(["a.n=1"], ["b.m=x d=1", "b.m=y"])
    assert [run.words for run in runs] == [("b.m=x", "d=1"), ("b.m=y",)]


def test_names_are_short_legal_and_differ():
    long = [Variant(words=(f"a.b={'x' * 200}{i}",)).name for i in range(2)]
    assert all(len(name) <= 80 for name in long)
    assert long[0] != long[1]
    assert Variant(words=("data.train_files=arithmetic://sum?size=8",)).name == (
        "train_files=arithmetic_sum_size=8"
    )


def test_nothing_to_vary_and_too_much_are_refused():
    with pytest.raises(UserError, match="nothing to vary"):
        variants(["a=1"], [])
    with pytest.raises(UserError, match="more than 1000"):
        variants([f"k{i}=1,2" for i in range(10)], [])


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    file = tmp_path / "tiny.yaml"
    file.write_text(
        "data: {train_files: 'arithmetic://sum?digits=1&size=8', train_batch_size: 4}\n"
        "algorithm: {adv_estimator: grpo}\n"
        "actor_rollout_ref: {rollout: {n: 2}}\n"
        f"trainer: {{default_local_dir: {tmp_path}, total_training_steps: 1}}\n"
    )
    return file


def test_a_mistake_in_one_run_stops_all_before_the_first(
    recipe: Path, capsys: pytest.CaptureFixture[str]
):
    assert run_sweep([str(recipe), "actor_rollout_ref.rollout.n=2,1"], [], train=_never) == 1
    assert "error A02" in capsys.readouterr().out


def _never(words: Sequence[str]) -> int:
    raise AssertionError(words)


def test_finished_runs_are_not_run_again_and_all_are_compared(
    recipe: Path, capsys: pytest.CaptureFixture[str]
):
    called: list[Sequence[str]] = []

    def train(words: Sequence[str]) -> int:
        called.append(words)
        if len(called) == 2:
            return 130
        return run_training(check([recipe], words[1:])).exit_code

    words = [str(recipe), "trainer.seed=1,2"]
    assert run_sweep(words, [], train=train) == 130
    assert run_sweep(words, [], train=train) == 0
    assert [one[-2] for one in called] == ["trainer.seed=1", "trainer.seed=2", "trainer.seed=2"]
    text = capsys.readouterr().out
    assert "[1/2] seed=1: finished already" in text
    rows = [line.split()[:3] for line in text.splitlines()[-2:]]
    assert rows == [["seed=1", "1/1", "finished"], ["seed=2", "1/1", "finished"]]


SAVES = """
import pathlib, signal, sys, time
def save(number, frame):
    time.sleep(1)
    pathlib.Path(sys.argv[1]).write_text(str(number))
    sys.exit(128 + number)
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, save)
pathlib.Path(sys.argv[1] + ".begun").touch()
time.sleep(60)
"""
SWEEPS = """
import sys
from luyen.cli.sweep import run_with_signals
sys.exit(run_with_signals([sys.executable, "-c", *sys.argv[1:]]))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_run_of_a_sweep_is_given_its_signals_and_may_save(number: int, tmp_path: Path):
    saved, begun = tmp_path / "saved", tmp_path / "saved.begun"
    sweep = subprocess.Popen([sys.executable, "-c", SWEEPS, SAVES, str(saved)])
    deadline = time.monotonic() + 60
    while not begun.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.5)  # the sweep waits by now
    sweep.send_signal(number)
    assert sweep.wait(60) == 128 + number
    assert saved.read_text() == str(int(number))
