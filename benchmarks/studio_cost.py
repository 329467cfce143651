"""Measure what live tabs of the studio cost: processor time of training with and without them.

    python benchmarks/studio_cost.py /tmp/cost --rounds 12 --tabs 10

Trains the quickstart twice at the same time, with the same seeds, so that both compute the same.
In each round one run goes on for some steps while the other is stopped (SIGSTOP), and then the
other for the same steps. Tabs follow one of the two by server-sent events and ask for curves,
rollouts and the timeline upon each, as the page does; a stopped run has no events, so they rest
while the other one goes on. Which run is followed, and which goes first, changes from round to
round, so that neither what distinguishes the two processes nor a slow change of the machine counts.

Processor time (user and system) is that of the training process itself between the end of the first
step of its turn and the end of the last, so that of its start and of the change is left out.
Printed is the median of the ratio over pairs of rounds, with the quartiles and the standard error;
after Ctrl-C, that of the rounds so far.
"""

import argparse
import contextlib
import json
import math
import os
import random
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean, median, quantiles, stdev
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RENEWED = ("", "/series?name=reward/mean&name=actor/entropy", "/rollouts", "/timeline")
"""What a tab asks for again after an event, below the path of its run."""
REST_S = 2.5
"""Seconds after which the tabs have shown the last step of a run that was stopped."""
NAMES = ("one", "other")
Read = Any


class Tab(threading.Thread):
    """A tab that follows a run, and renews what it shows upon every event."""

    def __init__(self, base: str, token: str, place: str) -> None:
        super().__init__(daemon=True)
        self._base, self._place = base, place
        self._headers = {"Authorization": f"Bearer {token}"}
        self.is_closed = False
        self.events = self.renewals = 0

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
                        self.renewals += 1
                        for path in RENEWED:
                            with self._open(self._place + path) as reply:
                                reply.read()
        except (OSError, urllib.error.URLError, ValueError):
            return


@contextlib.contextmanager
def studio(folder: Path) -> Iterator[tuple[str, str, int]]:
    """A studio over a folder: its address, its token and its process."""
    command = [sys.executable, "-m", "luyen", "studio", str(folder), "--no-open", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            base, _, token = server.stdout.readline().split()[-1].partition("/?token=")
            yield base, token, server.pid
        finally:
            server.kill()


def run_place(base: str, token: str, name: str) -> str:
    """The path of a run in the API."""
    headers = {"Authorization": f"Bearer {token}"}
    while True:
        request = urllib.request.Request(f"{base}/api/v1/runs", headers=headers)
        with urllib.request.urlopen(request) as reply:
            found = [one["id"] for one in json.load(reply)["runs"] if one["name"] == name]
        if found:
            return f"/runs/{found[0]}"
        time.sleep(0.2)


def processor_s(process: int) -> float:
    """Processor time of a process and its threads so far, by the clock that Linux has of it."""
    return time.clock_gettime((~process << 3) | 2)


class Training:
    """A training process that is stopped, except when it is given a turn."""

    def __init__(self, folder: Path, name: str) -> None:
        words = [
            "trainer.total_training_steps=100000",
            "trainer.logger=jsonl",
            "trainer.test_freq=-1",
            "trainer.save_freq=-1",
            f"trainer.default_local_dir={folder}",
            f"trainer.experiment_name={name}",
        ]
        recipe = str(ROOT / "recipes/quickstart.yaml")
        command = [sys.executable, "-m", "luyen", "train", recipe, *words]
        self._metrics = folder / "luyen" / name / "metrics.jsonl"
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        self.turn(1)

    def _steps(self) -> int:
        return self._metrics.read_bytes().count(b"\n") if self._metrics.exists() else 0

    def turn(self, steps: int) -> float:
        """Go on for some steps; processor time of one of them, the first left out."""
        self._process.send_signal(signal.SIGCONT)
        seen = begun = self._steps()
        size, marks = -1, list[float]()
        while seen - begun < steps:
            assert self._process.poll() is None, "the training ended"
            time.sleep(0.004)
            now = self._metrics.stat().st_size if self._metrics.exists() else -1
            if now != size:
                spent = processor_s(self._process.pid)
                marks += [spent] * (self._steps() - seen)
                seen, size = self._steps(), now
        self._process.send_signal(signal.SIGSTOP)
        return (marks[-1] - marks[0]) / max(len(marks) - 1, 1)

    def end(self) -> None:
        """Kill it."""
        self._process.kill()
        self._process.wait()


def measure(folder: Path, *, rounds: int, block: int, tabs: int) -> list[dict[str, float]]:
    """Processor seconds of a step of the followed run and of the other one, by round."""
    found: list[dict[str, float]] = []
    trainings = [Training(folder, name) for name in NAMES]
    try:
        with studio(folder) as (base, token, server), contextlib.suppress(KeyboardInterrupt):
            places = [run_place(base, token, name) for name in NAMES]
            print(f"both runs are in their first steps; the studio is process {server}", flush=True)
            for number in range(rounds):
                followed = (0, 1, 1, 0)[number % 4]
                opened = [Tab(base, token, places[followed]) for _ in range(tabs)]
                for tab in opened:
                    tab.start()
                time.sleep(REST_S)
                turns: dict[int, tuple[float, float]] = {}
                for which in ((0, 1), (1, 0))[number % 2]:
                    before, begun = processor_s(server), time.monotonic()
                    spent = trainings[which].turn(block)
                    share = (processor_s(server) - before) / (time.monotonic() - begun)
                    turns[which] = spent, share
                    time.sleep(REST_S)
                for tab in opened:
                    tab.is_closed = True
                named = {"with": turns[followed], "without": turns[1 - followed]}
                one = {name: spent for name, (spent, _) in named.items()}
                one |= {f"server_{name}": share for name, (_, share) in named.items()}
                one["renewals"] = float(sum(tab.renewals for tab in opened))
                found.append(one)
                print(json.dumps({k: round(v, 4) for k, v in one.items()}), flush=True)
    finally:
        for training in trainings:
            training.end()
    return found


def report(found: list[dict[str, float]]) -> str:
    """The ratio over pairs of rounds in which each of the runs was followed once."""
    logs = [math.log(one["with"] / one["without"]) for one in found]
    pairs = [fmean(logs[i : i + 2]) for i in range(0, len(logs) - 1, 2)]
    chance = random.Random(0)
    medians = [median(chance.choices(pairs, k=len(pairs))) for _ in range(1000)]
    low, _, high = quantiles(pairs, n=4) if len(pairs) > 1 else (math.nan,) * 3
    steps = {name: fmean(one[name] for one in found) for name in found[0]}
    return (
        f"{steps['without']:.3f} s of the processor a step without tabs; difference with tabs:"
        f" median {math.expm1(median(pairs)):+.2%}, quartiles {math.expm1(low):+.2%} to"
        f" {math.expm1(high):+.2%}, standard error {stdev(medians):.2%}, {len(pairs)} pairs;"
        f" the studio took {steps['server_with']:.1%} of a core with tabs,"
        f" {steps['server_without']:.1%} without; load {os.getloadavg()[0]:.1f}"
    )


def main() -> None:
    """Read the arguments, train, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--block", type=int, default=9)
    parser.add_argument("--tabs", type=int, default=10)
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    found = measure(given.folder, rounds=given.rounds, block=given.block, tabs=given.tabs)
    print(report(found) if found else "no round was complete")


if __name__ == "__main__":
    main()
