"""Stretches of time: unions, overlaps and what is left."""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import TypeAlias

Interval: TypeAlias = tuple[float, float]
"""A beginning and an end."""


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same time as stretches apart from each other, in order.

    Example:
        >>> union([(4, 5), (1, 3), (2, 3.5), (6, 6)])
        [(1, 3.5), (4, 5)]
    """
    found: list[Interval] = []
    for start, end in sorted(one for one in intervals if one[1] > one[0]):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return found


def overlap(one: Sequence[Interval], other: Sequence[Interval]) -> list[Interval]:
    """Time that is in both; each must be a union.

    Example:
        >>> overlap([(1, 4), (6, 9)], [(2, 3), (3.5, 7)])
        [(2, 3), (3.5, 4), (6, 7)]
    """
    found: list[Interval] = []
    i = j = 0
    while i < len(one) and j < len(other):
        start, end = max(one[i][0], other[j][0]), min(one[i][1], other[j][1])
        if start < end:
            found.append((start, end))
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return found


def without(whole: Sequence[Interval], taken: Sequence[Interval]) -> list[Interval]:
    """Time of the first that is not in the second; each must be a union.

    Example:
        >>> without([(0, 10)], [(2, 3), (5, 12)])
        [(0, 2), (3, 5)]
    """
    edges = [(float("-inf"), float("-inf")), *taken, (float("inf"), float("inf"))]
    free = [(before[1], after[0]) for before, after in pairwise(edges)]
    return overlap(whole, free)


def seconds(intervals: Iterable[Interval]) -> float:
    """How long they are together.

    Example:
        >>> seconds([(1, 3), (4, 4.5)])
        2.5
    """
    return sum(end - start for start, end in intervals)
