"""Bypass mode: the policy that sampled is the old policy; no old log-probabilities are computed.

Weights and rejection come from sg[log π] - log π_rollout at the current parameters. Rejection
multiplies the loss of a token; it never changes a denominator.
"""

from collections.abc import Mapping
from dataclasses import replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from luyen.algorithms.aggregation import Average
from luyen.algorithms.correction.importance import batch_norm_factor, importance_weights, keep_mask
from luyen.algorithms.policy_losses.clipped import vanilla
from luyen.algorithms.policy_losses.inputs import (
    PolicyInputs,
    TokenLoss,
    fraction,
    loss_statistics,
    policy_losses,
)
from luyen.algorithms.policy_losses.weighted import reinforce
from luyen.base.errors import UserError, did_you_mean

LOSS_TYPES = ("ppo_clip", "reinforce")


def _sampler(inputs: PolicyInputs) -> Float[Tensor, " tok"]:
    """Log-probability the rollout engine sampled with."""
    if inputs.rollout_logp is None:
        why = "bypass_mode takes the sampling policy as the old one, and its stream is missing"
        fix = "have the rollout engine return log-probabilities (rollout.calculate_log_probs: true)"
        raise UserError("rollout_logp", None, why, fix)
    return inputs.rollout_logp


def _weights(
    inputs: PolicyInputs, rollout_is: str, threshold: float | str, floor: float | None
) -> Float[Tensor, " tok"]:
    """Importance weights of the current policy against the one that sampled."""
    return importance_weights(
        inputs.logp.detach() - _sampler(inputs),
        inputs.layout,
        rollout_is=rollout_is,
        rollout_is_threshold=threshold,
        rollout_is_floor=floor,
    )


def _kept(
    inputs: PolicyInputs, rollout_rs: str | None, threshold: float | str | None
) -> Bool[Tensor, " tok"] | None:
    """Tokens that pass the rejection rules; None without any rule."""
    if rollout_rs is None:
        return None
    moved = inputs.logp.detach() - _sampler(inputs)
    return keep_mask(moved, inputs.layout, rollout_rs=rollout_rs, rollout_rs_threshold=threshold)


@loss_statistics.register("bypass_mode")
def bypass_statistics(
    inputs: PolicyInputs,
    *,
    seed: int,
    rollout_is: str | None = None,
    rollout_is_threshold: float | str = 2.0,
    rollout_is_floor: float | None = None,
    rollout_is_batch_normalize: bool = False,
) -> Mapping[str, Float[Tensor, ""]]:
    """`is_norm`, the mean weight of the whole step, when weights are to be divided by it."""
    del seed
    if rollout_is is None or not rollout_is_batch_normalize:
        return {}
    weights = _weights(inputs, rollout_is, rollout_is_threshold, rollout_is_floor)
    return {"is_norm": batch_norm_factor(weights, inputs.layout, rollout_is=rollout_is)}


def _mean_weight(inputs: PolicyInputs) -> Float[Tensor, ""]:
    """The divisor that the statistics pass found over the whole step."""
    if "is_norm" not in inputs.statistics:
        why = "rollout_is_batch_normalize divides by the mean weight of the whole step"
        fix = "run the statistics pass first and pass its streams as PolicyInputs.statistics"
        raise UserError("statistics", sorted(inputs.statistics), why, fix)
    return inputs.statistics["is_norm"]


def _reported(
    loss: TokenLoss,
    inputs: PolicyInputs,
    weights: Float[Tensor, " tok"] | None,
    keep: Bool[Tensor, " tok"] | None,
) -> TokenLoss:
    """The loss with rejected tokens at 0, and the metrics of the correction."""
    metrics, per_token = dict(loss.metrics), loss.per_token
    if weights is not None:
        metrics["rollout_corr/rollout_is_mean"] = Average.over(weights, inputs.layout.mask)
    if keep is not None:
        metrics["rollout_corr/rollout_rs_masked_fraction"] = fraction(~keep, inputs)
        per_token = torch.where(keep, per_token, 0.0)
    return TokenLoss(per_token=per_token, metrics=metrics)


@policy_losses.register("bypass_mode")
def bypass_mode(
    inputs: PolicyInputs,
    *,
    loss_type: str = "ppo_clip",
    rollout_is: str | None = None,
    rollout_is_threshold: float | str = 2.0,
    rollout_is_floor: float | None = None,
    rollout_is_batch_normalize: bool = False,
    rollout_rs: str | None = None,
    rollout_rs_threshold: float | str | None = None,
    clip_ratio: float = 0.2,
    clip_ratio_low: float | None = None,
    clip_ratio_high: float | None = None,
    clip_ratio_c: float = 3.0,
    ratio_cap: float | None = None,
) -> TokenLoss:
    """`ppo_clip`: vanilla with π_rollout as π_old. `reinforce`: -w·A·log π. Rejected tokens: 0.

    Under `ppo_clip` the ratio is the correction already: weights are measured, not applied.
    """
    if loss_type not in LOSS_TYPES:
        fix = did_you_mean(loss_type, LOSS_TYPES)
        raise UserError("loss_type", loss_type, "bypass_mode has no such loss", fix)
    seen = replace(inputs, old_logp=_sampler(inputs), is_weights=None)
    keep = _kept(inputs, rollout_rs, rollout_rs_threshold)
    weights = None
    if rollout_is is not None:
        weights = _weights(inputs, rollout_is, rollout_is_threshold, rollout_is_floor)
        weights = weights / _mean_weight(inputs) if rollout_is_batch_normalize else weights
    if loss_type == "reinforce":
        return _reported(reinforce(replace(seen, is_weights=weights)), inputs, weights, keep)
    loss = vanilla(
        seen,
        clip_ratio=clip_ratio,
        clip_ratio_low=clip_ratio_low,
        clip_ratio_high=clip_ratio_high,
        clip_ratio_c=clip_ratio_c,
        ratio_cap=ratio_cap,
    )
    return _reported(loss, inputs, weights, keep)
