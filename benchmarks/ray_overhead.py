"""What a step on Ray takes besides generation, scoring and gradients: two ranks, two replicas.

A step is everything from one request for rollouts to the next: validations and checkpoints are left
out. From the timelines of all processes: while some replica draws it is generation, while some rank
passes over the batch it is gradients, while the controller scores it is scoring. Everything else is
overhead, and is held against the bar: nothing of it is anybody's work but the runtime's. It is

- `hand-over`: ranks gather or digest weights, or replicas load or confirm them;
- `controller`: nobody else does anything, and the controller does not wait;
- `messages`: nobody does anything; a message is on its way.

    python benchmarks/ray_overhead.py --steps 40
    python benchmarks/ray_overhead.py --steps 10 --hidden 512 --layers 8
    python benchmarks/ray_overhead.py --steps 6 --hidden 512 --layers 8 --response 32
    python benchmarks/ray_overhead.py --steps 12 --recipe tool_calling
"""

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

from luyen.base.process_setup import prepare_process
from luyen.config.check import check
from luyen.studio.timeline import (
    WAIT,
    Interval,
    TimedSpan,
    overlap,
    read_processes,
    seconds,
    union,
    without,
)
from luyen.train.start import run_training

RECIPES = Path(__file__).resolve().parent.parent / "recipes"
BAR = 0.05
WARM_UP = 3
"""First steps that are left out: imports, compilers and caches."""
DRAWING = ("draw",)
SCORED = ("actor", "reference", "teacher", "critic")
PASSES = ("update_actor", "update_critic", *(f"{role}_scores" for role in SCORED))
HANDING_OVER = ("publish", "sums", "weight_sums", "load weights", "confirm weights")


def train(folder: Path, asked: argparse.Namespace) -> Path:
    """A run to its end; its directory."""
    words = [
        f"trainer.total_training_steps={asked.steps}",
        "trainer.n_gpus_per_node=2",
        "actor_rollout_ref.rollout.data_parallel_size=2",
        "trainer.val_before_train=false",
        "data.val_files=[]",
        "trainer.test_freq=-1",
        "trainer.logger=jsonl",
        f"trainer.default_local_dir={folder}",
        "trainer.project_name=overhead",
        "trainer.experiment_name=run",
    ]
    words += larger(asked.hidden, asked.layers) if asked.hidden else []
    words += [f"data.max_response_length={asked.response}"] if asked.response else []
    report = check([RECIPES / f"{asked.recipe}.yaml"], words)
    assert report.is_sound, report.problems
    run_training(report)
    return folder / "overhead/run"


def larger(hidden: int, layers: int) -> list[str]:
    """A model of another size: fresh weights, and a reward in which random answers differ."""
    shape = f"hidden_size: {hidden}, intermediate_size: {4 * hidden}, num_hidden_layers: {layers}"
    heads = f"num_attention_heads: {hidden // 64}, num_key_value_heads: {hidden // 64}"
    return [
        "actor_rollout_ref.model.init=random",
        f"actor_rollout_ref.model.override_config={{{shape}, {heads}, head_dim: 64}}",
        "reward.components={digit: {rule: regex, kwargs: {pattern: '[0-4]', match: search}}}",
    ]


def parts_of(
    step: Interval, controller: Sequence[TimedSpan], others: Sequence[TimedSpan]
) -> dict[str, float]:
    """Seconds of one step by what they were spent on."""

    def during(spans: Sequence[TimedSpan], *names: str) -> list[Interval]:
        return overlap([step], union(span.interval for span in spans if span.name in names))

    kinds = {
        "generation": during(others, *DRAWING),
        "gradients": during(others, *PASSES),
        "scoring": during(controller, "score"),
    }
    left = without([step], union(one for kind in kinds.values() for one in kind))
    handing = overlap(left, during(others, *HANDING_OVER))
    waits = union(span.interval for span in controller if span.name.startswith(WAIT))
    quiet = without(left, handing)
    return {
        "step": step[1] - step[0],
        **{name: seconds(kind) for name, kind in kinds.items()},
        "overhead": seconds(left),
        "hand-over": seconds(handing),
        "controller": seconds(without(quiet, waits)),
        "messages": seconds(overlap(quiet, waits)),
    }


def measured(root: Path) -> list[dict[str, float]]:
    """The parts of every step after the warm-up."""
    controller, *others = (process.spans for process in read_processes(root))
    begins: dict[int, float] = {}
    for span in controller:
        if span.name == "generate" and span.step is not None:
            begins.setdefault(span.step, span.start)
    judged = {span.step for span in controller if span.name == "validate"}
    elsewhere = [span for spans in others for span in spans]
    return [
        parts_of((begins[number], begins[number + 1]), controller, elsewhere)
        for number in sorted(begins.keys() - judged)[WARM_UP:-1]
    ]


def main() -> None:
    """Run, and hold the overhead against the bar."""
    words = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    words.add_argument("--steps", type=int, default=40)
    words.add_argument("--recipe", default="quickstart", help="whose workload it is")
    words.add_argument("--hidden", type=int, default=0, help="a larger model, with fresh weights")
    words.add_argument("--layers", type=int, default=8, help="its layers")
    words.add_argument("--response", type=int, default=0, help="tokens of an answer, at most")
    words.add_argument("--run", type=Path, help="a run that is there already, instead of a new one")
    words.add_argument("--json", action="store_true")
    asked = words.parse_args()
    os.environ.setdefault("RAY_ADDRESS", "local")
    prepare_process()
    load = os.getloadavg()
    with tempfile.TemporaryDirectory() as name:
        steps = measured(asked.run or train(Path(name), asked))
    whole = sum(one["step"] for one in steps)
    shares = {name: sum(one[name] for one in steps) / whole for name in steps[0]}
    share = shares["overhead"]
    median = statistics.median(one["overhead"] / one["step"] for one in steps)
    tree = {
        "steps": len(steps),
        "ms_per_step": {
            name: 1e3 * sum(one[name] for one in steps) / len(steps) for name in shares
        },
        "overhead": share,
        "overhead_of_the_median_step": median,
        "bar": BAR,
        "load": [load, os.getloadavg()],
    }
    if asked.json:
        print(json.dumps(tree))
        return
    for name, part in shares.items():
        print(f"{name:12s} {tree['ms_per_step'][name]:8.1f} ms {part:7.2%}")
    print(
        f"overhead of {len(steps)} steps: {share:.2%}, of the median step {median:.2%} (bar"
        f" {BAR:.0%}: {'met' if share < BAR else 'MISSED'}); load {load[0]:.1f} to"
        f" {os.getloadavg()[0]:.1f}"
    )


if __name__ == "__main__":
    main()
