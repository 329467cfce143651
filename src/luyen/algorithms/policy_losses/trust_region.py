"""DPPO: tokens outside a divergence trust region get no gradient (arXiv:2602.04879).

The clip_ratio keys are thresholds on a divergence of the sampled token's probability, not on its
ratio: a rare token may change its ratio a lot while the distribution hardly moves.
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
    policy_losses,
    ppo_kl,
    token_ratio,
)


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
