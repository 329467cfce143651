"""How the order of a group's rollouts changes when something else judges them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import final

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
    """Kendall's tau-b; None where one of the two tells no rollout from another."""
    has_other_best: bool
    """Whether none of those that were best still is."""
    moves: tuple[float, ...]
    """Places that each rollout gave up (or, below 0, won); ties share the mean of their places."""


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
    balance = told_one = told_other = 0
    for i, j in combinations(range(len(one)), 2):
        a, b = _sign(one[i], one[j]), _sign(other[i], other[j])
        balance += a * b
        told_one += a * a
        told_other += b * b
    told = math.sqrt(told_one * told_other)
    return balance / told if told else None


def _sign(a: float, b: float) -> int:
    return 0 if math.isclose(a, b, rel_tol=_SMALL, abs_tol=_SMALL) else 1 if a > b else -1


def _best(values: Sequence[float]) -> set[int]:
    top = max(values)
    return {i for i, value in enumerate(values) if _sign(top, value) == 0}


def _places(values: Sequence[float]) -> list[float]:
    """The place of each, the best one first; equal ones share the mean of theirs."""
    return [1.0 + sum((_sign(other, value) + 1) / 2 for other in values) - 0.5 for value in values]
