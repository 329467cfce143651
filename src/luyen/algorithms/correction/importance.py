"""Importance weights between trainer and sampler, and rejection where they disagree too much.

With ℓ = log π_old - log π_rollout (or log π - log π_rollout in bypass mode), the weight exp(ℓ)
turns an expectation under the sampler into one under the trainer. Truncation follows TIS (Ionides
2008; Yao et al. 2025), the two-sided band that drops tokens is IcePop.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from luyen.algorithms.checks import require_same_shape
from luyen.algorithms.layout import Layout
from luyen.base.errors import UserError, did_you_mean
from luyen.config.catalog import Band, RejectionRule, read_limits, rejection_rules

# The one safety bound of the correction.

LOG_LIMIT = 20.0
"""Log-ratios are cut at ±20 before `exp`, so no weight overflows (verl's safety bound)."""


LEVELS = ("token", "sequence", "geometric")
"""What one weight covers; `rollout_is` takes one of these names."""


def importance_weights(
    log_ratio: Float[Tensor, " tok"],
    layout: Layout,
    *,
    rollout_is: str,
    rollout_is_threshold: float | str = 2.0,
    rollout_is_floor: float | None = None,
) -> Float[Tensor, " tok"]:
    """Bounded weights, detached, exactly 0 on masked tokens whatever log_ratio holds there.

    A number C as threshold truncates, min(w, C), and `rollout_is_floor` then lifts what lies below
    it; a band "lo_hi" sets weights outside it to 0 and leaves the mask, hence every denominator,
    as it was.

    Example:
        >>> layout = Layout(mask=torch.tensor([True, True]), offsets=torch.tensor([0, 2]),
        ...                 groups=torch.tensor([0]))
        >>> importance_weights(torch.tensor([0.0, 5.0]), layout, rollout_is="token")
        tensor([1., 2.])
    """
    threshold, floor = read_limits(rollout_is_threshold, rollout_is_floor)
    weights = raw_weights(log_ratio, layout, rollout_is=rollout_is)
    if isinstance(threshold, Band):
        inside = (weights >= threshold.low) & (weights <= threshold.high)
        return torch.where(inside, weights, 0.0)
    return layout.on_mask(weights.clamp(min=floor, max=threshold))


def raw_weights(
    log_ratio: Float[Tensor, " tok"], layout: Layout, *, rollout_is: str
) -> Float[Tensor, " tok"]:
    """Weights before any threshold: exp of the clamped log-ratio of a token, of the sum over a
    sequence, or of the mean over a sequence; detached and 0 on masked tokens.

    The sum is the exact likelihood ratio of a sequence and its spread grows with length; the mean
    ("geometric") does not grow with length and is biased.
    """
    require_same_shape("log_ratio", log_ratio, "mask", layout.mask)
    clean = layout.on_mask(log_ratio.detach())
    if rollout_is == "token":
        return layout.on_mask(clean.clamp(-LOG_LIMIT, LOG_LIMIT).exp())
    if rollout_is == "sequence":
        return layout.spread(layout.sum(clean).clamp(-LOG_LIMIT, LOG_LIMIT).exp())
    if rollout_is == "geometric":
        return layout.spread(layout.mean(clean).clamp(-LOG_LIMIT, LOG_LIMIT).exp())
    why = "no weight covers such a unit"
    raise UserError("rollout_is", rollout_is, why, did_you_mean(rollout_is, LEVELS))


def batch_norm_factor(
    weights: Float[Tensor, " tok"], layout: Layout, *, rollout_is: str
) -> Float[Tensor, ""]:
    """The mean weight: over trainable tokens ("token"), or over the sequences that have any.

    Dividing by it makes the mean 1. It is 1 when nothing is trainable.
    """
    if rollout_is == "token":
        total, count = layout.on_mask(weights).sum(), layout.mask.sum()
    else:
        live = layout.lengths() > 0
        total, count = layout.mean(weights)[live].sum(), live.sum()
    return torch.where(count > 0, total / count.clamp(min=1), 1.0)


# Rejection: which tokens stay in the loss when trainer and sampler disagree too much.
#
# Three measures of a log-ratio ℓ = log π_old - log π_rollout, all 0 when the two agree
# (Schulman, "Approximating KL divergence"): k1 = -ℓ, k2 = ℓ²/2, k3 = e^ℓ - 1 - ℓ.


def keep_mask(
    log_ratio: Float[Tensor, " tok"],
    layout: Layout,
    *,
    rollout_rs: str,
    rollout_rs_threshold: float | str | None,
) -> Bool[Tensor, " tok"]:
    """The trainable tokens that pass every rule: a subset of the mask, which stays as it is.

    For k1, bounds "lo_hi" mean log lo <= -ℓ <= log hi, as in verl: they bound π_rollout / π_old,
    so the ratio π_old / π_rollout is kept in [1/hi, 1/lo]. One number u stands for 1/u .. u, where
    the mirror makes no difference.

    Example:
        >>> import torch
        >>> layout = Layout(mask=torch.tensor([True, True]), offsets=torch.tensor([0, 2]),
        ...                 groups=torch.tensor([0]))
        >>> keep_mask(torch.tensor([0.0, -1.0]), layout, rollout_rs="token_k1",
        ...           rollout_rs_threshold=2.0)
        tensor([ True, False])
    """
    return kept_by_all(rejection_rules(rollout_rs, rollout_rs_threshold), log_ratio, layout)


def kept_by_all(
    rules: tuple[RejectionRule, ...], log_ratio: Float[Tensor, " tok"], layout: Layout
) -> Bool[Tensor, " tok"]:
    """The trainable tokens that pass every rule of a list read before."""
    keep = layout.mask
    for rule in rules:
        keep = keep & kept_by(rule, log_ratio, layout)
    return keep


def kept_by(
    rule: RejectionRule, log_ratio: Float[Tensor, " tok"], layout: Layout
) -> Bool[Tensor, " tok"]:
    """The trainable tokens that pass one rule."""
    statistic = rule_statistic(rule, log_ratio, layout)
    passed = statistic <= rule.high
    if rule.low is not None:
        passed = passed & (statistic >= rule.low)
    return layout.mask & (passed if rule.per_token else passed[layout.segment])


def rule_statistic(
    rule: RejectionRule, log_ratio: Float[Tensor, " tok"], layout: Layout
) -> Float[Tensor, " units"]:
    """What the rule bounds: one number per token, or one per sequence; detached.

    A sequence without trainable tokens has no tokens to reject; its number carries no meaning.
    """
    require_same_shape("log_ratio", log_ratio, "mask", layout.mask)
    clean = layout.on_mask(log_ratio.detach()).clamp(-LOG_LIMIT, LOG_LIMIT)
    gather, measure = rule.option.rsplit("_", 1)
    match measure:
        case "k1":
            x = -clean
        case "k2":
            x = 0.5 * clean.square()
        case _:
            x = clean.expm1() - clean
    match gather:
        case "token":
            return x
        case "seq_sum":
            return layout.sum(x)
        case "seq_mean":
            return layout.mean(x)
        case _:
            return layout.max(x)
