"""Measure the studio on a large folder: 200 runs, one of 10,000 steps x 512 rollouts.

    python benchmarks/studio_scale.py /tmp/scale --steps 10000 --rollouts 512 --runs 200

Makes the folder where it is not there, starts `luyen studio`, and prints seconds of the first
answer of every route, of filters and searches, and the memory of the server. The files of the large
run are 16 different ones under many names (hard links), so that it takes little disk to make.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

from luyen.base.records import GroupId, Rollout, Score, Source, StopReason
from luyen.base.rundir import RunDirectory
from luyen.telemetry.metrics import metrics_line
from luyen.telemetry.rollout_files import RecordedRollout, write_rollouts

CONFIG = """\
trainer: {{stage: rl, total_training_steps: {steps}}}
data: {{train_batch_size: 64}}
algorithm: {{adv_estimator: grpo}}
actor_rollout_ref: {{model: {{path: 'builtin://arithmetic'}}}}
"""
VARIANTS = 16
NAMES = [f"group{i % 7}/metric{i}" for i in range(60)]


def rows(step: int, count: int) -> list[RecordedRollout]:
    """Small rollouts, eight to a group."""
    chance = random.Random(step)
    found: list[RecordedRollout] = []
    for i in range(count):
        reward = float(chance.random() < 0.5)
        made = Rollout(
            group=GroupId(step=step, draw=i // 8, uid=f"u{i // 8}"),
            sample=i % 8,
            tokens=(2, 60, 3, 61, 62, 3),
            sources=(Source.PROMPT,) * 3 + (Source.SAMPLED,) * 3,
            turns=(0,) * 6,
            logps=(None,) * 3 + (-0.5,) * 3,
            versions=(None,) * 3 + (step,) * 3,
            stop=StopReason.ANSWERED if i % 11 else StopReason.TOKEN_BUDGET,
            text=f"the answer is {chance.randrange(10**6)}",
            score=Score(name="reward", value=reward),
        )
        advantages = (None,) * 3 + (reward - 0.5,) * 3
        found.append(RecordedRollout(rollout=made, advantages=advantages))
    return found


def make_run(root: Path, *, steps: int, names: list[str]) -> RunDirectory:
    """A run with metrics."""
    config = CONFIG.format(steps=steps)
    run = RunDirectory.create(root, config=config, provenance={}, manifest={})
    chance = random.Random(str(root))
    with run.metrics.open("w") as lines:
        for step in range(1, steps + 1):
            values = {"reward/mean": chance.random(), **{name: chance.random() for name in names}}
            if step % 50 == 1:
                values["val/accuracy"] = chance.random()
            lines.write(metrics_line(step, values))
    return run


def make_folder(root: Path, *, runs: int, steps: int, rollouts: int, points: int) -> None:
    """The whole folder."""
    for i in range(runs - 2):
        make_run(root / "small" / f"run{i}", steps=40, names=NAMES[:20])
    run = make_run(root / "large" / "run", steps=steps, names=NAMES)
    for i in range(VARIANTS):
        write_rollouts(run.rollouts(i + 1), rows(i + 1, rollouts), step=i + 1)
    for step in range(VARIANTS + 1, steps + 1):
        os.link(run.rollouts(1 + step % VARIANTS), run.rollouts(step))
    make_run(root / "large" / "points", steps=points, names=NAMES[:5])


def memory_mb(process: int) -> float:
    """Resident memory of a process."""
    text = Path(f"/proc/{process}/status").read_text()
    return int(text.partition("VmRSS:")[2].split()[0]) / 1024


def processor_s(process: int) -> float:
    """Processor time of a process and its threads so far, in seconds."""
    after = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(after[11]) + int(after[12])) / os.sysconf("SC_CLK_TCK")


def measure(root: Path) -> None:
    """Start the studio and time its answers."""
    command = [sys.executable, "-m", "luyen", "studio", str(root), "--no-open", "--port", "0"]
    begun = time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            line = server.stdout.readline()
            print(f"started after {time.monotonic() - begun:.2f} s")
            base, _, token = line.split()[-1].partition("/?token=")
            time_routes(base, token, server.pid)
        finally:
            server.terminate()


def time_routes(base: str, token: str, process: int) -> None:
    """Print the seconds of every route."""

    def get(path: str, label: str = "") -> Any:
        headers = {"Authorization": f"Bearer {token}"}
        request = urllib.request.Request(f"{base}/api/v1{path}", headers=headers)
        begun, spent = time.monotonic(), processor_s(process)
        with urllib.request.urlopen(request) as reply:
            value = json.load(reply)
        took, spent = time.monotonic() - begun, processor_s(process) - spent
        numbers = f"{took:7.3f} s  {spent:6.2f} s of the processor  {memory_mb(process):6.0f} MB"
        print(f"{numbers}  {label or path}", flush=True)
        return value

    get("/session")
    listed = get("/runs")
    while not listed["is_whole"]:
        listed = get("/runs", "/runs again, while the folder is read for the first time")
    ids = {row["path"]: row["id"] for row in listed["runs"]}
    large = f"/runs/{ids['large/run']}"
    for path in ("", "/metrics", "/series?name=reward/mean&name=group1/metric1", "/rollouts",
                 "/rollouts?sort=reward", "/rollouts?text=77777", "/rollouts/train/5/3",
                 "/rewards", "/parity", "/timeline", "/faults", "/plan", "/log"):  # fmt: skip
        get(large + path)
    points = f"/runs/{ids['large/points']}/series?name=reward/mean"
    while not get(points, "series of the run with many points")["is_whole"]:
        pass
    get(points, "the same again")
    page = get(f"{large}/rollouts")
    while page["indexed_steps"] < page["total_steps"]:
        time.sleep(5)
        page = get(f"{large}/rollouts", f"index: {page['indexed_steps']} steps")
    for query in ("reward_min=0.5", "stop=token+budget", "start=4000&end=4100", "sort=reward",
                  "sort=advantage&order=asc", "sort=length&reward_max=0", "group=5.3.u3",
                  "fault=any", "text=777", "text=no+such+text"):  # fmt: skip
        get(f"{large}/rollouts?{query}")
    get(f"/compare?id={ids['large/run']}&id={ids['small/run0']}")


def main() -> None:
    """Read the arguments, make the folder, measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--rollouts", type=int, default=512)
    parser.add_argument("--points", type=int, default=1_000_000)
    given = parser.parse_args()
    if not given.folder.exists():
        make_folder(given.folder, runs=given.runs, steps=given.steps, rollouts=given.rollouts,
                    points=given.points)  # fmt: skip
    measure(given.folder)


if __name__ == "__main__":
    main()
