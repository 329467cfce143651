"""Ctrl-C in a terminal, as a user presses it."""

import signal
import subprocess
import time
from pathlib import Path

import pytest

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


def test_a_second_ctrl_c_stops_at_once_and_says_what_is_lost(capfd: pytest.CaptureFixture[str]):
    handler = signal.getsignal(signal.SIGINT)
    with Interruption() as interruption:
        signal.raise_signal(signal.SIGINT)
        assert interruption.is_wanted
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is handler
    assert "steps after the newest checkpoint are lost" in capfd.readouterr().err


def wait_for_lines(file: Path, process: subprocess.Popen[str]) -> None:
    """Return once two steps are written down."""
    deadline = time.monotonic() + 120
    while not file.is_file() or len(file.read_text().splitlines()) < 2:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "the run wrote nothing down"
        time.sleep(0.1)
