"""What judging anew showed: means, orders, trade-offs, and the rollouts that moved most."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, final

from luyen.base.records import Prompt, Rollout, Score
from luyen.rewards.objectives import Objectives, correlation, objectives
from luyen.rewards.step import Scored, faults_in
from luyen.telemetry.record_trees import score_tree
from luyen.train.rescore.ranks import RankChange, rank_change


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Both:
    """A rollout with both rewards.

    Example:
        >>> Both(prompt=None, rollout=None, old=1.0, new=0.25).new
        0.25
    """

    prompt: Prompt
    """What was asked."""
    rollout: Rollout
    """The rollout."""
    old: float
    """Its reward in the run."""
    new: float
    """Its reward now."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Component:
    """One node of the tree over all rollouts, before and after; None where a side has none.

    Example:
        >>> Component(name="reward/exact", old=0.5, new=None, old_faults=0, new_faults=0).old
        0.5
    """

    name: str
    """Its path."""
    old: float | None
    """Mean in the run."""
    new: float | None
    """Mean now."""
    old_faults: int
    """Rollouts for which the run could not compute it."""
    new_faults: int
    """Rollouts for which it cannot be computed now."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """A rollout that changed its place among its siblings.

    Example:
        >>> both = Both(prompt=None, rollout=None, old=1.0, new=0.0)
        >>> Moved(both=both, places=3.0, of=4).places
        3.0
    """

    both: Both
    """The rollout with its rewards."""
    places: float
    """Places that it lost; below 0: that it won."""
    of: int
    """Rollouts that were compared."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Rescored:
    """Recorded rollouts with the scores of the run and those of another reward.

    Example:
        >>> Rescored(run="runs/a/b", steps=(1,), old=(), new=(), broken=0).changes()
        []
    """

    run: str
    """The run directory."""
    steps: tuple[int, ...]
    """Steps whose rollouts were judged."""
    old: tuple[Scored, ...]
    """The groups as the run had them."""
    new: tuple[Scored, ...]
    """The same groups, in the same order, as they are judged now."""
    broken: int
    """Rollouts that were never played to an end: nobody judged them, and nobody does."""

    @property
    def count(self) -> int:
        """Rollouts that were judged."""
        return sum(len(group.rollouts) for group in self.new)

    @property
    def faults(self) -> list[Rollout]:
        """Rollouts that could not be judged now."""
        return faults_in(self.new)

    def both(self) -> list[list[Both]]:
        """The rollouts of each group that have a reward on both sides."""
        pairs = zip(self.old, self.new, strict=True)
        return [list(_both(before, after)) for before, after in pairs]

    def changes(self) -> list[tuple[list[Both], RankChange]]:
        """The order of every group that has two rollouts or more to compare."""
        groups = [group for group in self.both() if len(group) > 1]
        return [(g, rank_change([b.old for b in g], [b.new for b in g])) for g in groups]

    def moved(self) -> list[Moved]:
        """Rollouts by how far they moved, the farthest first."""
        found = [
            Moved(both=both, places=places, of=len(group))
            for group, change in self.changes()
            for both, places in zip(group, change.moves, strict=True)
            if places
        ]
        return sorted(found, key=lambda one: (-abs(one.places) / one.of, one.both.rollout.key))

    def correlation(self) -> float | None:
        """Correlation of the two rewards over all rollouts that have both."""
        return correlation([(one.old, one.new) for group in self.both() for one in group])

    def components(self) -> list[Component]:
        """Every node of either tree, the whole reward first."""
        old, new = _nodes(self.old), _nodes(self.new)
        return [
            Component(
                name=name,
                old=_mean(old.get(name, [])),
                new=_mean(new.get(name, [])),
                old_faults=_lost(old.get(name, [])),
                new_faults=_lost(new.get(name, [])),
            )
            for name in dict.fromkeys([*old, *new])
        ]

    def objectives(self) -> tuple[Objectives, Objectives]:
        """How components stand to one another, before and after."""
        return objectives(self.old), objectives(self.new)

    def rows(self) -> Iterator[dict[str, Any]]:
        """Every rollout as plain data, for a file."""
        for before, after in zip(self.old, self.new, strict=True):
            for one, other in zip(before.rollouts, after.rollouts, strict=True):
                yield {
                    "group": str(one.group),
                    "sample": one.sample,
                    "data_source": before.prompt.data_source,
                    "prompt": [dict(message) for message in before.prompt.messages],
                    "answer": one.text,
                    "old": None if one.score is None else score_tree(one.score),
                    "new": None if other.score is None else score_tree(other.score),
                }


def _both(before: Scored, after: Scored) -> Iterator[Both]:
    for one, other in zip(before.rollouts, after.rollouts, strict=True):
        old, new = _value(one), _value(other)
        if old is not None and new is not None:
            yield Both(prompt=before.prompt, rollout=one, old=old, new=new)


def _value(rollout: Rollout) -> float | None:
    return None if rollout.score is None else rollout.score.value


def _nodes(scored: Sequence[Scored]) -> dict[str, list[float | None]]:
    """What every node of the trees was worth, by its path."""
    found: dict[str, list[float | None]] = {}
    trees: list[Score] = [score for group in scored for score in group.scores]
    for tree in trees:
        for path, value in tree.flat().items():
            found.setdefault(path, []).append(value)
    return found


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def _lost(values: Sequence[float | None]) -> int:
    return sum(value is None for value in values)
