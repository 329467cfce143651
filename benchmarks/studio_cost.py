"""Measure what live tabs of the studio cost: processor time of training with and without them.

    python benchmarks/studio_cost.py /tmp/cost --steps 240 --tabs 10

Trains the quickstart once. In blocks of steps, in the order without, with, with, without, tabs
follow the run by server-sent events and ask for curves, rollouts and the timeline upon each, as the
page does. Processor time (user and system) of the training process itself is read at the end of
every step from `/proc`, so neither its start nor the load of the machine counts, and a slow change
over the run cancels out. The first step after a change is left out.
"""

import argparse
import contextlib
import json
import math
import os
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from statistics import mean, stdev
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RENEWED = ("", "/series?name=reward/mean&name=actor/entropy", "/rollouts", "/timeline")
"""What a tab asks for again after an event, below the path of its run."""
TURNS = (False, True, True, False)
"""Whether tabs are open in each block of four."""
NAME = "cost"
Read = Any


class Tab(threading.Thread):
    """A tab that follows the newest run, and renews what it shows upon every event."""

    def __init__(self, base: str, token: str, place: str) -> None:
        super().__init__(daemon=True)
        self._base, self._place = base, place
        self._headers = {"Authorization": f"Bearer {token}"}
        self.is_closed = False
        self.events = 0

    def _open(self, path: str) -> Read:
        request = urllib.request.Request(f"{self._base}/api/v1{path}", headers=self._headers)
        return urllib.request.urlopen(request, timeout=600)

    def run(self) -> None:
        """Follow the run until the tab is closed or the run is."""
        last = 0.0
        try:
            with self._open(f"{self._place}/events") as stream:
                for line in stream:
                    if self.is_closed:
                        return
                    self.events += line.startswith(b"event:")
                    if line.startswith(b"event:") and time.monotonic() - last > 2.0:
                        last = time.monotonic()
                        for path in RENEWED:
                            with self._open(self._place + path) as reply:
                                reply.read()
        except (OSError, urllib.error.URLError, ValueError):
            return


@contextlib.contextmanager
def studio(folder: Path) -> Iterator[tuple[str, str]]:
    """A studio over a folder; its address and its token."""
    command = [sys.executable, "-m", "luyen", "studio", str(folder), "--no-open", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            base, _, token = server.stdout.readline().split()[-1].partition("/?token=")
            yield base, token
        finally:
            server.kill()


def begin(folder: Path, steps: int) -> "subprocess.Popen[bytes]":
    """The training process."""
    words = [
        f"trainer.total_training_steps={steps}",
        "trainer.logger=jsonl",
        "trainer.test_freq=-1",
        "trainer.save_freq=-1",
        f"trainer.default_local_dir={folder}",
        f"trainer.experiment_name={NAME}",
    ]
    recipe = str(ROOT / "recipes/quickstart.yaml")
    command = [sys.executable, "-m", "luyen", "train", recipe, *words]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL)


def processor_s(process: int) -> float:
    """Processor time of a process and its threads so far, in seconds."""
    after = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(after[11]) + int(after[12])) / os.sysconf("SC_CLK_TCK")


def step_ends(process: "subprocess.Popen[bytes]", metrics: Path) -> Iterator[tuple[int, float]]:
    """Each step with the processor time at which its line was written; the last one is left out."""
    seen = 0
    while process.poll() is None:
        lines = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
        if lines > seen:
            assert seen == 0 or lines == seen + 1, (
                "two steps ended within 10 ms: they are too short"
            )
            seen = lines
            yield lines, processor_s(process.pid)
        time.sleep(0.01)


def measure(folder: Path, *, steps: int, block: int, tabs: int) -> tuple[list[float], int]:
    """Seconds of a step in each block, in order, and how many events the tabs got."""
    process = begin(folder, steps)
    metrics = folder / "luyen" / NAME / "metrics.jsonl"
    open_tabs: list[Tab] = []
    events, means = 0, list[float]()
    times: dict[int, float] = {}
    try:
        with studio(folder) as (base, token):
            place = ""
            for lines, spent in step_ends(process, metrics):
                times[lines] = spent
                number, within = divmod(lines - 1, block)
                if within != 0 or lines == 1:
                    continue
                if lines > block:
                    # from the end of the first step of the block to the end of its last
                    first, last = times[lines - block + 1], times[lines]
                    means.append((last - first) / (block - 1))
                    print(f"block {len(means)}: {means[-1]:.3f} s a step", flush=True)
                is_on = TURNS[number % len(TURNS)]
                if is_on and not open_tabs:
                    place = place or run_place(base, token)
                    open_tabs = [Tab(base, token, place) for _ in range(tabs)]
                    for tab in open_tabs:
                        tab.start()
                elif not is_on:
                    for tab in open_tabs:
                        tab.is_closed = True
                        events += tab.events
                    open_tabs = []
            events += sum(tab.events for tab in open_tabs)
    finally:
        process.kill()
        process.wait()
    return means, events


def run_place(base: str, token: str) -> str:
    """The path of the run in the API."""
    headers = {"Authorization": f"Bearer {token}"}
    while True:
        request = urllib.request.Request(f"{base}/api/v1/runs", headers=headers)
        with urllib.request.urlopen(request) as reply:
            found = [one["id"] for one in json.load(reply)["runs"] if one["name"] == NAME]
        if found:
            return f"/runs/{found[0]}"
        time.sleep(0.2)


def shares(means: list[float]) -> list[float]:
    """The relative cost of tabs in each four blocks."""
    found: list[float] = []
    for i in range(0, len(means) - len(TURNS) + 1, len(TURNS)):
        four = list(zip(TURNS, means[i : i + len(TURNS)], strict=True))
        with_tabs = mean(value for is_on, value in four if is_on)
        without = mean(value for is_on, value in four if not is_on)
        found.append(with_tabs / without - 1)
    return found


def main() -> None:
    """Read the arguments, train, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--block", type=int, default=6)
    parser.add_argument("--tabs", type=int, default=10)
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    load = os.getloadavg()[0]
    means, events = measure(given.folder, steps=given.steps, block=given.block, tabs=given.tabs)
    found = shares(means)
    for name, is_on in (("without tabs", False), (f"with {given.tabs} tabs", True)):
        mine = [v for v, on in zip(means, TURNS * len(means), strict=False) if on == is_on]
        print(f"{name}: {mean(mine):.3f} s of the processor a step, {len(mine)} blocks")
    error = stdev(found) / math.sqrt(len(found)) if len(found) > 1 else float("nan")
    print(f"difference {mean(found):+.2%}, standard error {error:.2%}, {events} events;"
          f" load {load:.1f} before, {os.getloadavg()[0]:.1f} after")  # fmt: skip


if __name__ == "__main__":
    main()
