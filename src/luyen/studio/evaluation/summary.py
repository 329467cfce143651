"""What samples say about one policy, for every data source: shares with their intervals."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import final

from luyen.base.bars import reaches
from luyen.studio.evaluation.intervals import Interval, mean_interval
from luyen.studio.evaluation.samples import Sample
from luyen.train.shares import majority_at_k, pass_at_k, wilson_interval

ALL = "all"
"""The name under which every source counts together."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """A mean over prompts, and how sure it is.

    Example:
        >>> interval = Interval(low=0.4, high=0.6, method="bca")
        >>> Measure(name="pass@4", value=0.5, interval=interval, prompts=100).name
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
    measures: tuple[Measure, ...]
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
    measures: list[Measure] = []
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
) -> list[Measure]:
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


def _measure(name: str, values: Sequence[float], seed: int, *, is_share: bool = False) -> Measure:
    interval = mean_interval(values, seed=seed, is_share=is_share)
    return Measure(name=name, value=fmean(values), interval=interval, prompts=len(values))
