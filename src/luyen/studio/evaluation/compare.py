"""Two policies on the same prompts: difference, significance, and prompts needed to see it."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, comb, sqrt
from statistics import NormalDist, fmean
from typing import final

from luyen.base.errors import UserError
from luyen.studio.evaluation.samples import Sample
from luyen.studio.evaluation.summary import (
    ALL,
    Interval,
    by_prompt,
    mean_interval,
    rewards_of,
    solved_share,
)

# Significance of paired differences, and the number of prompts needed to detect them.

_POWER = 0.8
"""Power: probability to detect an existing difference."""
_LEVEL = 0.05
"""Significance level: probability of a false positive."""
_QUANTILES = NormalDist().inv_cdf(1 - _LEVEL / 2) + NormalDist().inv_cdf(_POWER)


def sign_test(better: int, worse: int) -> float:
    """Exact two-sided p value of the sign test; prompts without a change are left out.

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

    If all are equal, an upper bound: n prompts without a flip are consistent with a share of 3/n
    that flips (the rule of three).

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
    """Prompts needed to detect a difference of means at the 5 % level with 80 % power.

    Example:
        >>> prompts_needed(0.5, 0.05)
        785
    """
    return max(2, ceil((_QUANTILES * spread / difference) ** 2))


def smallest_visible(spread: float, prompts: int) -> float:
    """The smallest difference that so many prompts detect at the 5 % level with 80 % power.

    Example:
        >>> round(smallest_visible(0.5, 785), 3)
        0.05
    """
    return _QUANTILES * spread / sqrt(prompts)


_SIGNIFICANCE = 0.05
_WORTH_SEEING = 0.05
"""The difference that `needed` refers to where no difference was observed."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Flip:
    """A prompt that one policy solves more often than the other.

    Example:
        >>> flip = Flip(uid="a", question="1+1=", first=1.0, second=0.0, answers=("2", "3"))
        >>> flip.first > flip.second
        True
    """

    uid: str
    """Hash of the prompt."""
    question: str
    """Its last message."""
    first: float
    """Share of the first policy's samples that solve it."""
    second: float
    """The same of the second policy."""
    answers: tuple[str, str]
    """The first answer of each."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The second policy less the first, on one data source or on all.

    Example:
        >>> point = Interval(low=-0.1, high=0.3, method="bca")
        >>> found = Difference(source="sum", prompts=40, first=0.5, second=0.6, accuracy=0.1,
        ...     interval=point, reward=0.1, reward_interval=point, better=6, worse=2,
        ...     test="mcnemar", p=0.29, needed=300, needed_for=0.1, visible=0.27)
        >>> found.is_significant
        False
    """

    source: str
    """Its name."""
    prompts: int
    """Prompts that both policies answered."""
    first: float
    """Accuracy of the first policy on them."""
    second: float
    """Accuracy of the second."""
    accuracy: float
    """Second less first."""
    interval: Interval
    """95 % interval of that, from resampling pairs."""
    reward: float
    """Difference of the mean rewards, second less first."""
    reward_interval: Interval
    """95 % interval of that."""
    better: int
    """Prompts that the second policy solves more often."""
    worse: int
    """Prompts that the first one solves more often."""
    test: str
    """`mcnemar` with one sample of each prompt, `sign` with several."""
    p: float
    """Its two-sided p value."""
    needed: int
    """Prompts needed to detect a difference of `needed_for` with 80 % power."""
    needed_for: float
    """The observed difference, or 0.05 where there is none."""
    visible: float
    """The smallest difference that so many prompts detect with 80 % power."""

    @property
    def is_significant(self) -> bool:
        """Whether it is significant both by the test and by the interval."""
        return self.p < _SIGNIFICANCE and not self.interval.holds(0.0)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyComparison:
    """Result of comparing two policies.

    Example:
        >>> PolicyComparison(differences=(), gained=(), lost=(), unpaired=(0, 2)).unpaired
        (0, 2)
    """

    differences: tuple[Difference, ...]
    """For every data source, and for all together where there are several."""
    gained: tuple[Flip, ...]
    """Prompts that the second policy solves more often, the largest change first."""
    lost: tuple[Flip, ...]
    """Prompts that the first one solves more often, the largest change first."""
    unpaired: tuple[int, int]
    """Prompts that only the first, and only the second policy has a reward for."""


_Pair = tuple[list[Sample], list[Sample]]


def compare(
    first: Sequence[Sample], second: Sequence[Sample], *, solved_at: float = 1.0, seed: int = 0
) -> PolicyComparison:
    """The second policy against the first, prompt by prompt; a UserError where none is shared.

    Only prompts for which both have a sample with a reward are compared.
    """
    one, two = by_prompt(first), by_prompt(second)
    pairs = [(samples, two[key]) for key, samples in one.items() if key in two]
    if not pairs:
        why = f"no prompt is in both: {len(one)} and {len(two)} prompts have rewards"
        raise UserError("compare", None, why, "measure both on the same rows")
    sources = list(dict.fromkeys(pair[0][0].data_source for pair in pairs))
    found = [
        _difference(name, [p for p in pairs if p[0][0].data_source == name], solved_at, seed)
        for name in sources
    ]
    if len(sources) > 1:
        found.append(_difference(ALL, pairs, solved_at, seed))
    flips = [_flip(pair, solved_at) for pair in pairs]
    flips.sort(key=lambda flip: -abs(flip.second - flip.first))
    return PolicyComparison(
        differences=tuple(found),
        gained=tuple(flip for flip in flips if flip.second > flip.first),
        lost=tuple(flip for flip in flips if flip.first > flip.second),
        unpaired=(len(one) - len(pairs), len(two) - len(pairs)),
    )


def _difference(source: str, pairs: Sequence[_Pair], solved_at: float, seed: int) -> Difference:
    shares = [(solved_share(a, solved_at), solved_share(b, solved_at)) for a, b in pairs]
    changes = [b - a for a, b in shares]
    rewards = [fmean(rewards_of(b)) - fmean(rewards_of(a)) for a, b in pairs]
    better, worse = sum(c > 0 for c in changes), sum(c < 0 for c in changes)
    mean, spread = fmean(changes), spread_of(changes)
    wanted = abs(mean) or _WORTH_SEEING
    is_single = all(len(a) == len(b) == 1 for a, b in pairs)
    return Difference(
        source=source,
        prompts=len(pairs),
        first=fmean(a for a, _ in shares),
        second=fmean(b for _, b in shares),
        accuracy=mean,
        interval=mean_interval(changes, seed=seed),
        reward=fmean(rewards),
        reward_interval=mean_interval(rewards, seed=seed),
        better=better,
        worse=worse,
        test="mcnemar" if is_single else "sign",
        p=sign_test(better, worse),
        needed=prompts_needed(spread, wanted),
        needed_for=wanted,
        visible=smallest_visible(spread, len(pairs)),
    )


def _flip(pair: _Pair, solved_at: float) -> Flip:
    first, second = pair
    return Flip(
        uid=first[0].uid,
        question=first[0].question,
        first=solved_share(first, solved_at),
        second=solved_share(second, solved_at),
        answers=(first[0].answer, second[0].answer),
    )
