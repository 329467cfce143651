"""Groups of a batch: sizes, means, deviations, whitening, and metrics of groups and baselines.

Every sequence counts as a sibling, one without trainable tokens too: that its tokens were rejected
does not unmake its outcome.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from luyen.algorithms.advantages.inputs import CreditInputs, greedy_rewards, outcomes
from luyen.algorithms.checks import require_finite, require_same_shape
from luyen.algorithms.layout import sum_by_index
from luyen.base.errors import UserError, did_you_mean
from luyen.base.records import lowest
from luyen.config.catalog import ADV_ESTIMATORS


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Grouping:
    """Which group each sequence is in, as indices without gaps.

    Example:
        >>> Grouping.of(torch.tensor([7, 3, 7])).sizes
        tensor([1, 2])
    """

    index: Int[Tensor, " seq"]
    """Group of each sequence, from 0 up."""
    sizes: Int[Tensor, " group"]
    """Sequences in each group."""

    @classmethod
    def of(cls, labels: Int[Tensor, " seq"]) -> "Grouping":
        """Groups of equal labels; what the labels are does not matter."""
        index = dense_index(labels)
        return cls(index=index, sizes=torch.bincount(index))

    def sum(self, x: Float[Tensor, " seq"]) -> Float[Tensor, " group"]:
        """Sum over each group."""
        return sum_by_index(x, self.index, self.sizes.numel())

    def max(self, x: Float[Tensor, " seq"]) -> Float[Tensor, " group"]:
        """Largest value of each group."""
        lowest = x.new_full((self.sizes.numel(),), -torch.inf)
        return lowest.scatter_reduce(0, self.index, x, "amax", include_self=True)

    def spread(self, per_group: Float[Tensor, " group"]) -> Float[Tensor, " seq"]:
        """The value of its group for every sequence."""
        return per_group[self.index]

    def size(self) -> Int[Tensor, " seq"]:
        """Size of each sequence's group."""
        return self.sizes[self.index]

    def has_siblings(self) -> Bool[Tensor, " seq"]:
        """False for a sequence that is alone in its group."""
        return self.size() > 1


def dense_index(labels: Int[Tensor, " n"]) -> Int[Tensor, " n"]:
    """Equal labels to equal indices, from 0 up without gaps, in the order of the labels."""
    ordered, order = labels.sort()
    new = torch.zeros_like(order)
    new[1:] = ordered[1:] != ordered[:-1]
    return torch.empty_like(order).index_copy(0, order, new.cumsum(0))


def centred(
    x: Float[Tensor, " seq"], grouping: Grouping, weights: Float[Tensor, " seq"] | None = None
) -> Float[Tensor, " seq"]:
    """x minus its group's mean, weighted if weights are given (a group without weight: minus 0).

    The group's largest value is subtracted first, so a group of equal values, a group of one
    included, gives exactly 0 in any precision: no rounding is left for a division by std to lift.
    """
    below = x - grouping.spread(grouping.max(x))
    if weights is None:
        weights = torch.ones_like(x)
    total = grouping.sum(weights)
    mean = grouping.sum(below * weights) / torch.where(total > 0, total, 1.0)
    return below - grouping.spread(mean)


def group_std(x: Float[Tensor, " seq"], grouping: Grouping) -> Float[Tensor, " seq"]:
    """Sample standard deviation (n - 1 below) of each sequence's group; 0 in a group of one."""
    squares = grouping.sum(centred(x, grouping).square())
    return grouping.spread((squares / (grouping.sizes - 1).clamp(min=1)).sqrt())


def runner_up(x: Float[Tensor, " seq"], grouping: Grouping) -> Float[Tensor, " seq"]:
    """Second largest value of each sequence's group: the largest if it is shared, -inf if alone."""
    top = grouping.spread(grouping.max(x))
    is_top = x == top
    shared = grouping.spread(grouping.sum(is_top.to(x.dtype))) > 1
    below = grouping.spread(grouping.max(torch.where(is_top, -torch.inf, x)))
    return torch.where(shared, top, below)


# Whitening: mean 0 and variance 1 over the tokens that take part, 0 on all other tokens.

VARIANCE_FLOOR = 1e-8
"""Added to the variance before the root, so that equal values whiten to 0."""


def whiten(x: Float[Tensor, " tok"], takes_part: Bool[Tensor, " tok"]) -> Float[Tensor, " tok"]:
    """(x - mean) / sqrt(var + 1e-8) with the sample variance (n - 1 below); 0 on all other tokens.

    One token alone gives 0. The mean is subtracted twice, since the second pass removes what
    rounding left of the first: values that are all equal stay at 0 in float32 too.

    Example:
        >>> whiten(torch.tensor([1.0, 3.0, 9.0]), torch.tensor([True, True, False]))
        tensor([-0.7071,  0.7071,  0.0000])
    """
    count = takes_part.sum()
    centred = torch.where(takes_part, x, 0.0)
    for _ in range(2):
        mean = centred.sum() / count.clamp(min=1)
        centred = torch.where(takes_part, centred - mean, 0.0)
    variance = centred.square().sum() / (count - 1).clamp(min=1)
    return centred * torch.rsqrt(variance + VARIANCE_FLOOR)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class GroupStatistics:
    """Spread and size of the groups of one batch.

    Example:
        >>> import torch
        >>> group_statistics(torch.tensor([0.0, 1.0, 1.0]), torch.tensor([4, 4, 5])).mean_group_size
        1.5
    """

    within_group_variance: float | None
    """Mean of the sample variance (n - 1 below) of groups of two or more; None without any."""
    zero_std_fraction: float | None
    """Share of groups of two or more whose rewards are all equal; None without any."""
    mean_group_size: float
    """Sequences per group."""
    singleton_fraction: float
    """Share of groups with one sequence."""
    solve_all_fraction: float
    """Share of groups in which every reward reaches `solved_at`."""
    solve_none_fraction: float
    """Share of groups in which no reward reaches it."""


