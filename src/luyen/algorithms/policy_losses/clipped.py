"""Clipped surrogates: PPO with its dual clip, GSPO, and the geometric mean of GMPO."""

import torch
from jaxtyping import Float
from torch import Tensor

from luyen.algorithms.checks import require_positive
from luyen.algorithms.policy_losses.inputs import (
    PolicyInputs,
    TokenLoss,
    clip_range,
    corrected,
    fraction,
    geometric_mean,
    policy_losses,
    ppo_kl,
    sequence_ratio,
    token_ratio,
)


def pessimistic(
    ratio: Float[Tensor, " tok"],
    advantages: Float[Tensor, " tok"],
    *,
    low: float,
    high: float,
    ratio_cap: float | None = None,
) -> tuple[Float[Tensor, " tok"], Float[Tensor, " tok"]]:
    """(unclipped, clipped) losses -A·r and -A·clip(r, 1-low, 1+high); PPO takes their maximum.

    `ratio_cap` bounds r from above in the unclipped term alone (two-sided clipping of INTELLECT-2,
    arXiv:2505.07291): a negative advantage then cannot push with an unbounded ratio.
    """
    capped = ratio
    if ratio_cap is not None:
        require_positive("ratio_cap", ratio_cap, above=1.0)
        capped = ratio.clamp(max=ratio_cap)
    return -advantages * capped, -advantages * ratio.clamp(1.0 - low, 1.0 + high)


@policy_losses.register("vanilla")
def vanilla(
    inputs: PolicyInputs,
    *,
    clip_ratio: float = 0.2,
    clip_ratio_low: float | None = None,
    clip_ratio_high: float | None = None,
    clip_ratio_c: float = 3.0,
    ratio_cap: float | None = None,
) -> TokenLoss:
    """PPO's clipped surrogate with dual clip (arXiv:1707.06347, arXiv:1912.09729).

    max(-A·r, -A·clip(r)), and never above -A·clip_ratio_c where A < 0.
    """
    low, high = clip_range(clip_ratio, clip_ratio_low, clip_ratio_high)
    require_positive("clip_ratio_c", clip_ratio_c, above=1.0)
    advantages = inputs.advantages
    ratio = token_ratio(inputs.logp, inputs.old_logp)
    plain, clipped = pessimistic(ratio, advantages, low=low, high=high, ratio_cap=ratio_cap)
    worst = torch.maximum(plain, clipped)
    ceiling = -advantages * clip_ratio_c
    negative = advantages < 0
    per_token = torch.where(negative, torch.minimum(worst, ceiling), worst)
    metrics = {
        "actor/ppo_kl": ppo_kl(inputs),
        "actor/pg_clipfrac": fraction(clipped > plain, inputs),
        "actor/pg_clipfrac_lower": fraction(negative & (worst > ceiling), inputs),
    }
    return TokenLoss(per_token=corrected(per_token, inputs), metrics=metrics)


@policy_losses.register("gspo")
@policy_losses.register("gspo_token")
def gspo(
    inputs: PolicyInputs,
    *,
    clip_ratio: float = 0.2,
    clip_ratio_low: float | None = None,
    clip_ratio_high: float | None = None,
    ratio_cap: float | None = None,
) -> TokenLoss:
    """Clipped surrogate on the length-normalised sequence ratio (GSPO, arXiv:2507.18071).

    This is the paper's GSPO-token, under both names: where the advantage is constant in a sequence
    it equals GSPO in value and in gradient, and it allows advantages per token. Its own aggregation
    is seq-mean-token-mean; another one is honoured.
    """
    low, high = clip_range(clip_ratio, clip_ratio_low, clip_ratio_high)
    ratio = sequence_ratio(inputs.logp, inputs.old_logp, inputs.layout)
    plain, clipped = pessimistic(ratio, inputs.advantages, low=low, high=high, ratio_cap=ratio_cap)
    metrics = {
        "actor/ppo_kl": ppo_kl(inputs),
        "actor/pg_clipfrac": fraction(clipped > plain, inputs),
    }
    worst = torch.maximum(plain, clipped)
    return TokenLoss(per_token=corrected(worst, inputs), metrics=metrics)


@policy_losses.register("geo_mean")
def geo_mean(
    inputs: PolicyInputs,
    *,
    clip_ratio: float = 0.2,
    clip_ratio_low: float | None = None,
    clip_ratio_high: float | None = None,
) -> TokenLoss:
    """-mean(A)·exp(mean clipped log-ratio) of each sequence, on each of its tokens (GMPO).

    Token log-ratios are clipped in log space on the pessimistic side (arXiv:2507.20673).
    Correction weights enter as their geometric mean over the sequence. Its own aggregation,
    seq-mean-token-mean, makes it exactly the mean over sequences; another one is honoured.
    """
    low, high = clip_range(clip_ratio, clip_ratio_low, clip_ratio_high)
    layout = inputs.layout
    log_ratio = inputs.logp - inputs.old_logp
    near = log_ratio.clamp(-low, high)
    sign = inputs.advantages.sign()
    pessimist = sign * torch.minimum(sign * log_ratio, sign * near)
    per_sequence = -layout.mean(inputs.advantages) * layout.mean(pessimist).exp()
    if inputs.is_weights is not None:
        per_sequence = per_sequence * geometric_mean(inputs.is_weights, layout)
    clipped = sign * near < sign * log_ratio
    metrics = {
        "actor/ppo_kl": ppo_kl(inputs),
        "actor/pg_clipfrac": fraction(clipped & (sign > 0), inputs),
        "actor/pg_clipfrac_lower": fraction(clipped & (sign < 0), inputs),
    }
    return TokenLoss(per_token=layout.spread(per_sequence), metrics=metrics)
