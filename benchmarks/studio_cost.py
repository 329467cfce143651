"""Measure what live tabs of the studio cost: processor time of training with and without them.

    python benchmarks/studio_cost.py /tmp/cost --steps 40 --tabs 10 --pairs 3

Trains the quickstart in turns without a studio and with one in which every tab follows the run by
server-sent events and asks for curves, rollouts and the overview upon each, as the page does.
"""

import argparse
import json
import os
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from statistics import mean
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RENEWED = ("", "/series?name=reward/mean&name=actor/entropy", "/rollouts", "/timeline")
"""What a tab asks for again after an event, below the path of its run."""


def train(folder: Path, name: str, steps: int) -> float:
    """Processor time of a training process and its children, in seconds."""
    words = [
        f"trainer.total_training_steps={steps}",
        "trainer.logger=jsonl",
        f"trainer.default_local_dir={folder}",
        f"trainer.experiment_name={name}",
    ]
    recipe = str(ROOT / "recipes/quickstart.yaml")
    process = os.posix_spawn(
        sys.executable,
        [sys.executable, "-m", "luyen", "train", recipe, *words],
        os.environ,
        file_actions=[(os.POSIX_SPAWN_OPEN, 1, "/dev/null", os.O_WRONLY, 0)],
    )
    _, status, used = os.wait4(process, 0)
    assert status == 0, f"training ended with {status}"
    return used.ru_utime + used.ru_stime


class Tab(threading.Thread):
    """A tab that follows the newest run, and renews what it shows upon every event."""

    def __init__(self, base: str, token: str, name: str) -> None:
        super().__init__(daemon=True)
        self._base, self._name = base, name
        self._headers = {"Authorization": f"Bearer {token}"}
        self.events = 0

    def _open(self, path: str) -> Any:
        request = urllib.request.Request(f"{self._base}/api/v1{path}", headers=self._headers)
        return urllib.request.urlopen(request, timeout=600)

    def run(self) -> None:
        """Follow the run to its end."""
        while True:
            with self._open("/runs") as reply:
                found = [one["id"] for one in json.load(reply)["runs"] if one["name"] == self._name]
            if found:
                break
            time.sleep(0.5)
        place, last = f"/runs/{found[0]}", 0.0
        try:
            with self._open(f"{place}/events") as stream:
                for line in stream:
                    self.events += line.startswith(b"event:")
                    if line.startswith(b"event:") and time.monotonic() - last > 2.0:
                        last = time.monotonic()
                        for path in RENEWED:
                            with self._open(place + path) as reply:
                                reply.read()
        except (OSError, urllib.error.URLError, ValueError):
            return


def watched(folder: Path, name: str, steps: int, tabs: int) -> tuple[float, int]:
    """The same while tabs follow it, and how many events these got."""
    command = [sys.executable, "-m", "luyen", "studio", str(folder), "--no-open", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            base, _, token = server.stdout.readline().split()[-1].partition("/?token=")
            open_tabs = [Tab(base, token, name) for _ in range(tabs)]
            for tab in open_tabs:
                tab.start()
            used = train(folder, name, steps)
            return used, sum(tab.events for tab in open_tabs)
        finally:
            server.kill()


def main() -> None:
    """Read the arguments, train in turns, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--tabs", type=int, default=10)
    parser.add_argument("--pairs", type=int, default=3)
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    alone, beside = list[float](), list[float]()
    for pair in range(given.pairs):
        # in turns, and the other one first every other time
        for is_watched in (False, True) if pair % 2 == 0 else (True, False):
            name = f"{'watched' if is_watched else 'alone'}{pair}"
            if is_watched:
                used, events = watched(given.folder, name, given.steps, given.tabs)
                beside.append(used)
                print(f"{name}: {used:.2f} s of the processor, {events} events", flush=True)
            else:
                alone.append(train(given.folder, name, given.steps))
                print(f"{name}: {alone[-1]:.2f} s of the processor", flush=True)
    share = mean(beside) / mean(alone) - 1
    print(f"without {mean(alone):.2f} s, with {given.tabs} tabs {mean(beside):.2f} s: {share:+.2%}")


if __name__ == "__main__":
    main()
