"""Metrics of a step's scores, and the trade-offs between reward components that a sum hides."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean, pstdev
from typing import TypeVar, final

from luyen.base.records import Score
from luyen.rewards.scoring import ScoredGroup, faults_in
from luyen.telemetry.metrics import metric

# Correlations between reward components: trade-offs that their sum hides.

_K = TypeVar("_K")

metric(
    "reward/pareto_fraction",
    doc="Share of a group's rollouts that no sibling surpasses in every component.",
)
metric("reward/conflict", doc="Lowest correlation between two components; below 0 they conflict.")
metric(
    "reward/<component...>/correlation",
    doc="Correlation of a component as judged with the whole reward, over all rollouts.",
)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Objectives:
    """What the components of many rollouts say about one another.

    Example:
        >>> Objectives(means={"right": 0.5}, with_total={}, with_other={}, front=None).means
        {'right': 0.5}
    """

    means: Mapping[str, float]
    """Mean of each raw component."""
    with_total: Mapping[str, float]
    """Correlation of each with the whole reward; left out where one of the two never differs."""
    with_other: Mapping[tuple[str, str], float]
    """Correlation of each two, more of either being better."""
    front: float | None
    """Mean share of a group on its Pareto front; None where nothing can be compared."""

    def metrics(self) -> dict[str, float]:
        """As numbers of a step; a single component has nothing to be compared with."""
        if len(self.means) < 2:
            return {}
        found = {f"reward/{name}/correlation": value for name, value in self.with_total.items()}
        if self.with_other:
            found["reward/conflict"] = min(self.with_other.values())
        return found if self.front is None else {**found, "reward/pareto_fraction": self.front}


def objectives(scored: Sequence[ScoredGroup]) -> Objectives:
    """How the components of all rollouts with a score stand to one another and to the whole.

    A raw component is its value before it was scaled, clipped or normalised; a negative
    weight or scale turns it around, and both together do not. One of weight 0 is no objective.
    """
    groups = [[s for s in group.scores if s.value is not None] for group in scored]
    rows = [component_values(score) for group in groups for score in group]
    totals = [score.value or 0.0 for group in groups for score in group]
    names = list(dict.fromkeys(name for row in rows for name in row))
    columns = {
        name: [(row[name], total) for row, total in zip(rows, totals, strict=True) if name in row]
        for name in names
    }
    pairs = {
        (one, other): [(row[one], row[other]) for row in rows if one in row and other in row]
        for one, other in combinations(names, 2)
    }
    fronts = [share for group in groups for share in _front(group)]
    return Objectives(
        means={name: fmean(value for value, _ in some) for name, some in columns.items()},
        with_total=_correlated(columns),
        with_other=_correlated(pairs),
        front=fmean(fronts) if fronts else None,
    )


def component_values(score: Score) -> dict[str, float]:
    """The raw score of each component of a tree, oriented so that more is better."""
    found: dict[str, float] = {}
    for part in score.parts:
        value = part.value if part.raw is None else part.raw
        if value is not None and part.weight:
            found[part.name] = value if (part.weight < 0) == part.turned else -value
    return found


def correlation(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Pearson's correlation; None for fewer than two pairs, or where a side never differs.

    Example:
        >>> correlation([(0.0, 1.0), (1.0, 0.0), (0.0, 1.0)])
        -1.0
    """
    if len(pairs) < 2:
        return None
    xs, ys = (_centred([pair[side] for pair in pairs]) for side in (0, 1))
    scale = math.sqrt(math.fsum(x * x for x in xs)) * math.sqrt(math.fsum(y * y for y in ys))
    if not scale:
        return None
    found = math.fsum(x * y for x, y in zip(xs, ys, strict=True)) / scale
    return max(-1.0, min(1.0, round(found, 12)))


def surpasses(one: Mapping[str, float], other: Mapping[str, float]) -> bool:
    """Whether one is at least as good in every component, and better in some.

    Example:
        >>> surpasses({"right": 1.0, "brief": 0.0}, {"right": 0.0, "brief": 0.0})
        True
    """
    no_worse = all(one[name] >= other[name] for name in other)
    return no_worse and any(one[name] > other[name] for name in other)


def _front(group: Sequence[Score]) -> Iterator[float]:
    """The share of a group on its front, if its rollouts have two components or more to compare."""
    rows = [component_values(score) for score in group]
    if len(rows) < 2 or len(rows[0]) < 2 or any(row.keys() != rows[0].keys() for row in rows):
        return
    yield fmean(not any(surpasses(other, row) for other in rows) for row in rows)


def _centred(values: Sequence[float]) -> list[float]:
    top = max(values)
    mean = math.fsum(value - top for value in values) / len(values)
    return [value - top - mean for value in values]


def _correlated(columns: Mapping[_K, Sequence[tuple[float, float]]]) -> dict[_K, float]:
    found = {key: correlation(pairs) for key, pairs in columns.items()}
    return {key: value for key, value in found.items() if value is not None}


metric(
    "reward/<component...>/raw_mean",
    doc="Mean of a component as judged, where it was scaled, clipped or normalised.",
)
metric(
    "reward/<component...>/gated_fraction",
    doc="Share of the rollouts for which a gate was closed, so that the component was not judged.",
)
metric("time/reward/<component...>", unit="s", doc="Seconds spent on judging one component.")


def score_metrics(scored: Sequence[ScoredGroup]) -> dict[str, float]:
    """Mean, spread and range of the reward, and what can be said of every component.

    A component's mean is that of its value in the tree, gated ones included.
    """
    nodes: dict[str, list[Score]] = {}
    for score in (score for group in scored for score in group.scores):
        for path, node in _walk(score):
            nodes.setdefault(path, []).append(node)
    found: dict[str, float] = {}
    for path, some in sorted(nodes.items()):
        found |= _component(path, some)
    top = [node.value for node in nodes.get("reward", []) if node.value is not None]
    if top:
        found |= {"reward/std": pstdev(top), "reward/min": min(top), "reward/max": max(top)}
    found["reward/faults"] = float(len(faults_in(scored)))
    spent = [s for group in scored for s in group.seconds if s is not None]
    return found | objectives(scored).metrics() | {"time/reward": sum(spent)}


def _component(path: str, nodes: Sequence[Score]) -> Iterator[tuple[str, float]]:
    values = [node.value for node in nodes if node.value is not None]
    if values:
        yield f"{path}/mean", fmean(values)
    lost = sum(node.value is None for node in nodes)
    if lost:
        yield f"{path}/faults", float(lost)
    if any(node.gated for node in nodes):
        yield f"{path}/gated_fraction", fmean(node.gated for node in nodes)
    scored = [node for node in nodes if not node.gated and node.value is not None]
    raws = [node.value if node.raw is None else node.raw for node in scored]
    if any(node.raw is not None for node in scored):
        yield f"{path}/raw_mean", fmean(value for value in raws if value is not None)
    seconds = [node.seconds for node in nodes if node.seconds is not None]
    if seconds:
        yield f"time/{path}", sum(seconds)


def _walk(score: Score, above: str = "") -> Iterator[tuple[str, Score]]:
    """Every node of a tree by its path."""
    path = f"{above}{score.name}"
    yield path, score
    for part in score.parts:
        yield from _walk(part, f"{path}/")
