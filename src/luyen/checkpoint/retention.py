"""Which checkpoints stay: the newest, and the best by a metric."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, final

METRICS = "metrics"
"""The fact of a checkpoint that holds the last known value of each metric."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Best:
    """How many of the best stay, and what makes one better.

    Example:
        >>> Best(count=1, metric="val/accuracy", mode="max").count
        1
    """

    count: int
    """How many stay."""
    metric: str
    """Name of the metric that is compared."""
    mode: Literal["max", "min"]
    """Which end of it is better."""


def to_retire(
    facts: Mapping[int, Mapping[str, Any]], *, keep: int, best: Best | None
) -> tuple[int, ...]:
    """Steps whose checkpoints go, by what was noted beside each; of equals the newer is better.

    Example:
        >>> facts = {step: {"metrics": {"loss": loss}} for step, loss in enumerate([3, 1, 2, 4])}
        >>> to_retire(facts, keep=1, best=Best(count=1, metric="loss", mode="min"))
        (0, 2)
    """
    steps = sorted(facts)
    stay = set(steps[-keep:])
    if best is not None and best.count:
        sign = 1.0 if best.mode == "max" else -1.0
        known = {step: value_of(facts[step], best.metric) for step in steps}
        ranked = [(sign * value, step) for step, value in known.items() if value is not None]
        stay |= {step for _, step in sorted(ranked)[-best.count :]}
    return tuple(step for step in steps if step not in stay)


def value_of(facts: Mapping[str, Any], metric: str) -> float | None:
    """A metric of a checkpoint; None when it was not known, or is no number one can compare."""
    found = facts.get(METRICS, {}).get(metric)
    value = float(found) if isinstance(found, float | int | str) else math.nan
    return value if math.isfinite(value) else None
