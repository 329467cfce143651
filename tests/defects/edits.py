"""Defects planted in the files of a healthy run: what a broken part would have written there."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import yaml

from luyen.base.files import json_line, write_whole
from luyen.base.records import Rollout
from luyen.base.rundir import RunDirectory, step_of
from luyen.config.schema.model import ModelConfig
from luyen.studio.doctor.vocabulary import read_vocabulary
from luyen.telemetry.metrics import read_metrics
from luyen.telemetry.rollout_files import read_rollouts, write_rollouts

Values = Mapping[str, float]


def edit_metrics(root: Path, change: Callable[[int, Values], Values]) -> None:
    """Write over some values of each step: `change` gets the step and its values."""
    lines = read_metrics(root / "metrics.jsonl")
    made = [{"step": s.step, **s.values, **change(s.step, s.values)} for s in lines]
    write_whole(root / "metrics.jsonl", "".join(json_line(line) for line in made))


def grow(name: str, *, by: float, start: int = 10) -> Callable[[Path], None]:
    """From a step on, a metric is multiplied by a factor at every step."""

    def change(step: int, values: Values) -> Values:
        return {name: values[name] * by ** max(0, step - start)} if name in values else {}

    return lambda root: edit_metrics(root, change)


def put(name: str, value: float, *, start: int = 10) -> Callable[[Path], None]:
    """From a step on, a metric has one value."""
    return lambda root: edit_metrics(root, lambda s, v: {name: value} if s >= start else {})


def edit_rollouts(root: Path, change: Callable[[Rollout], Rollout]) -> None:
    """Write every rollout anew; advantages stay as long as the tokens do."""
    for path in sorted((root / "rollouts").iterdir()):
        assert step_of(path.name) is not None
        recorded = [replace(r, rollout=change(r.rollout)) for r in read_rollouts(path)]
        write_rollouts(path, recorded)


def longer_for_nothing(root: Path) -> None:
    """Answers double and double again while the reward falls."""

    def change(step: int, values: Values) -> Values:
        if "reward/mean" not in values:
            return {}
        length = values["response_length/mean"] * 1.15**step
        return {"response_length/mean": length, "reward/mean": values["reward/mean"] * 0.95**step}

    edit_metrics(root, change)


def hacked_reward(root: Path) -> None:
    """The training reward climbs, and held-out accuracy falls."""

    def change(step: int, values: Values) -> Values:
        found = {"reward/mean": min(1.0, 0.3 + 0.05 * step)} if "reward/mean" in values else {}
        if "val/accuracy" in values:
            low = 0.6 - 0.04 * step
            found |= {"val/accuracy": low + 0.05, "val/accuracy_low": low}
            found |= {"val/accuracy_high": low + 0.1}
        return found

    edit_metrics(root, change)


def slower(root: Path) -> None:
    """Steps of two seconds take ten percent longer each time."""

    def change(step: int, values: Values) -> Values:
        return {"time/step": 2.0 * 1.1**step, "time/tokens_per_s": 1000 / 1.1**step}

    edit_metrics(root, change)


def bare_prompts(root: Path) -> None:
    """Prompts without the markers of a chat template."""
    known = read_vocabulary(ModelConfig())
    assert known is not None
    plain = max(set(range(known.size)) - known.special)

    def change(rollout: Rollout) -> Rollout:
        tokens = [plain if t in known.special else t for t in rollout.tokens[:-1]]
        return replace(rollout, tokens=(*tokens, rollout.tokens[-1]))

    edit_rollouts(root, change)


def foreign_ids(root: Path) -> None:
    """Ids of another, larger vocabulary."""
    edit_rollouts(root, lambda r: replace(r, tokens=tuple(t + 1000 for t in r.tokens)))


def torn_rollouts(root: Path) -> None:
    """A file of rollouts lost its end."""
    path = max((root / "rollouts").iterdir())
    path.write_bytes(path.read_bytes()[:-100])


def idle_replicas(root: Path) -> None:
    """Replicas that may draw ahead, and have nothing to do for most of the time."""
    directory = RunDirectory(root)
    ahead = directory.read_config().replace("max_staleness: 0", "max_staleness: 1")
    directory.write_config(ahead, {})
    idle = {"role/rollout/busy": 0.1, "wait/rollout_idle": 9.0}
    busy = {"role/actor/busy": 0.9, "wait/actor_idle": 0.1}
    edit_metrics(root, lambda _step, _values: {**idle, **busy})


def all_cut_early(root: Path) -> None:
    """The run has three steps, in which every answer is cut off and scores 0."""
    metrics = RunDirectory(root).metrics
    metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:3]))
    alike = {"reward/min": 0.0, "reward/max": 0.0, "response_length/cut_fraction": 1.0}
    edit_metrics(root, lambda _step, _values: alike)


def biased(bias: float, *, first: float, temperature: float = 1.0) -> Callable[[Path], None]:
    """A sampler that is off by so much in the mean, and by `first` in the first step."""

    def plant(root: Path) -> None:
        directory = RunDirectory(root)
        config = yaml.safe_load(directory.read_config())
        config["actor_rollout_ref"]["rollout"]["temperature"] = temperature
        directory.write_config(yaml.safe_dump(config), {})

        def change(step: int, values: Values) -> Values:
            value = first if step <= 1 else bias
            gap = abs(value)
            names = ("parity/engine_mean", "parity/mean_gap")
            return {"rollout_corr/kl": value} | {n: gap for n in names if n in values}

        edit_metrics(root, change)

    return plant


EDITS: dict[str, tuple[str, Callable[[Path], None]]] = {
    "entropy falls to nothing": ("entropy-collapse", grow("actor/entropy", by=0.6)),
    "entropy climbs": ("entropy-blow-up", grow("actor/entropy", by=1.3)),
    "answers grow for nothing": ("length-explosion", longer_for_nothing),
    "all answers are cut": ("all-cut-and-alike", all_cut_early),
    "rewards begin to fail": ("rising-faults", put("reward/faults", 1.0)),
    "reward is hacked": ("reward-hacking", hacked_reward),
    "a loss is NaN": ("not-finite", put("actor/pg_loss", float("nan"), start=20)),
    "gradients overflow": ("skipped-updates", put("actor/skipped_updates", 1.0, start=22)),
    "learning rate is NaN": ("learning-rate", put("actor/lr", float("nan"))),
    "the policy leaves the reference": ("kl-runaway", put("actor/ref_kl", 3.0, start=18)),
    "one update leaps": ("kl-runaway", put("actor/ppo_kl", 0.4)),
    "value loss explodes": ("value-loss-explosion", grow("critic/vf_loss", by=1.5)),
    "the critic misleads": ("critic-worse-than-mean", put("critic/explained_variance", -0.8)),
    "no gradient": ("frozen-parameters", put("actor/grad_norm", 0.0)),
    "steps get slower": ("slowing-down", slower),
    "replicas have nothing to do": ("idle-role", idle_replicas),
    "no chat template": ("no-chat-template", bare_prompts),
    "ids of another vocabulary": ("vocabulary-mismatch", foreign_ids),
    "a torn file": ("unreadable-files", torn_rollouts),
    "log-probabilities before the temperature": (
        "logprob-convention",
        biased(-0.3, first=-0.3, temperature=0.7),
    ),
    "a temperature applied twice": (
        "temperature-twice",
        biased(0.25, first=0.2, temperature=0.7),
    ),
    "a server with the first weights": ("stale-server", biased(0.2, first=0.001)),
}
"""Defect -> the rule that names it, and how it is planted in the files of a run with a critic."""
