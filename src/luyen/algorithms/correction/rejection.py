"""Rejection: which tokens stay in the loss when trainer and sampler disagree too much.

Three measures of a log-ratio ℓ = log π_old - log π_rollout, all 0 when the two agree (Schulman,
"Approximating KL divergence"): k1 = -ℓ, k2 = ℓ²/2, k3 = e^ℓ - 1 - ℓ.
"""

from jaxtyping import Bool, Float
from torch import Tensor

from luyen.algorithms.checks import require_same_shape
from luyen.algorithms.correction.limits import LOG_LIMIT
from luyen.algorithms.layout import Layout
from luyen.config.thresholds import RejectionRule, rejection_rules


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
