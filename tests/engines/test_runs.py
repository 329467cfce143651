"""Runs that generate with the real vLLM: they learn, the gap is small, a killed server returns."""

import os
import signal
import threading
import time
from pathlib import Path

from luyen.telemetry.metrics import read_metrics
from tests.engines.conftest import PYTHON
from tests.engines.wide_heads import widen
from tests.runs import MODEL, ROLLOUT, Ran, train

RECIPES = Path(__file__).parents[2] / "recipes"
VLLM = (f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.server.python={PYTHON}", "trainer.logger=jsonl")
GAP = 1e-3


def gaps(ran: Ran) -> list[float]:
    """Largest difference of log-probabilities over all tokens of each step."""
    return ran.course("parity/max_gap")


def accuracy(ran: Ran) -> float:
    return ran.course("val/accuracy")[-1]


def test_the_quickstart_learns(tmp_path: Path):
    ran = train(tmp_path, *VLLM, files=[RECIPES / "quickstart.yaml"])
    assert ran.course("val/accuracy")[0] < 0.5
    assert accuracy(ran) >= 0.9
    assert len(gaps(ran)) == 115
    assert max(gaps(ran)) < GAP


def test_the_tool_recipe_learns_at_another_temperature(tmp_path: Path):
    words = (
        f"{MODEL}.path={widen(tmp_path / 'model')}",
        f"{ROLLOUT}.temperature=0.7",
        f"{ROLLOUT}.server.transport=group",
    )
    ran = train(tmp_path, *VLLM, *words, files=[RECIPES / "tool_calling.yaml"])
    assert accuracy(ran) >= 0.9
    assert len(gaps(ran)) == 30
    assert max(gaps(ran)) < GAP


def server_processes(folder: Path) -> list[int]:
    """Processes that were started with files below a folder."""
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        try:
            words = (entry / "cmdline").read_bytes() if entry.name.isdigit() else b""
        except OSError:  # it has ended
            continue
        if str(folder).encode() in words and b"vllm" in words and int(entry.name) != os.getpid():
            found.append(int(entry.name))
    return found


def kill_servers_after(folder: Path, steps: tuple[int, ...], killed: list[int]) -> None:
    """Kill every process of the run's server once each of these steps is recorded."""
    for step in steps:
        while not any(_has_step(file, step) for file in folder.rglob("metrics.jsonl")):
            time.sleep(0.2)
        for pid in server_processes(folder):
            os.kill(pid, signal.SIGKILL)
            killed.append(pid)


def _has_step(file: Path, step: int) -> bool:
    return any(line.step >= step for line in read_metrics(file))


def test_a_run_whose_server_is_killed_goes_on(tmp_path: Path):
    short = ("trainer.total_training_steps=12", "trainer.test_freq=0")
    killed: list[int] = []
    killer = threading.Thread(
        target=kill_servers_after, args=(tmp_path, (3, 7), killed), daemon=True
    )
    killer.start()
    ran = train(tmp_path, *VLLM, *short, files=[RECIPES / "quickstart.yaml"])
    assert len(killed) >= 2
    assert len(gaps(ran)) == 12
    assert max(gaps(ran)) < GAP
    assert ran.course("reward/mean")[-1] > ran.course("reward/mean")[0] + 0.2
