"""Optimal token baselines: a baseline per position, weighted by how noisy each path has been.

The variance-minimising baseline at position t weights the returns of a group by the squared norm
of the score. Its proxy for one token is 1 - 2π + Σπ², the squared length of the gradient of log π
with respect to the logits; W_t adds it up along the path.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from luyen.algorithms.advantages.grouping import Grouping, dense_index, runner_up
from luyen.algorithms.advantages.inputs import Credit, CreditInputs, adv_estimators, token_stream
from luyen.algorithms.advantages.returns import (
    credited_rewards,
    discounted_to_go,
    ranks,
    response_positions,
    running_total,
)
from luyen.algorithms.checks import require_same_shape
from luyen.algorithms.layout import Layout, sum_by_index

WEIGHT_FLOOR = 1e-8
"""Added to the sum of weights at a position, so that certain tokens do not divide by 0."""


@adv_estimators.register("optimal_token_baseline")
def optimal_token_baseline(inputs: CreditInputs, *, handle_zero_tail: bool = True) -> Credit:
    """G_t - B_t with B_t = Σ G W / (Σ W + 1e-8) over the group's tokens at the same position.

    Positions count from the start of the response, masked tokens included. With handle_zero_tail
    the baseline is 0 where only the longest sequence still runs, as there B_t would be G_t itself.
    """
    positions = inputs.positions
    if positions is None:
        positions = response_positions(inputs.layout)
    require_same_shape("positions", positions, "mask", inputs.layout.mask)
    return against_peers(inputs, positions, handle_zero_tail=handle_zero_tail)


@adv_estimators.register("tir_optimal_token_baseline")
def tir_optimal_token_baseline(inputs: CreditInputs, *, handle_zero_tail: bool = True) -> Credit:
    """The same, with positions that count trainable tokens only, so that turns align."""
    return against_peers(inputs, ranks(inputs.layout), handle_zero_tail=handle_zero_tail)


def against_peers(
    inputs: CreditInputs, positions: Int[Tensor, " tok"], *, handle_zero_tail: bool
) -> Credit:
    """Returns from each token on, minus the baseline at its position.

    Peers are sequences with trainable tokens: one without has no token at any position. A sequence
    without peers gets 0.
    """
    layout = inputs.layout
    grouping = Grouping.of(layout.groups)
    returns = discounted_to_go(credited_rewards(inputs), layout, discount=1.0)
    weights = path_weights(inputs)
    place = places(positions, grouping.index[layout.segment])
    baselines = sums_at(place, returns * weights) / (sums_at(place, weights) + WEIGHT_FLOOR)
    if handle_zero_tail:
        baselines = torch.where(in_tail(positions, layout, grouping), 0.0, baselines)
    advantages = torch.where(has_peers(layout, grouping), returns - baselines, 0.0)
    return Credit(advantages=layout.on_mask(advantages), returns=returns)


def path_weights(inputs: CreditInputs) -> Float[Tensor, " tok"]:
    """W_t: Σ of (1 - 2π + Σπ²), times ρ² if importance weights are given, up to each token.

    The proxy is a squared length; rounding below 0 is cut so that no weight is negative.
    """
    pi = token_stream(inputs, "old_logp", inputs.old_logp).exp()
    squares = token_stream(inputs, "sum_pi_squared", inputs.sum_pi_squared)
    energy = (1.0 - 2.0 * pi + squares).clamp(min=0.0)
    if inputs.is_weights is not None:
        energy = energy * token_stream(inputs, "is_weights", inputs.is_weights).square()
    return running_total(energy, inputs.layout)


def places(positions: Int[Tensor, " tok"], group: Int[Tensor, " tok"]) -> Int[Tensor, " tok"]:
    """One index per pair of group and position, without gaps."""
    rank = dense_index(positions)
    return dense_index(group * positions.numel() + rank)


def sums_at(place: Int[Tensor, " tok"], x: Float[Tensor, " tok"]) -> Float[Tensor, " tok"]:
    """Sum of x over all tokens of the same place (x is 0 off the mask)."""
    return sum_by_index(x, place, x.numel())[place]


def in_tail(
    positions: Int[Tensor, " tok"], layout: Layout, grouping: Grouping
) -> Bool[Tensor, " tok"]:
    """True where a token lies beyond the last trainable position of all its peers."""
    last = layout.max(positions.double())
    return positions > runner_up(last, grouping)[layout.segment]


def has_peers(layout: Layout, grouping: Grouping) -> Bool[Tensor, " tok"]:
    """True on tokens whose group has two sequences or more with trainable tokens."""
    live = grouping.sum((layout.lengths() > 0).double())
    return (grouping.spread(live) > 1)[layout.segment]
