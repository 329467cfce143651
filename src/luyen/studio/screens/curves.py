"""Curves of metrics, with 95 % intervals of the mean reward and of validations.

Those of validations were recorded, those of the reward come from the recorded rollouts.
Rollouts of a prompt resemble each other, so the interval of a step comes from the spread of the
means of its groups, not from that of single rollouts.
"""

import math
from typing import Any

import numpy as np

from luyen.studio.screens.folder import KnownRun, Refusal
from luyen.studio.screens.metric_table import Curve, MetricColumns
from luyen.studio.screens.rollout_index import Array, RolloutIndex, StepFile
from luyen.studio.screens.server_cache import Studio

MOST_POINTS, MOST_SERIES = 4000, 64
_Z = 1.959963984540054
_LEAST_GROUPS = 8
"""With fewer groups their spread says little."""
_MOST_ROLLOUTS = 1_000_000
_OF_ROLLOUTS = "reward/mean"
_RECORDED = ("val/accuracy_low", "val/accuracy_high")


def metric_series(
    studio: Studio,
    run_id: str,
    names: list[str],
    *,
    points: int,
    start: int | None,
    end: int | None,
) -> dict[str, Any]:
    """Curves of some metrics, each in at most `points` buckets, with intervals where known."""
    if len(names) > MOST_SERIES:
        raise Refusal(422, f"at most {MOST_SERIES} metrics at once", field="name")
    known = studio.run(run_id)
    table = studio.table(known)
    most = min(max(points, 2), MOST_POINTS)
    found = {name: table.curve(name, points=most, start=start, end=end) for name in names}
    series, is_pending = _series_json(studio, known, table, found)
    return {
        "series": series,
        "pending": is_pending,
        "is_whole": table.is_whole,
        "steps": table.last_step,
    }


def _series_json(
    studio: Studio, known: KnownRun, table: MetricColumns, curves: dict[str, Curve]
) -> tuple[dict[str, Any], bool]:
    """Curves as JSON, and whether intervals are still being read.

    Where each point of a curve is one step, `low` and `high` of the mean reward and of the
    accuracy of validations are their interval, and `interval` is true.
    """
    found = {name: {**curve._asdict(), "interval": False} for name, curve in curves.items()}
    is_pending = False
    reward = curves.get(_OF_ROLLOUTS)
    if reward is not None and reward.step and reward.low == reward.high:
        index = studio.rollouts(known, "train")
        is_pending = index.indexed_steps < len(index.steps)
        found[_OF_ROLLOUTS] |= _of_rollouts(index, reward)
    accuracy = curves.get("val/accuracy")
    if accuracy is not None and accuracy.low == accuracy.high:
        found["val/accuracy"] |= _as_recorded(table, accuracy)
    return found, is_pending


def _as_recorded(table: MetricColumns, curve: Curve) -> dict[str, Any]:
    if not curve.step:
        return {}
    span = {"points": len(curve.step), "start": curve.step[0], "end": curve.step[-1]}
    low, high = (table.curve(name, **span) for name in _RECORDED)
    if low.step != curve.step or high.step != curve.step:
        return {}
    return {"low": low.value, "high": high.value, "interval": True}


def _of_rollouts(index: RolloutIndex, curve: Curve) -> dict[str, Any]:
    low: list[float | None] = []
    high: list[float | None] = []
    seen = 0
    for step, value in zip(curve.step, curve.value, strict=True):
        file = index.file(step)
        half = None
        if file is not None and value is not None and seen < _MOST_ROLLOUTS:
            seen += file.count
            half = _half_width_of(index, step, file)
        low.append(None if half is None or value is None else value - half)
        high.append(None if half is None or value is None else value + half)
    return {} if low.count(None) == len(low) else {"low": low, "high": high, "interval": True}


def _half_width_of(index: RolloutIndex, step: int, file: StepFile) -> float | None:
    """That of a step, computed once: a run that goes on is asked for it every few seconds."""
    known = index.half_widths.get(step)
    if known is None or known[0] is not file:
        part = index.part(step)
        half = None if part is None else half_width(part["draw"], part["reward"])
        known = index.half_widths[step] = file, half
    return known[1]


def half_width(groups: Array, rewards: Array) -> float | None:
    """Half of the 95 % interval of the mean of rewards in groups; None for too few groups.

    Example:
        >>> round(half_width(np.arange(16) // 2, np.array([0.0, 0.0, 1.0, 1.0] * 4)), 4)
        0.3704
    """
    known = np.isfinite(rewards)
    if not known.any():
        return None
    _, places = np.unique(groups[known], return_inverse=True)
    counts = np.bincount(places)
    if len(counts) < _LEAST_GROUPS:
        return None
    means = np.bincount(places, weights=rewards[known].astype(float)) / counts
    return _Z * float(means.std(ddof=1)) / math.sqrt(len(counts))
