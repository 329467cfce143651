"""How sure a mean over prompts is: intervals from drawing the prompts again."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean
from typing import final

import numpy as np

from luyen.base.seeds import derive_key
from luyen.train.shares import wilson_interval

RESAMPLES = 4000
"""Times the prompts are drawn again."""
_AT_ONCE = 1_000_000
"""Most numbers held at once while drawing."""
_NORMAL = NormalDist()


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A 95 % interval of a mean.

    Example:
        >>> Interval(low=0.2, high=0.6, method="bca").holds(0.5)
        True
    """

    low: float
    """Lower end."""
    high: float
    """Upper end."""
    method: str
    """`bca`, `wilson`, or `none` where all values are alike and nothing can be said."""

    def holds(self, value: float) -> bool:
        """Whether the value lies in it, ends included."""
        return self.low <= value <= self.high


def mean_interval(values: Sequence[float], *, seed: int = 0, is_share: bool = False) -> Interval:
    """95 % interval of the mean: the bias-corrected, accelerated bootstrap (BCa) over values.

    The same values in the same order and the same seed give the same interval. Values that are all
    alike have no spread to learn from. If they are shares, all 0 or all 1, Wilson's interval still
    says what their number is worth; otherwise the interval is that point, with method `none`.

    Example:
        >>> mean_interval([1.0, 1.0, 1.0], is_share=True).method
        'wilson'
        >>> mean_interval([0.0, 1.0] * 20).holds(0.5)
        True
    """
    mean = fmean(values)
    if min(values) == max(values):
        if is_share and mean in (0.0, 1.0):
            low, high = wilson_interval(mean, len(values))
            return Interval(low=low, high=high, method="wilson")
        return Interval(low=mean, high=mean, method="none")
    found = np.asarray(values, dtype=np.float64)
    means = np.sort(_resampled_means(found, seed))
    low, high = _bca_ends(found, means)
    return Interval(low=low, high=high, method="bca")


def _resampled_means(values: "np.ndarray", seed: int) -> "np.ndarray":
    """Means of prompts drawn again with replacement."""
    random = np.random.Generator(np.random.PCG64(derive_key(seed, "bootstrap", len(values))))
    rows = max(1, _AT_ONCE // len(values))
    parts = [
        values[random.integers(0, len(values), (min(rows, RESAMPLES - done), len(values)))].mean(1)
        for done in range(0, RESAMPLES, rows)
    ]
    return np.concatenate(parts)


def _bca_ends(values: "np.ndarray", means: "np.ndarray") -> tuple[float, float]:
    """Quantiles of the sorted means, moved by the bias and by the skewness of the values.

    Efron 1987. Ties with the mean count half, so that a lattice of means is not taken for a bias.
    """
    middle = values.mean()
    close = np.abs(means - middle) <= 1e-9 * np.ptp(values)
    below = float(((means < middle) & ~close).sum() + close.sum() / 2)
    share = min(max(below / len(means), 0.5 / len(means)), 1 - 0.5 / len(means))
    bias = _NORMAL.inv_cdf(share)
    deviations = values - middle
    # The mean without one value moves opposite to that value's deviation.
    acceleration = float((deviations**3).sum() / (6 * (deviations**2).sum() ** 1.5))
    ends: list[float] = []
    for tail in (0.025, 0.975):
        z = bias + _NORMAL.inv_cdf(tail)
        moved = _NORMAL.cdf(bias + z / max(1 - acceleration * z, 1e-3))
        ends.append(float(np.quantile(means, moved)))
    return ends[0], ends[1]
