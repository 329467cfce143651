"""Statistics over groups and over the batch: sizes, means, deviations, runners-up, whitening.

Every sequence counts as a sibling, one without trainable tokens too: that its tokens were rejected
does not unmake its outcome.
"""

from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from luyen.algorithms.layout import sum_by_index


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
