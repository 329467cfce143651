"""Returns over trainable tokens, and their estimators: GAE, REINFORCE, REINFORCE++ and ReMax.

Time counts trainable tokens: a value or a return carries over a masked token unchanged. A reward
that stands on a masked token is credited to a trainable one of its sequence (`credited_rewards`).
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from luyen.algorithms.advantages.grouping import whiten
from luyen.algorithms.advantages.inputs import (
    Credit,
    CreditInputs,
    adv_estimators,
    given_rewards,
    greedy_rewards,
    require_discount,
    token_stream,
)
from luyen.algorithms.layout import Layout, sum_by_index

# Trainable tokens in the order they were sampled, gaps removed: sums over what comes later.
#
# Tool and prompt tokens between two trainable ones take no time: a value carries over them.


def credited_rewards(inputs: CreditInputs) -> Float[Tensor, " tok"]:
    """Rewards with each one that stands on a masked token moved to a trainable one; 0 elsewhere.

    It moves to the nearest earlier trainable token of its sequence, or to the first one if none is
    earlier. The sum of a sequence stays what it was. A sequence without trainable tokens keeps
    nothing here; its outcome still counts in sums (`CreditInputs.sequence_rewards`).
    """
    layout, rewards = inputs.layout, given_rewards(inputs)
    target, kept = credited_to(layout), layout.mask.nonzero().squeeze(-1)
    found = target >= 0
    moved = sum_by_index(rewards[found], target[found], kept.numel())
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


@adv_estimators.register("gae")
def gae(
    inputs: CreditInputs, *, gamma: float = 1.0, lam: float = 1.0, whiten_advantages: bool = True
) -> Credit:
    """Σ_k (γλ)^k δ_{t+k} with δ = r + γ V_next - V (Schulman et al. 2015, arXiv:1506.02438).

    The last token's V_next is 0. Returns are advantages + values, taken before whitening.
    """
    require_discount("gamma", gamma)
    require_discount("lam", lam)
    layout, values = inputs.layout, token_stream(inputs, "values", inputs.values)
    delta = credited_rewards(inputs) + gamma * next_value(values, layout) - values
    advantages = discounted_to_go(delta, layout, discount=gamma * lam)
    returns = layout.on_mask(advantages + values)
    if whiten_advantages:
        advantages = whiten(advantages, layout.mask)
    return Credit(advantages=advantages, returns=returns)


@adv_estimators.register("reinforce")
def reinforce(inputs: CreditInputs, *, gamma: float = 1.0) -> Credit:
    """The discounted return from each token on: no baseline, no whitening (Williams 1992)."""
    require_discount("gamma", gamma)
    returns = discounted_to_go(credited_rewards(inputs), inputs.layout, discount=gamma)
    return Credit(advantages=returns, returns=returns)


@adv_estimators.register("reinforce_plus_plus")
def reinforce_plus_plus(inputs: CreditInputs, *, gamma: float = 1.0) -> Credit:
    """Discounted returns whitened over the batch's trainable tokens (Hu 2025, arXiv:2501.03262)."""
    returns = reinforce(inputs, gamma=gamma).returns
    return Credit(advantages=whiten(returns, inputs.layout.mask), returns=returns)


@adv_estimators.register("remax")
def remax(inputs: CreditInputs) -> Credit:
    """Return from each token on, minus the greedy rollout's reward (Li et al. 2023, 2310.10505)."""
    layout = inputs.layout
    baselines = layout.spread(greedy_rewards(inputs))
    returns = discounted_to_go(credited_rewards(inputs), layout, discount=1.0)
    return Credit(advantages=returns - baselines, returns=returns)
