"""Losses with a trust region: PPO with its dual clip, GSPO, the geometric mean of GMPO, and DPPO.

DPPO (arXiv:2602.04879) gives tokens outside a divergence trust region no gradient. Its clip_ratio
keys are thresholds on a divergence of the sampled token's probability, not on its ratio: a rare
token may change its ratio a lot while the distribution hardly moves.
"""

import torch
from jaxtyping import Bool, Float
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


def _probabilities(
    inputs: PolicyInputs,
) -> tuple[Float[Tensor, " tok"], Float[Tensor, " tok"]]:
    """(π, π_old) of the sampled tokens, detached, at most 1 whatever the rounding of log π."""
    now, before = inputs.logp.detach().exp(), inputs.old_logp.detach().exp()
    return now.clamp(max=1.0), before.clamp(max=1.0)


def _truncated(
    inputs: PolicyInputs, inside: Bool[Tensor, " tok"], clip_ratio_c: float
) -> TokenLoss:
    """-A·sg[min(r, C)]·log π on tokens inside the trust region, 0 outside."""
    require_positive("clip_ratio_c", clip_ratio_c, above=1.0)
    ratio = token_ratio(inputs.logp, inputs.old_logp).detach()
    weight = torch.where(inside, ratio.clamp(max=clip_ratio_c), 0.0)
    per_token = -inputs.advantages * weight * inputs.logp
    metrics = {
        "actor/ppo_kl": ppo_kl(inputs),
        "actor/dppo_masked_fraction": fraction(~inside, inputs),
        "actor/dppo_truncated_fraction": fraction(inside & (ratio > clip_ratio_c), inputs),
    }
    return TokenLoss(per_token=corrected(per_token, inputs), metrics=metrics)


@policy_losses.register("dppo_tv")
def dppo_tv(
    inputs: PolicyInputs,
    *,
    clip_ratio: float = 0.2,
    clip_ratio_low: float | None = None,
    clip_ratio_high: float | None = None,
    clip_ratio_c: float = 20.0,
) -> TokenLoss:
    """Truncated policy gradient where π - π_old is within total-variation thresholds.

    A > 0 trains while π - π_old <= ε_high, A <= 0 while π - π_old >= -ε_low.
    """
    low, high = clip_range(clip_ratio, clip_ratio_low, clip_ratio_high)
    now, before = _probabilities(inputs)
    moved = now - before
    inside = torch.where(inputs.advantages > 0, moved <= high, moved >= -low)
    return _truncated(inputs, inside, clip_ratio_c)


@policy_losses.register("dppo_kl")
def dppo_kl(
    inputs: PolicyInputs,
    *,
    clip_ratio: float = 0.2,
    clip_ratio_low: float | None = None,
    clip_ratio_high: float | None = None,
    clip_ratio_c: float = 20.0,
) -> TokenLoss:
    """Truncated policy gradient where the KL of "this token or another" is within thresholds.

    A token outside still trains when its gradient leads back: A > 0 with π <= π_old, or A <= 0
    with π >= π_old.
    """
    low, high = clip_range(clip_ratio, clip_ratio_low, clip_ratio_high)
    now, before = _probabilities(inputs)
    shift = (inputs.old_logp - inputs.logp).detach()
    rest = ((1.0 - before + 1e-8) / (1.0 - now + 1e-8)).log()
    divergence = before * shift + (1.0 - before) * rest
    rising = (divergence <= high) | (now <= before)
    falling = (divergence <= low) | (now >= before)
    inside = torch.where(inputs.advantages > 0, rising, falling)
    return _truncated(inputs, inside, clip_ratio_c)
