"""pass@k, majority@k and Wilson intervals, exact over all choices of k samples; no torch."""

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from math import comb, sqrt

_Z = 1.959964
"""Two-sided 95 % quantile of the normal distribution."""


def pass_at_k(solved: int, samples: int, k: int) -> float:
    """Chance that k of the samples, drawn without replacement, hold a solution (arXiv:2107.03374).

    Example:
        >>> pass_at_k(1, 4, 2)
        0.5
    """
    return 1.0 - comb(samples - solved, k) / comb(samples, k)


def majority_at_k(votes: Sequence[tuple[Hashable, float]], k: int) -> float:
    """Value to expect of the answer that most of k samples give, drawn without replacement.

    A vote is an answer and the value of the sample that gave it; equal answers count with the mean
    of their values, and answers with equally many votes share the win.

    Example:
        >>> votes = [("7", 1.0), ("7", 1.0), ("9", 0.0)]
        >>> majority_at_k(votes, 3), majority_at_k(votes, 2)
        (1.0, 0.6666666666666666)
    """
    counts = Counter(answer for answer, _ in votes)
    sums: dict[Hashable, float] = dict.fromkeys(counts, 0.0)
    for answer, value in votes:
        sums[answer] += value
    # Answers with equally many votes win equally often.
    ways = {size: _winning_ways(size, counts, k) for size in set(counts.values())}
    total = sum(ways[size] * sums[answer] / size for answer, size in counts.items())
    return total / comb(len(votes), k)


def _winning_ways(size: int, counts: Counter[Hashable], k: int) -> float:
    """Sets of k samples that an answer with `size` votes wins; a tie of n counts 1/n."""
    rest = sorted(counts.values())
    rest.remove(size)
    total = 0.0
    for most in range(1, min(size, k) + 1):
        if k == sum(counts.values()) and most < size:
            continue  # all samples are taken, so all votes of the answer are
        # (samples taken from the rest, answers among them with just as many votes) -> ways
        table = {(0, 0): 1}
        for other in rest:
            table = _with_another(table, other, most=most, room=k - most)
        shared = (ways / (1 + ties) for (taken, ties), ways in table.items() if taken == k - most)
        total += comb(size, most) * sum(shared)
    return total


def _with_another(
    table: dict[tuple[int, int], int], votes: int, *, most: int, room: int
) -> dict[tuple[int, int], int]:
    """The table with one answer more, which may have at most `most` votes."""
    grown: dict[tuple[int, int], int] = {}
    for (taken, ties), ways in table.items():
        for here in range(min(votes, most, room - taken) + 1):
            place = (taken + here, ties + (here == most))
            grown[place] = grown.get(place, 0) + ways * comb(votes, here)
    return grown


def wilson_interval(mean: float, count: int) -> tuple[float, float]:
    """95 % interval of a share of `count` independent trials; sound near 0 and 1.

    Example:
        >>> low, high = wilson_interval(1.0, 10)
        >>> round(low, 2), round(high, 2)
        (0.72, 1.0)
    """
    if count == 0:
        return 0.0, 1.0
    square = _Z * _Z
    centre = (mean + square / (2 * count)) / (1 + square / count)
    half = (
        _Z * sqrt(mean * (1 - mean) / count + square / (4 * count * count)) / (1 + square / count)
    )
    return max(0.0, centre - half), min(1.0, centre + half)


def powers_of_two(most: int) -> Iterable[int]:
    """1, 2, 4 and so on, up to `most`."""
    k = 1
    while k <= most:
        yield k
        k *= 2
