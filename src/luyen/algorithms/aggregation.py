"""The only denominators: one weight per token, from the mask of one whole optimizer step.

Every loss is `(weights * per_token).sum()`. The layout given here covers all micro-batches and all
ranks of the step, so the loss and its gradient do not depend on how the step was split.
"""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from luyen.algorithms.checks import require_positive
from luyen.algorithms.layout import Layout
from luyen.base.errors import UserError, did_you_mean

FIELD = "actor_rollout_ref.actor.loss_agg_mode"


def _token_count(layout: Layout) -> Float[Tensor, ""]:
    return layout.mask.sum().double().clamp(min=1)


def _sequence_count(layout: Layout) -> Float[Tensor, ""]:
    """Sequences with at least one trainable token."""
    return (layout.lengths() > 0).sum().double().clamp(min=1)


def token_mean(layout: Layout, loss_scale_factor: float | None) -> Float[Tensor, " tok"]:
    """Every trainable token of the step weighs the same (DAPO, arXiv:2503.14476)."""
    del loss_scale_factor
    return layout.mask.double() / _token_count(layout)


def token_sum(layout: Layout, loss_scale_factor: float | None) -> Float[Tensor, " tok"]:
    """Weight 1 for every trainable token."""
    del loss_scale_factor
    return layout.mask.double()


def seq_mean_token_sum(layout: Layout, loss_scale_factor: float | None) -> Float[Tensor, " tok"]:
    """Mean over sequences of the sum over tokens."""
    del loss_scale_factor
    return layout.mask.double() / _sequence_count(layout)


def seq_mean_token_mean(layout: Layout, loss_scale_factor: float | None) -> Float[Tensor, " tok"]:
    """Mean over sequences of the mean over tokens (GRPO, arXiv:2402.03300)."""
    del loss_scale_factor
    per_sequence = 1.0 / (layout.lengths().double().clamp(min=1) * _sequence_count(layout))
    return layout.spread(per_sequence)


def seq_mean_token_sum_norm(
    layout: Layout, loss_scale_factor: float | None
) -> Float[Tensor, " tok"]:
    """Mean over sequences of the sum over tokens, over a constant (Dr. GRPO, arXiv:2503.20783)."""
    if loss_scale_factor is None:
        raise UserError(
            "loss_scale_factor",
            None,
            "seq-mean-token-sum-norm divides by a constant length, and packed tokens have none",
            "set actor_rollout_ref.actor.loss_scale_factor, for example to max_response_length",
        )
    require_positive("loss_scale_factor", loss_scale_factor)
    return seq_mean_token_sum(layout, None) / loss_scale_factor


AGGREGATIONS: dict[str, Callable[[Layout, float | None], Tensor]] = {
    "token-mean": token_mean,
    "token-sum": token_sum,
    "seq-mean-token-sum": seq_mean_token_sum,
    "seq-mean-token-mean": seq_mean_token_mean,
    "seq-mean-token-sum-norm": seq_mean_token_sum_norm,
}


def aggregation_weights(
    mode: str,
    layout: Layout,
    *,
    loss_scale_factor: float | None = None,
    dtype: torch.dtype = torch.float32,
) -> Float[Tensor, " tok"]:
    """Weight of each token of one whole optimizer step; 0 on masked tokens.

    Sequences without a trainable token count nowhere. `loss_scale_factor` is read by
    `seq-mean-token-sum-norm` alone. Computed in float64, then cast.

    Example:
        >>> layout = Layout(mask=torch.tensor([True, True, False, True]),
        ...                 offsets=torch.tensor([0, 3, 4]), groups=torch.tensor([0, 0]))
        >>> aggregation_weights("seq-mean-token-mean", layout).tolist()
        [0.25, 0.25, 0.0, 0.5]
    """
    if mode not in AGGREGATIONS:
        raise UserError(FIELD, mode, "no such aggregation", did_you_mean(mode, AGGREGATIONS))
    return AGGREGATIONS[mode](layout, loss_scale_factor).to(dtype)