def group_statistics(
    rewards: Float[Tensor, " seq"], groups: Int[Tensor, " seq"], *, solved_at: float = 1.0
) -> GroupStatistics:
    """How much the samples of a prompt differ; a reward of `solved_at` or more counts as solved."""
    require_rewards(rewards, groups)
    grouping = Grouping.of(groups)
    compared = grouping.sizes > 1
    any_compared = bool(compared.any())
    squares = grouping.sum(centred(rewards, grouping).square().double())
    variance = (squares / (grouping.sizes - 1).clamp(min=1))[compared]
    equal = grouping.max(rewards) == -grouping.max(-rewards)
    solved = grouping.sum((rewards >= lowest(solved_at)).double())
    return GroupStatistics(
        within_group_variance=float(variance.mean()) if any_compared else None,
        zero_std_fraction=float(equal[compared].double().mean()) if any_compared else None,
        mean_group_size=float(grouping.sizes.double().mean()),
        singleton_fraction=float((~compared).double().mean()),
        solve_all_fraction=float((solved == grouping.sizes).double().mean()),
        solve_none_fraction=float((solved == 0).double().mean()),
    )


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class BaselineBias:
    """How a baseline differs from the mean reward of a sample's siblings.

    Example:
        >>> BaselineBias(signed=0.0, absolute=0.25).absolute
        0.25
    """

    signed: float | None
    """Mean of baseline - siblings' mean; None if no sample has siblings."""
    absolute: float | None
    """Mean of its absolute value: the group mean's signed bias cancels inside each group."""


def baseline_bias(
    baselines: Float[Tensor, " seq"], rewards: Float[Tensor, " seq"], groups: Int[Tensor, " seq"]
) -> BaselineBias:
    """Bias of a baseline over the samples that have siblings; 0 for leave-one-out by construction.

    A sample's own reward inside its baseline makes it depend on the action it evaluates; the
    siblings' mean does not.
    """
    require_rewards(rewards, groups)
    require_same_shape("baselines", baselines, "groups", groups)
    require_finite("baselines", baselines)
    grouping = Grouping.of(groups)
    compared = grouping.has_siblings()
    if not bool(compared.any()):
        return BaselineBias(signed=None, absolute=None)
    gap = (baselines.double() - siblings_mean(rewards.double(), grouping))[compared]
    return BaselineBias(signed=float(gap.mean()), absolute=float(gap.abs().mean()))


def siblings_mean(rewards: Float[Tensor, " seq"], grouping: Grouping) -> Float[Tensor, " seq"]:
    """Mean reward of the other samples of the group; a sample alone gets its own reward."""
    n = grouping.size().to(rewards.dtype)
    return rewards - centred(rewards, grouping) * (n / (n - 1).clamp(min=1))


def estimator_baselines(name: str, inputs: CreditInputs) -> Float[Tensor, " seq"] | None:
    """The number an estimator subtracts from each sequence's reward; None where it is not one.

    A sequence alone in its group is its own baseline, as its advantage is 0. GDPO normalises each
    component; in units of the whole reward its baseline is the group mean.
    """
    if name not in ADV_ESTIMATORS:
        why = "no built-in advantage estimator has this name"
        raise UserError("algorithm.adv_estimator", name, why, did_you_mean(name, ADV_ESTIMATORS))
    rewards, grouping = outcomes(inputs), Grouping.of(inputs.layout.groups)
    match ADV_ESTIMATORS[name].baseline:
        case "group mean":
            return rewards - centred(rewards, grouping)
        case "leave-one-out":
            return siblings_mean(rewards, grouping)
        case "length-weighted":
            lengths = inputs.layout.lengths().to(rewards.dtype)
            return rewards - centred(rewards, grouping, lengths)
        case "greedy":
            return greedy_rewards(inputs)
        case _:
            return None


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class KlDrift:
    """The latest KL and its trend.

    Example:
        >>> kl_drift([0.1, 0.2, 0.3]).last
        0.3
    """

    last: float
    """The latest value."""
    slope: float
    """Least-squares slope per step over the window; 0 with a single value."""


def kl_drift(history: Sequence[float], window: int = 20) -> KlDrift:
    """Latest value and trend of the last `window` values, one per step."""
    if window < 2:
        raise UserError("window", window, "a slope needs two steps or more", "set window >= 2")
    recent = list(history[-window:])
    if not recent or not all(math.isfinite(x) for x in recent):
        why = "a drift needs at least one value, and finite ones"
        raise UserError("history", recent, why, "pass the KL of each step")
    middle, mean = (len(recent) - 1) / 2, math.fsum(recent) / len(recent)
    spread = math.fsum((i - middle) ** 2 for i in range(len(recent)))
    rise = math.fsum((i - middle) * (x - mean) for i, x in enumerate(recent))
    return KlDrift(last=recent[-1], slope=rise / spread if spread else 0.0)


def require_rewards(rewards: Tensor, groups: Tensor) -> None:
    """Refuse rewards that are not one finite number per sequence, or no sequences at all."""
    require_same_shape("rewards", rewards, "groups", groups)
    require_finite("rewards", rewards)
    if groups.numel() == 0:
        raise UserError(
            "groups", [], "there is no sequence to measure", "pass a batch that has some"
        )
