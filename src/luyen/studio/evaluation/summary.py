"""Scores of one policy by data source, with bootstrap confidence intervals."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean
from typing import final

import numpy as np

from luyen.base.records import reaches
from luyen.base.seeds import derive_key
from luyen.studio.evaluation.samples import Sample
from luyen.train.pass_at_k import majority_at_k, pass_at_k, wilson_interval

# Bootstrap confidence intervals of means over prompts.

RESAMPLES = 4000
"""Number of bootstrap resamples."""
_AT_ONCE = 1_000_000
"""Most numbers in memory at once while resampling."""
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
    """`bca`, `wilson`, or `none` where all values are equal."""

    def holds(self, value: float) -> bool:
        """Whether the value lies in it, ends included."""
        return self.low <= value <= self.high


def mean_interval(values: Sequence[float], *, seed: int = 0, is_share: bool = False) -> Interval:
    """95 % interval of the mean: the bias-corrected, accelerated bootstrap (BCa) over values.

    Deterministic for the same values, order and seed. Equal values have no spread to resample: for
    shares that are all 0 or all 1 Wilson's interval is used, otherwise the interval is that point
    with method `none`.

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
    """Means of values resampled with replacement."""
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


ALL = "all"
"""The name under which every source counts together."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class MeanEstimate:
    """A mean over prompts with its confidence interval.

    Example:
        >>> interval = Interval(low=0.4, high=0.6, method="bca")
        >>> MeanEstimate(name="pass@4", value=0.5, interval=interval, prompts=100).name
        'pass@4'
    """

    name: str
    """`accuracy`, `reward`, `pass@k` or `maj@k`."""
    value: float
    """The mean."""
    interval: Interval
    """Its 95 % interval over prompts."""
    prompts: int
    """Prompts that enter: those with at least k samples that have a reward."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SourceSummary:
    """One data source, or all of them.

    Example:
        >>> found = SourceSummary(source="sum", prompts=2, samples=2, faults=1, wilson=(0.1, 1.0),
        ...                       measures=())
        >>> found.faults
        1
    """

    source: str
    """Its name."""
    prompts: int
    """Prompts with at least one reward."""
    samples: int
    """Samples with a reward."""
    faults: int
    """Samples without one: left out of every measure, never a 0."""
    wilson: tuple[float, float]
    """Wilson's interval of the accuracy, which needs no spread and is sound near 0 and 1."""
    measures: tuple[MeanEstimate, ...]
    """Accuracy and reward first, then what belongs to each k."""


def summarise(
    samples: Sequence[Sample], ks: Sequence[int], *, solved_at: float = 1.0, seed: int = 0
) -> list[SourceSummary]:
    """A summary of every data source, and of all together where there are several.

    A source none of whose samples has a reward has no measures.
    """
    sources = list(dict.fromkeys(sample.data_source for sample in samples))
    found = [
        _summary(name, [s for s in samples if s.data_source == name], ks, solved_at, seed)
        for name in sources
    ]
    if len(sources) > 1:
        found.append(_summary(ALL, samples, ks, solved_at, seed))
    return found


def by_prompt(samples: Iterable[Sample]) -> dict[tuple[str, int], list[Sample]]:
    """Samples that have a reward, under the prompt they answer."""
    found: dict[tuple[str, int], list[Sample]] = {}
    for sample in samples:
        if sample.reward is not None:
            found.setdefault(sample.prompt, []).append(sample)
    return found


def rewards_of(samples: Iterable[Sample]) -> list[float]:
    """The rewards of samples that have one."""
    return [sample.reward for sample in samples if sample.reward is not None]


def solved_share(samples: Sequence[Sample], solved_at: float) -> float:
    """Share of the samples of a prompt that reach `solved_at`."""
    rewards = rewards_of(samples)
    return sum(reaches(reward, solved_at) for reward in rewards) / len(rewards)


def _summary(
    source: str, samples: Sequence[Sample], ks: Sequence[int], solved_at: float, seed: int
) -> SourceSummary:
    prompts = list(by_prompt(samples).values())
    judged = sum(map(len, prompts))
    measures: list[MeanEstimate] = []
    wilson = (0.0, 1.0)
    if prompts:
        shares = [solved_share(one, solved_at) for one in prompts]
        wilson = wilson_interval(fmean(shares), len(shares))
        measures = [
            _measure("accuracy", shares, seed, is_share=True),
            _measure("reward", [fmean(rewards_of(one)) for one in prompts], seed),
        ]
        for k in ks:
            enough = [one for one in prompts if len(one) >= k]
            measures += _of_k(enough, k, solved_at, seed) if enough else []
    return SourceSummary(
        source=source,
        prompts=len(prompts),
        samples=judged,
        faults=len(samples) - judged,
        wilson=wilson,
        measures=tuple(measures),
    )


def _of_k(
    prompts: Sequence[Sequence[Sample]], k: int, solved_at: float, seed: int
) -> list[MeanEstimate]:
    """pass@k, and from k = 3 on maj@k: a majority of two votes is no more than their mean."""
    right = [[reaches(reward, solved_at) for reward in rewards_of(one)] for one in prompts]
    chances = [pass_at_k(sum(flags), len(flags), k) for flags in right]
    found = [_measure(f"pass@{k}", chances, seed, is_share=True)]
    if k >= 3:
        votes = [
            [(sample.vote, float(flag)) for sample, flag in zip(one, flags, strict=True)]
            for one, flags in zip(prompts, right, strict=True)
        ]
        wins = [majority_at_k(some, k) for some in votes]
        found.append(_measure(f"maj@{k}", wins, seed, is_share=True))
    return found


def _measure(
    name: str, values: Sequence[float], seed: int, *, is_share: bool = False
) -> MeanEstimate:
    interval = mean_interval(values, seed=seed, is_share=is_share)
    return MeanEstimate(name=name, value=fmean(values), interval=interval, prompts=len(values))
