"""The critic's loss: squared error to the returns, with a trust region around the old value."""

import torch
from jaxtyping import Float
from torch import Tensor

from luyen.algorithms.aggregation import Average
from luyen.algorithms.checks import require_positive
from luyen.algorithms.layout import Layout
from luyen.algorithms.policy_losses.inputs import TokenLoss


def value_loss(
    values: Float[Tensor, " tok"],
    old_values: Float[Tensor, " tok"],
    returns: Float[Tensor, " tok"],
    layout: Layout,
    *,
    cliprange_value: float | None = 0.5,
) -> TokenLoss:
    """½ max((v - R)², (clip(v, v_old ± cliprange_value) - R)²) of each token; 0 on masked tokens.

    `None` means no clipping. What masked positions hold, NaN included, reaches neither the value
    nor the gradient.
    """
    values, old_values, returns = (layout.on_mask(x) for x in (values, old_values, returns))
    plain = (values - returns).square()
    worst = plain
    if cliprange_value is not None:
        require_positive("cliprange_value", cliprange_value)
        near = values.clamp(old_values - cliprange_value, old_values + cliprange_value)
        worst = torch.maximum(plain, (near - returns).square())
    clipped = (worst > plain).to(values.dtype)
    metrics = {
        "critic/vf_clipfrac": Average.over(clipped, layout.mask),
        "critic/vpred_mean": Average.over(values, layout.mask),
    }
    return TokenLoss(per_token=0.5 * worst, metrics=metrics)


def explained_variance(
    values: Float[Tensor, " tok"], returns: Float[Tensor, " tok"], layout: Layout
) -> float | None:
    """1 - Var(R - v) / Var(R) over the mask: 1 is perfect, below 0 is worse than the mean return.

    None where the returns do not vary: there is nothing to explain.
    """
    wanted, found = returns[layout.mask].double(), values[layout.mask].double()
    spread = wanted.var(correction=0)
    if not bool(spread > 0):
        return None
    return float(1.0 - (wanted - found).var(correction=0) / spread)
