"""Results of a rescore: means, rank changes inside groups, rollouts that moved most."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean
from typing import Any, final

from luyen.base.records import Prompt, Rollout, Score
from luyen.rewards.metrics import Objectives, correlation, objectives
from luyen.rewards.scoring import ScoredGroup, faults_in
from luyen.telemetry.rollout_codec import score_tree

# Rank changes inside a group between two rewards.

_SMALL = 1e-9
"""Relative difference below which two rewards count as equal: the order of additions makes it."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RankChange:
    """The order of one group, before and after.

    Example:
        >>> rank_change([1.0, 0.0, 0.0], [0.0, 1.0, 0.0])
        RankChange(tau=-0.5, has_other_best=True, moves=(1.5, -1.5, 0.0))
    """

    tau: float | None
    """Kendall's tau-b; None where one of the two rewards is constant."""
    has_other_best: bool
    """Whether none of the previously best rollouts is still best."""
    moves: tuple[float, ...]
    """Ranks that each rollout lost (negative: gained); ties share their mean rank."""


def rank_change(old: Sequence[float], new: Sequence[float]) -> RankChange:
    """Compare two rewards of the same rollouts."""
    assert len(old) == len(new), f"{len(old)} old rewards and {len(new)} new ones"
    places = zip(_places(old), _places(new), strict=True)
    return RankChange(
        tau=kendall_tau(old, new),
        has_other_best=not (_best(old) & _best(new)),
        moves=tuple(after - before for before, after in places),
    )


def kendall_tau(one: Sequence[float], other: Sequence[float]) -> float | None:
    """Kendall's tau-b: 1 for the same order, -1 for the opposite one; ties count on neither side.

    None where a side never differs, or for fewer than two.

    Example:
        >>> kendall_tau([1.0, 2.0, 3.0], [10.0, 30.0, 20.0])
        0.3333333333333333
    """
    balance = untied_one = untied_other = 0
    for i, j in combinations(range(len(one)), 2):
        a, b = _sign(one[i], one[j]), _sign(other[i], other[j])
        balance += a * b
        untied_one += a * a
        untied_other += b * b
    scale = math.sqrt(untied_one * untied_other)
    return balance / scale if scale else None


def _sign(a: float, b: float) -> int:
    return 0 if math.isclose(a, b, rel_tol=_SMALL, abs_tol=_SMALL) else 1 if a > b else -1


def _best(values: Sequence[float]) -> set[int]:
    top = max(values)
    return {i for i, value in enumerate(values) if _sign(top, value) == 0}


def _places(values: Sequence[float]) -> list[float]:
    """The rank of each value, best first; ties share their mean rank."""
    return [1.0 + sum((_sign(other, value) + 1) / 2 for other in values) - 0.5 for value in values]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RescoredRollout:
    """A rollout with both rewards.

    Example:
        >>> RescoredRollout(prompt=None, rollout=None, old=1.0, new=0.25).new
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
class ComponentChange:
    """One node of the tree over all rollouts, before and after; None where a side has none.

    Example:
        >>> ComponentChange(name="reward/exact", old=0.5, new=None, old_faults=0, new_faults=0).old
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
class RankMove:
    """A rollout whose rank in its group changed.

    Example:
        >>> both = RescoredRollout(prompt=None, rollout=None, old=1.0, new=0.0)
        >>> RankMove(both=both, places=3.0, of=4).places
        3.0
    """

    both: RescoredRollout
    """The rollout with its rewards."""
    places: float
    """Ranks lost; negative: gained."""
    of: int
    """Rollouts that were compared."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RescoreResult:
    """Recorded rollouts with the scores of the run and those of another reward.

    Example:
        >>> RescoreResult(run="runs/a/b", steps=(1,), old=(), new=(), broken=0).changes()
        []
    """

    run: str
    """The run directory."""
    steps: tuple[int, ...]
    """Steps whose rollouts were scored."""
    old: tuple[ScoredGroup, ...]
    """The groups as the run had them."""
    new: tuple[ScoredGroup, ...]
    """The same groups in the same order with the new scores."""
    broken: int
    """Rollouts that failed before their end; they have no score on either side."""

    @property
    def count(self) -> int:
        """Number of scored rollouts."""
        return sum(len(group.rollouts) for group in self.new)

    @property
    def faults(self) -> list[Rollout]:
        """Rollouts that the new reward could not score."""
        return faults_in(self.new)

    def both(self) -> list[list[RescoredRollout]]:
        """The rollouts of each group that have a reward on both sides."""
        pairs = zip(self.old, self.new, strict=True)
        return [list(_both(before, after)) for before, after in pairs]

    def changes(self) -> list[tuple[list[RescoredRollout], RankChange]]:
        """Rank changes of every group with at least two comparable rollouts."""
        groups = [group for group in self.both() if len(group) > 1]
        return [(g, rank_change([b.old for b in g], [b.new for b in g])) for g in groups]

    def moved(self) -> list[RankMove]:
        """Rollouts by how far they moved, the farthest first."""
        found = [
            RankMove(both=both, places=places, of=len(group))
            for group, change in self.changes()
            for both, places in zip(group, change.moves, strict=True)
            if places
        ]
        return sorted(found, key=lambda one: (-abs(one.places) / one.of, one.both.rollout.key))

    def correlation(self) -> float | None:
        """Correlation of the two rewards over all rollouts that have both."""
        return correlation([(one.old, one.new) for group in self.both() for one in group])

    def components(self) -> list[ComponentChange]:
        """Every node of either tree, the whole reward first."""
        old, new = _nodes(self.old), _nodes(self.new)
        return [
            ComponentChange(
                name=name,
                old=_mean(old.get(name, [])),
                new=_mean(new.get(name, [])),
                old_faults=_lost(old.get(name, [])),
                new_faults=_lost(new.get(name, [])),
            )
            for name in dict.fromkeys([*old, *new])
        ]

    def objectives(self) -> tuple[Objectives, Objectives]:
        """Correlations between components, before and after."""
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


def _both(before: ScoredGroup, after: ScoredGroup) -> Iterator[RescoredRollout]:
    for one, other in zip(before.rollouts, after.rollouts, strict=True):
        old, new = _value(one), _value(other)
        if old is not None and new is not None:
            yield RescoredRollout(prompt=before.prompt, rollout=one, old=old, new=new)


def _value(rollout: Rollout) -> float | None:
    return None if rollout.score is None else rollout.score.value


def _nodes(scored: Sequence[ScoredGroup]) -> dict[str, list[float | None]]:
    """Values of every node of the score trees by path."""
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
