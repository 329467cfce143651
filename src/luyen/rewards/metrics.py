"""The numbers of a step about its scores."""

from collections.abc import Iterator, Sequence
from statistics import fmean, pstdev

from luyen.base.records import Score
from luyen.rewards.objectives import objectives
from luyen.rewards.step import Scored, faults_in
from luyen.telemetry.catalog import metric

metric(
    "reward/<component...>/raw_mean",
    doc="Mean of a component as judged, where it was scaled, clipped or normalised.",
)
metric(
    "reward/<component...>/gated_fraction",
    doc="Share of the rollouts for which a gate was closed, so that the component was not judged.",
)
metric("time/reward/<component...>", unit="s", doc="Seconds spent on judging one component.")


def score_metrics(scored: Sequence[Scored]) -> dict[str, float]:
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
    asked = [node for node in nodes if not node.gated and node.value is not None]
    raws = [node.value if node.raw is None else node.raw for node in asked]
    if any(node.raw is not None for node in asked):
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
