"""Rejection: which tokens stay in the loss when trainer and sampler disagree too much.

Three measures of a log-ratio ℓ = log π_old - log π_rollout, all 0 when the two agree (Schulman,
"Approximating KL divergence"): k1 = -ℓ, k2 = ℓ²/2, k3 = e^ℓ - 1 - ℓ.
"""

import math
from dataclasses import dataclass
from typing import final

from jaxtyping import Bool, Float
from torch import Tensor

from luyen.algorithms.checks import require_same_shape
from luyen.algorithms.correction.bounds import LOG_LIMIT, Band, ordered_band, read_threshold
from luyen.algorithms.layout import Layout
from luyen.base.errors import UserError
from luyen.base.suggest import did_you_mean
from luyen.config.catalog import REJECTION_CRITERIA


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RejectionRule:
    """One option with its bounds on the statistic.

    Example:
        >>> rejection_rules("seq_mean_k3", 0.01)
        (RejectionRule(option='seq_mean_k3', low=None, high=0.01),)
    """

    option: str
    """One of the catalogue's `REJECTION_CRITERIA`: how a measure is gathered, and which measure."""
    low: float | None
    """Smallest statistic kept; None where the statistic cannot be too small (k2, k3)."""
    high: float
    """Largest statistic kept."""

    @property
    def per_token(self) -> bool:
        """Whether it judges tokens one by one instead of whole sequences."""
        return self.option.startswith("token")


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


def rejection_rules(
    rollout_rs: str, rollout_rs_threshold: float | str | None
) -> tuple[RejectionRule, ...]:
    """The rules a comma list names, with one threshold for all of them or one for each."""
    options = [option.strip() for option in rollout_rs.split(",") if option.strip()]
    if not options:
        raise UserError(
            "rollout_rs",
            rollout_rs,
            "it names no option",
            "known: " + ", ".join(REJECTION_CRITERIA),
        )
    for option in options:
        if option not in REJECTION_CRITERIA:
            why = f"no rejection option is called {option!r}"
            raise UserError("rollout_rs", rollout_rs, why, did_you_mean(option, REJECTION_CRITERIA))
    if len(set(options)) < len(options):
        raise UserError("rollout_rs", rollout_rs, "an option is named twice", "name it once")
    thresholds = threshold_list(rollout_rs_threshold, len(options))
    return tuple(make_rule(o, t) for o, t in zip(options, thresholds, strict=True))


def threshold_list(value: float | str | None, count: int) -> list[float | str]:
    """One threshold per option: a single one is repeated, a comma list must have `count` parts."""
    field = "rollout_rs_threshold"
    if value is None:
        fix = 'pass a number, or "lo_hi" for k1 options'
        raise UserError(field, None, "rollout_rs rejects nothing without a threshold", fix)
    if not isinstance(value, str):
        return [value] * count
    parts: list[float | str] = [part.strip() for part in value.split(",")]
    if len(parts) == 1:
        return parts * count
    if len(parts) != count:
        why = f"it lists {len(parts)} thresholds for {count} options"
        raise UserError(field, value, why, "pass one threshold, or one for each option")
    return parts


def make_rule(option: str, value: float | str) -> RejectionRule:
    """The rule of one option; k1 takes a band of ratios, k2 and k3 one upper bound."""
    field = "rollout_rs_threshold"
    threshold = read_threshold(field, value)
    if option.endswith("k1"):
        band = threshold
        if not isinstance(band, Band):
            band = ordered_band(field, value, 1.0 / band, band)
        return RejectionRule(option=option, low=math.log(band.low), high=math.log(band.high))
    if isinstance(threshold, Band):
        why = f"{option} is never negative: it takes one upper bound, not a band"
        raise UserError(field, value, why, "pass one number for it")
    return RejectionRule(option=option, low=None, high=threshold)
