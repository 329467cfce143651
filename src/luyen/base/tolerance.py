"""Whether a value reaches a threshold; rounding errors do not decide."""

import math

_RELATIVE = 1e-6
"""Sums of single-precision numbers are that exact."""
_LEAST = 1e-12
"""Smallest tolerance, for a threshold of 0."""


def lowest(bar: float) -> float:
    """The least value that reaches a bar.

    Example:
        >>> lowest(2.0), lowest(-math.inf)
        (1.999998, -inf)
    """
    return bar - max(_RELATIVE * abs(bar), _LEAST) if math.isfinite(bar) else bar


def reaches(value: float, bar: float) -> bool:
    """Whether a value is at least the bar, up to a millionth of it.

    Every bar of a reward, a gate or a share of solved samples is compared in this way.

    Example:
        >>> 0.7 + 0.2 + 0.1 >= 1.0, reaches(0.7 + 0.2 + 0.1, 1.0), reaches(0.999, 1.0)
        (False, True, False)
    """
    return value >= lowest(bar)
