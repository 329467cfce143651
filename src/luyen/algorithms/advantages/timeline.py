"""Trainable tokens in the order they were sampled, gaps removed: sums over what comes later.

Tool and prompt tokens between two trainable ones take no time: a value carries over them.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from luyen.algorithms.advantages.evidence import given_rewards
from luyen.algorithms.advantages.inputs import CreditInputs
from luyen.algorithms.layout import Layout
from luyen.algorithms.summed import summed


def credited_rewards(inputs: CreditInputs) -> Float[Tensor, " tok"]:
    """Rewards with each one that stands on a masked token moved to a trainable one; 0 elsewhere.

    It moves to the nearest earlier trainable token of its sequence, or to the first one if none is
    earlier. The sum of a sequence stays what it was. A sequence without trainable tokens keeps
    nothing here; its outcome still counts in sums (`CreditInputs.sequence_rewards`).
    """
    layout, rewards = inputs.layout, given_rewards(inputs)
    target, kept = credited_to(layout), layout.mask.nonzero().squeeze(-1)
    found = target >= 0
    moved = summed(rewards[found], target[found], kept.numel())
    return torch.zeros_like(rewards).index_copy(0, kept, moved)


def credited_to(layout: Layout) -> Int[Tensor, " tok"]:
    """Which trainable token a reward on each token is credited to, counted over the batch.

    A trainable token keeps its own. -1 in a sequence without trainable tokens.

    Example:
        >>> layout = Layout(mask=torch.tensor([False, True, False, False]),
        ...                 offsets=torch.tensor([0, 3, 4]), groups=torch.tensor([0, 0]))
        >>> credited_to(layout).tolist()
        [0, 0, 0, -1]
    """
    seen = layout.mask.long().cumsum(0)
    lengths = layout.lengths()
    first = lengths.cumsum(0) - lengths
    target = torch.maximum(seen - 1, first[layout.segment])
    return torch.where((lengths > 0)[layout.segment], target, -1)


def discounted_to_go(
    x: Float[Tensor, " tok"], layout: Layout, *, discount: float
) -> Float[Tensor, " tok"]:
    """Σ_k discount^k x at the k-th trainable token from here on, in the same sequence; 0 off mask.

    Example:
        >>> layout = Layout(mask=torch.tensor([True, False, True]), offsets=torch.tensor([0, 3]),
        ...                 groups=torch.tensor([0]))
        >>> discounted_to_go(torch.tensor([1.0, 9.0, 4.0]), layout, discount=0.5)
        tensor([3., 0., 4.])
    """
    kept = layout.mask.nonzero().squeeze(-1)
    total = suffix_sums(x[kept], layout.segment[kept], discount=discount)
    return torch.zeros_like(x).index_copy(0, kept, total)


def running_total(x: Float[Tensor, " tok"], layout: Layout) -> Float[Tensor, " tok"]:
    """Sum of x over the sequence's trainable tokens up to and with this one; 0 off the mask."""
    kept = layout.mask.nonzero().squeeze(-1)
    total = suffix_sums(x[kept].flip(0), layout.segment[kept].flip(0), discount=1.0).flip(0)
    return torch.zeros_like(x).index_copy(0, kept, total)


def suffix_sums(
    x: Float[Tensor, " live"], segment: Int[Tensor, " live"], *, discount: float
) -> Float[Tensor, " live"]:
    """Discounted sum from each element to the end of its run of equal segments.

    Spans double (1, 2, 4, ... elements), so the passes are logarithmic in the longest run and
    rounding grows as in pairwise summation.
    """
    longest = int(torch.bincount(segment).max()) if segment.numel() else 0
    span, weight = 1, discount
    while span < longest:
        same = segment[span:] == segment[:-span]
        later = torch.where(same, weight * x[span:], 0.0)
        x = torch.cat((x[:-span] + later, x[-span:]))
        span, weight = 2 * span, weight * weight
    return x


def next_value(x: Float[Tensor, " tok"], layout: Layout) -> Float[Tensor, " tok"]:
    """x at the next trainable token of the same sequence; 0 at the last one and off the mask."""
    kept = layout.mask.nonzero().squeeze(-1)
    following, segment = x[kept].roll(-1), layout.segment[kept]
    last = segment != segment.roll(-1)
    last[-1:] = True
    return torch.zeros_like(x).index_copy(0, kept, torch.where(last, 0.0, following))


def ranks(layout: Layout) -> Int[Tensor, " tok"]:
    """Trainable tokens before this one in its sequence: 0 for the first one."""
    seen = layout.mask.long().cumsum(0) - layout.mask.long()
    lengths = layout.lengths()
    return seen - (lengths.cumsum(0) - lengths)[layout.segment]


def response_positions(layout: Layout) -> Int[Tensor, " tok"]:
    """Distance from the first trainable token of its sequence, masked tokens counted."""
    index = torch.arange(layout.mask.numel(), device=layout.mask.device)
    is_first = layout.mask & (ranks(layout) == 0)
    start = torch.zeros_like(layout.groups, dtype=index.dtype)
    start = start.index_copy(0, layout.segment[is_first], index[is_first])
    return index - start[layout.segment]
