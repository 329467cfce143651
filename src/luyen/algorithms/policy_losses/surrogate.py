"""What surrogates share: the clip range, the correction weights, and two common metrics."""

from jaxtyping import Bool, Float
from torch import Tensor

from luyen.algorithms.knobs import require_not_negative
from luyen.algorithms.policy_losses.inputs import PolicyInputs
from luyen.algorithms.statistic import Average


def clip_range(
    clip_ratio: float, clip_ratio_low: float | None, clip_ratio_high: float | None
) -> tuple[float, float]:
    """(ε_low, ε_high): each side falls back to `clip_ratio`. A negative side is refused."""
    low = clip_ratio if clip_ratio_low is None else clip_ratio_low
    high = clip_ratio if clip_ratio_high is None else clip_ratio_high
    require_not_negative("clip_ratio" if clip_ratio_low is None else "clip_ratio_low", low)
    require_not_negative("clip_ratio" if clip_ratio_high is None else "clip_ratio_high", high)
    return low, high


def corrected(per_token: Float[Tensor, " tok"], inputs: PolicyInputs) -> Float[Tensor, " tok"]:
    """The loss times the rollout-correction weight of its token, if there are weights."""
    return per_token if inputs.is_weights is None else per_token * inputs.is_weights


def ppo_kl(inputs: PolicyInputs) -> Average:
    """Mean of log π_old - log π over trainable tokens: how far the policy has moved."""
    return Average.over(inputs.old_logp - inputs.logp, inputs.layout.mask)


def fraction(flags: Bool[Tensor, " tok"], inputs: PolicyInputs) -> Average:
    """Share of the trainable tokens that are flagged."""
    return Average.over(flags.to(inputs.logp.dtype), inputs.layout.mask)
