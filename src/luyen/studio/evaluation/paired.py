"""Whether pairs of measurements differ, and how many would be needed to see it."""

from collections.abc import Sequence
from math import ceil, comb, sqrt
from statistics import NormalDist, fmean

_POWER = 0.8
"""Chance to find a difference that is there."""
_LEVEL = 0.05
"""Chance to find one that is not."""
_QUANTILES = NormalDist().inv_cdf(1 - _LEVEL / 2) + NormalDist().inv_cdf(_POWER)


def sign_test(better: int, worse: int) -> float:
    """Exact two-sided p value that changes go one way by chance alone; those without are left out.

    With one answer for each prompt, right or wrong, this is McNemar's exact test.

    Example:
        >>> sign_test(8, 1), sign_test(3, 3)
        (0.0390625, 1.0)
    """
    changes = better + worse
    tail = sum(comb(changes, i) for i in range(min(better, worse) + 1))
    return min(1.0, 2 * tail / 2**changes)


def spread_of(differences: Sequence[float]) -> float:
    """Standard deviation of differences.

    Where none differs, that of what may still be hidden: n prompts without a flip leave room for
    a share of 3/n that flips (the rule of three).

    Example:
        >>> spread_of([0.0] * 300)
        0.1
    """
    count = len(differences)
    mean = fmean(differences)
    if count < 2 or min(differences) == max(differences):
        return sqrt(min(1.0, 3 / count))
    return sqrt(sum((d - mean) ** 2 for d in differences) / (count - 1))


def prompts_needed(spread: float, difference: float) -> int:
    """Prompts with which a difference of means is found at 5 % with a chance of 80 %.

    Example:
        >>> prompts_needed(0.5, 0.05)
        785
    """
    return max(2, ceil((_QUANTILES * spread / difference) ** 2))


def smallest_visible(spread: float, prompts: int) -> float:
    """The difference that so many prompts find at 5 % with a chance of 80 %.

    Example:
        >>> round(smallest_visible(0.5, 785), 3)
        0.05
    """
    return _QUANTILES * spread / sqrt(prompts)
