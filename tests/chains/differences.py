"""The first difference between the run directories that two trees left, read from plain JSON.

The digests of every step must be equal, stage by stage, and so must the metrics that do not depend
on the clock or on memory. Nothing of `luyen` is imported: it would be that of one tree.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

RENAMED: Mapping[str, str] = {}
"""Metrics that have another name in the new tree: old name to new name."""
NOT_COMPARED = ("time/", "role/", "wait/", "publish/", "judging/")
"""How metrics begin that depend on the clock, on memory, or on where the roles of a run are."""
HASHES_NAMES = ("gradients", "metrics")
"""Stages whose digests hold names of metrics. A step with a renamed one has other digests there,
and another chain; its metrics, `weights` and the other stages are compared all the same."""
_NO_METRICS = ("step", "check")

Lines = dict[int, dict[str, Any]]


def run_directories(folder: Path) -> list[str]:
    """The run directories below a folder that `luyen train` was called in."""
    found = (path.parent for path in (folder / "runs").rglob("digests.jsonl"))
    return sorted(str(path.relative_to(folder)) for path in found)


def read_steps(path: Path) -> Lines:
    """The lines of a JSONL file, by their step."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return {line["step"]: line for line in lines}


def metrics_of(line: Mapping[str, Any]) -> dict[str, float]:
    """The metrics of a line that are compared."""
    taken = {name: value for name, value in line.items() if name not in _NO_METRICS}
    return {n: float(v) for n, v in taken.items() if not n.startswith(NOT_COMPARED)}


def first_difference(old: Path, new: Path, renamed: Mapping[str, str] = RENAMED) -> str | None:
    """Where two folders with the same runs first differ; None where they are equal."""
    names = run_directories(old)
    if names != run_directories(new):
        return f"run directories: old {names}, new {run_directories(new)}"
    found = (text for name in names for text in _differences(old / name, new / name, renamed))
    return next(found, None)


def _differences(old: Path, new: Path, renamed: Mapping[str, str]) -> Iterator[str]:
    """The differences between two run directories, in the order of steps."""
    metrics = [read_steps(root / "metrics.jsonl") for root in (old, new)]
    digests = [read_steps(root / "digests.jsonl") for root in (old, new)]
    for kind, (before, after) in (("metrics", metrics), ("digests", digests)):
        if list(before) != list(after):
            yield f"{old.name}: steps in {kind}.jsonl: old {list(before)}, new {list(after)}"
    for step in sorted({*metrics[0], *digests[0]}):
        values = [metrics_of(lines.get(step, {})) for lines in metrics]
        has_renamed = any(name in renamed for name in values[0])
        lines = [digests_of.get(step, {}) for digests_of in digests]
        # A stage comes before those that follow from it; metrics tell more than their digest.
        texts = [*_stages(lines, has_renamed), *_metrics(values, renamed)]
        texts += [] if has_renamed else _chain(lines)
        yield from (f"{old.name}, step {step}: {text}" for text in texts)


def _stages(lines: list[dict[str, Any]], has_renamed: bool) -> Iterator[str]:
    before, after = (line.get("stages", {}) for line in lines)
    order = ("prompts", "rollouts", "rewards", "advantages", "gradients", "weights")
    names = sorted({*before, *after} - {"metrics"}, key=lambda n: (*order, n).index(n))
    for name in names:
        is_left_out = has_renamed and name in HASHES_NAMES
        if not is_left_out and before.get(name) != after.get(name):
            yield f"digest of {name}: old {_short(before, name)}, new {_short(after, name)}"


def _short(stages: Mapping[str, str], name: str) -> str:
    return stages[name][:12] if name in stages else "has none"


def _metrics(values: list[dict[str, float]], renamed: Mapping[str, str]) -> Iterator[str]:
    before = {renamed.get(name, name): value for name, value in values[0].items()}
    after = values[1]
    for name in sorted({*before, *after}):
        # As text NaN equals NaN, and -0.0 is not 0.0.
        texts = [repr(side[name]) if name in side else "has none" for side in (before, after)]
        if texts[0] != texts[1]:
            yield f"metric {name}: old {texts[0]}, new {texts[1]}"


def _chain(lines: list[dict[str, Any]]) -> Iterator[str]:
    """What the stages and metrics above cannot show: the digest of metrics, and the chain."""
    digests = [line.get("stages", {}).get("metrics") for line in lines]
    if digests[0] != digests[1]:
        yield f"digest of metrics: old {digests[0]}, new {digests[1]}"
    chains = [(line.get("previous"), line.get("chain")) for line in lines]
    if chains[0] != chains[1]:
        yield f"chain: old {chains[0][1]}, new {chains[1][1]}"
