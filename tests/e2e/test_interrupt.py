"""Ctrl-C in a terminal, as a user presses it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from luyen.studio.runs import list_runs
from luyen.train.interrupt import Interruption
from tests.forked_python import forked_python
from tests.runs import TINY, read_back

MANY = "trainer.total_training_steps=100000"


def test_ctrl_c_ends_with_a_checkpoint_a_summary_and_its_code(tmp_path: Path):
    words = [*TINY, MANY, f"trainer.default_local_dir={tmp_path}"]
    process = subprocess.Popen(
        [forked_python(), "-m", "luyen", "train", "recipes/quickstart.yaml", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    root = tmp_path / "luyen" / "quickstart"
    try:
        wait_for_lines(root / "metrics.jsonl", process)
        process.send_signal(signal.SIGINT)
        said, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, errors
    assert "Interrupted" in said
    assert "luyen chat" in said
    assert "once more to stop at once" in errors
    left = read_back(root)
    last = int(left.metrics[-1]["step"])
    assert (root / "checkpoints" / f"step_{last:06d}").is_dir()
    assert {path.name for path in (root / "report").glob("*.png")} == {"reward.png", "loss.png"}


def test_ctrl_c_ends_a_run_on_ray_with_a_checkpoint_and_its_code(tmp_path: Path):
    """A terminal sends the signal to all processes of the command, those of Ray included."""
    pytest.importorskip("ray", reason="the extra `ray` is not installed")
    words = [*TINY, MANY, "trainer.runtime=ray", f"trainer.default_local_dir={tmp_path}"]
    environment = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}
    process = subprocess.Popen(
        [sys.executable, "-m", "luyen", "train", "recipes/quickstart.yaml", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        process_group=0,
    )
    root = tmp_path / "luyen" / "quickstart"
    try:
        wait_for_lines(root / "metrics.jsonl", process, seconds=400)
        os.killpg(process.pid, signal.SIGINT)
        pressed = time.monotonic()
        said, errors = process.communicate(timeout=60)
        seconds = time.monotonic() - pressed
    finally:
        process.kill()
    assert process.returncode == 130, errors
    assert "Interrupted" in said
    assert "Traceback" not in errors
    left = read_back(root)
    last = int(left.metrics[-1]["step"])
    assert (root / "checkpoints" / f"step_{last:06d}").is_dir()
    assert (root / "checkpoints" / f"step_{last:06d}" / "actor").is_dir()
    [run] = list_runs(tmp_path)
    assert run.state == "interrupted"
    assert "SIGINT" in run.note
    assert seconds < 45, "the processes end within seconds, on a machine that is not overloaded"


def test_a_second_ctrl_c_stops_at_once_and_says_what_is_lost(capfd: pytest.CaptureFixture[str]):
    handler = signal.getsignal(signal.SIGINT)
    with Interruption() as interruption:
        signal.raise_signal(signal.SIGINT)
        assert interruption.is_wanted
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is handler
    assert "steps after the newest checkpoint are lost" in capfd.readouterr().err


def wait_for_lines(file: Path, process: subprocess.Popen[str], *, seconds: float = 120) -> None:
    """Return once two steps are written down."""
    deadline = time.monotonic() + seconds
    while not file.is_file() or len(file.read_text().splitlines()) < 2:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "the run wrote nothing down"
        time.sleep(0.1)
