"""What the controller adds to a step on Ray: two ranks, two replicas, the quickstart.

A step is everything from one request for rollouts to the next: validations and checkpoints are left
out. Of it, waiting for replicas is generation, waiting for ranks in the update is gradients, and
scoring is scoring. What is left is overhead:

- `own`: the controller's time outside of waiting and scoring. This is held against the bar.
- `publication` and `digests`: waiting for ranks and replicas while weights are published, and while
  ranks digest what they hold. They are given beside it.

    python benchmarks/ray_overhead.py --steps 40
    python benchmarks/ray_overhead.py --steps 10 --hidden 512 --layers 8
"""

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

from luyen.base.exactness import prepare_process
from luyen.config.check import check
from luyen.studio.timeline.intervals import Interval, overlap, seconds, union, without
from luyen.studio.timeline.read import WAIT, TimedSpan, read_processes
from luyen.telemetry.metrics_file import read_metrics
from luyen.train.start import run_training

RECIPE = Path(__file__).resolve().parent.parent / "recipes/quickstart.yaml"
BAR = 0.05
WARM_UP = 3
"""First steps that are left out: imports, compilers and caches."""
PHASES = ("generate", "score", "log-probs", "update", "digest")


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
    report = check([RECIPE], words + (larger(asked.hidden, asked.layers) if asked.hidden else []))
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


def parts_of(step: Interval, spans: Sequence[TimedSpan]) -> dict[str, float]:
    """Seconds of one step by what they were spent on."""
    inside = [span for span in spans if step[0] <= span.start < step[1]]
    waits = union(span.interval for span in inside if span.name.startswith(WAIT))

    def during(*names: str) -> list[Interval]:
        return union(span.interval for span in inside if span.name in names)

    def waited(*names: str) -> float:
        return seconds(overlap(waits, during(*names)))

    scoring = seconds(without(during("score"), waits))
    own = {f"own, {name}": seconds(without(during(name), waits)) for name in PHASES}
    del own["own, score"]
    between = seconds(without([step], union([*during(*PHASES), *waits])))
    return {
        "step": step[1] - step[0],
        "scoring": scoring,
        "generation and publication": waited("generate"),
        "gradients": waited("update", "log-probs"),
        "digests": waited("digest"),
        **own,
        "own, between": between,
        "own": sum(own.values()) + between,
    }


def measured(root: Path) -> list[dict[str, float]]:
    """The parts of every step after the warm-up."""
    spans = read_processes(root)[0].spans
    begins: dict[int, float] = {}
    for span in spans:
        if span.name == "generate" and span.step is not None:
            begins.setdefault(span.step, span.start)
    published = {
        line.step: line.values.get("time/publish", 0.0)
        for line in read_metrics(root / "metrics.jsonl")
    }
    found: list[dict[str, float]] = []
    judged = {span.step for span in spans if span.name == "validate"}
    for number in sorted(begins.keys() - judged)[WARM_UP:-1]:
        parts = parts_of((begins[number], begins[number + 1]), spans)
        both = parts.pop("generation and publication")
        found.append(
            {**parts, "publication": published[number], "generation": both - published[number]}
        )
    return found


def main() -> None:
    """Run, and hold the controller's share against the bar."""
    words = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    words.add_argument("--steps", type=int, default=40)
    words.add_argument("--hidden", type=int, default=0, help="a larger model, with fresh weights")
    words.add_argument("--layers", type=int, default=8, help="its layers")
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
    share = shares["own"]
    median = statistics.median(one["own"] / one["step"] for one in steps)
    tree = {
        "steps": len(steps),
        "ms_per_step": {
            name: 1e3 * sum(one[name] for one in steps) / len(steps) for name in shares
        },
        "own_share": share,
        "own_share_of_the_median_step": median,
        "with_publication_and_digests": share + shares["publication"] + shares["digests"],
        "bar": BAR,
        "load": [load, os.getloadavg()],
    }
    if asked.json:
        print(json.dumps(tree))
        return
    for name, part in sorted(shares.items(), key=lambda pair: -pair[1]):
        print(f"{name:20s} {tree['ms_per_step'][name]:8.1f} ms {part:7.2%}")
    print(
        f"the controller's own share of {len(steps)} steps: {share:.2%}, of the median step"
        f" {median:.2%} (bar {BAR:.0%}: {'met' if share < BAR else 'MISSED'}); with publication and"
        f" digests {tree['with_publication_and_digests']:.2%}; load {load[0]:.1f} to"
        f" {os.getloadavg()[0]:.1f}"
    )


if __name__ == "__main__":
    main()
