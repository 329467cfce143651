"""Slow tools: how much faster is a step when generation runs ahead of training?

The tool-calling recipe with a calculator whose calls take 0.2 to 2 s, and a tenth of them 5 s. Runs
follow each other in one process with the same seed: in turns, one and four steps ahead in order of
submission, and four ahead in order of completion. The runs in order of submission are made again
with other latencies, and must leave the same digests.

    python benchmarks/async_tools.py --steps 20
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from slow_calculator import LONGEST_S, SHORTEST_S, SLOW_S, SLOW_SHARE

from luyen.base.digests import read_digests
from luyen.base.process_setup import prepare_process
from luyen.config.check import check
from luyen.studio.timeline import read_processes
from luyen.telemetry.spans import SPANS
from luyen.train.loop import train_online
from luyen.train.start import prepare_online

HERE = Path(__file__).resolve().parent
RECIPE = HERE.parent / "recipes/tool_calling.yaml"
ROLLOUT = "actor_rollout_ref.rollout"
BAR = 1.6
TURNS, ONE, FOUR, WINDOW = "in turns", "1 ahead", "4 ahead", "4 ahead, as completed"
SIDES = {
    TURNS: ("trainer.max_staleness=0",),
    ONE: ("trainer.max_staleness=1",),
    FOUR: ("trainer.max_staleness=4",),
    WINDOW: ("trainer.max_staleness=4", "trainer.async_order=completion"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Took:
    """What a run took, in seconds per step."""

    whole: float
    """From the first request to the last update, over all steps: filling and draining included."""
    mean: float
    """After the warm-up."""
    median: float
    """After the warm-up; steps that run ahead may come in bursts, so it says less than the mean."""
    computing: float
    """Processor seconds of the whole process."""
    waiting: float
    """What the loop waited for rollouts."""
    reward: float
    """Mean reward of the last five steps."""


def train(folder: Path, words: tuple[str, ...], asked: argparse.Namespace, latencies: int) -> float:
    """A run to its end; the processor seconds it took."""
    tools = folder / "tools.yaml"
    entry = {"class_name": f"{HERE / 'slow_calculator.py'}:Calculator"}
    folder.mkdir()
    tools.write_text(json.dumps({"tools": [{**entry, "config": {"seed": latencies}}]}))
    report = check(
        [RECIPE],
        [
            f"data.train_batch_size={asked.prompts}",
            f"actor_rollout_ref.actor.ppo_mini_batch_size={asked.prompts}",
            f"{ROLLOUT}.n={asked.samples}",
            f"{ROLLOUT}.multi_turn.tool_config_path={tools}",
            "algorithm.rollout_correction.rollout_is=token",
            f"trainer.total_training_steps={asked.steps}",
            "trainer.val_before_train=false",
            "data.val_files=[]",
            "trainer.test_freq=-1",
            "trainer.logger=jsonl",
            f"trainer.seed={asked.seed}",
            f"trainer.default_local_dir={folder}",
            "trainer.project_name=slow",
            "trainer.experiment_name=run",
            *words,
        ],
    )
    assert report.is_sound, report.problems
    run = prepare_online(report)
    SPANS.open(run.recorder.directory.events, process="controller")
    before = time.process_time()
    try:
        train_online(run)
    finally:
        spent = time.process_time() - before
        for part in (run.recorder, run.reward, run.roles, SPANS):
            part.close()
    return spent


def took(root: Path, computing: float, warm_up: int) -> Took:
    """Seconds per step, from the spans and metrics that a run left."""
    spans = read_processes(root)[0].spans
    ends = [span.end for span in spans if span.name == "digest"]
    start = next(span.start for span in spans if span.name == "generate")
    steps = [b - a for a, b in zip([start, *ends], ends, strict=False)]
    lines = [json.loads(line) for line in (root / "metrics.jsonl").read_text().splitlines()]
    return Took(
        whole=(ends[-1] - start) / len(ends),
        mean=statistics.fmean(steps[warm_up:]),
        median=statistics.median(steps[warm_up:]),
        computing=computing / len(ends),
        waiting=statistics.fmean(line["time/generate"] for line in lines),
        reward=statistics.fmean(line["reward/mean"] for line in lines[-5:]),
    )


def chain(root: Path) -> list[str]:
    """The digests of every step, each over all before it."""
    return [digest.chain for digest in read_digests(root / "digests.jsonl")]


def measure(asked: argparse.Namespace) -> tuple[dict[str, Took], dict[str, bool]]:
    """Every side once, and whether other latencies left the same digests."""
    found: dict[str, Took] = {}
    repeats: dict[str, bool] = {}
    with tempfile.TemporaryDirectory() as name:
        for number, (side, words) in enumerate(SIDES.items()):
            folder = Path(name) / str(number)
            computing = train(folder, words, asked, latencies=0)
            found[side] = took(folder / "slow/run", computing, asked.warm_up)
            show(side, found[side], found[TURNS], asked)
            if side in (ONE, FOUR) and not asked.once:
                other = Path(name) / f"{number}-again"
                train(other, words, asked, latencies=1)
                repeats[side] = chain(folder / "slow/run") == chain(other / "slow/run")
                say(f"{side}: other latencies, same digests: {repeats[side]}", asked)
    return found, repeats


def show(side: str, one: Took, turns: Took, asked: argparse.Namespace) -> None:
    """A line for people."""
    say(
        f"{side:22s} {one.whole:6.2f} {turns.whole / one.whole:6.2f} {one.mean:6.2f}"
        f" {turns.mean / one.mean:6.2f} {one.median:7.2f} {one.computing:10.2f}"
        f" {one.waiting:8.2f} {one.reward:7.3f}",
        asked,
    )


def say(line: str, asked: argparse.Namespace) -> None:
    """Print it, unless only JSON is wanted."""
    if not asked.json:
        print(line, flush=True)


def main() -> None:
    """Run all sides and hold them against the bar."""
    words = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    words.add_argument("--steps", type=int, default=20)
    words.add_argument(
        "--warm-up", type=int, default=5, help="first steps that only `whole` counts"
    )
    words.add_argument("--prompts", type=int, default=8)
    words.add_argument("--samples", type=int, default=8)
    words.add_argument("--seed", type=int, default=0)
    words.add_argument("--once", action="store_true", help="do not repeat with other latencies")
    words.add_argument("--json", action="store_true")
    asked = words.parse_args()
    assert asked.steps > asked.warm_up, "nothing is left after the warm-up"
    prepare_process()
    load = os.getloadavg()
    say(
        f"{asked.prompts} x {asked.samples} conversations a step, {asked.steps} steps; a call takes"
        f" {SHORTEST_S} to {LONGEST_S} s, {SLOW_SHARE:.0%} of them {SLOW_S} s; load {load[0]:.1f}\n"
        "seconds per step        whole  ratio   mean  ratio  median  computing  waiting  reward",
        asked,
    )
    found, repeats = measure(asked)
    ratios = {side: found[TURNS].whole / one.whole for side, one in found.items()}
    is_met = all(ratios[side] >= BAR for side in (ONE, FOUR)) and all(repeats.values())
    if asked.json:
        sides = {side: {**asdict(one), "ratio": ratios[side]} for side, one in found.items()}
        tree = {"sides": sides, "same_digests": repeats, "bar": BAR, "is_met": is_met}
        print(json.dumps({**tree, "load": [load, os.getloadavg()]}))
    else:
        verdict = "met" if is_met else "MISSED"
        print(f"bar {BAR} at 1 and 4 ahead: {verdict}; load at the end {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
