"""Rollout correction as a whole: weights, what is kept, and what happened."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from luyen.algorithms.checks import require_finite, require_float, require_same_shape
from luyen.algorithms.correction.importance import (
    batch_norm_factor,
    importance_weights,
    read_limits,
)
from luyen.algorithms.correction.mismatch import mismatch_metrics
from luyen.algorithms.correction.rejection import kept_by_all
from luyen.algorithms.correction.weight_metrics import importance_metrics, rejection_metrics
from luyen.algorithms.layout import Layout
from luyen.config.thresholds import rejection_rules


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """What to multiply the loss of each token by, and which tokens stay in it.

    Example:
        >>> layout = Layout(mask=torch.tensor([True]), offsets=torch.tensor([0, 1]),
        ...                 groups=torch.tensor([0]))
        >>> x = torch.tensor([-1.0])
        >>> rollout_correction(x, x, layout).weights
        tensor([1.])
    """

    weights: Float[Tensor, " tok"]
    """Importance weight of each token, detached; 1 on the mask without `rollout_is`, 0 off it."""
    keep: Bool[Tensor, " tok"]
    """The mask without the rejected tokens: multiply the loss by it, do not replace the mask."""
    metrics: Mapping[str, float]
    """`rollout_corr/*` and `training/rollout_*`; empty when nothing is trainable."""


def rollout_correction(
    old_logp: Float[Tensor, " tok"],
    rollout_logp: Float[Tensor, " tok"],
    layout: Layout,
    *,
    rollout_is: str | None = None,
    rollout_is_threshold: float | str = 2.0,
    rollout_is_floor: float | None = None,
    rollout_is_batch_normalize: bool = False,
    rollout_rs: str | None = None,
    rollout_rs_threshold: float | str | None = None,
) -> Correction:
    """Weights, kept tokens and metrics of one batch, from ℓ = old_logp - rollout_logp.

    The layout's mask is never edited. Rejected tokens leave the loss through `keep`, while the
    mask still decides rewards, group statistics and denominators: a rejection can neither delete
    an outcome nor make the tokens that stay weigh more.
    """
    for name, stream in (("old_logp", old_logp), ("rollout_logp", rollout_logp)):
        require_float(name, stream)
        require_same_shape(name, stream, "mask", layout.mask)
        require_finite(name, stream, layout.mask)
    metrics = mismatch_metrics(old_logp, rollout_logp, layout)
    log_ratio = layout.on_mask(old_logp.detach() - rollout_logp.detach())
    weights, keep = layout.on_mask(torch.ones_like(log_ratio)), layout.mask
    if rollout_is is not None:
        threshold, floor = rollout_is_threshold, rollout_is_floor
        weights = importance_weights(
            log_ratio,
            layout,
            rollout_is=rollout_is,
            rollout_is_threshold=threshold,
            rollout_is_floor=floor,
        )
        metrics |= importance_metrics(
            weights, log_ratio, layout, rollout_is=rollout_is, limits=read_limits(threshold, floor)
        )
        if rollout_is_batch_normalize:
            weights, factor = normalized(weights, layout, rollout_is=rollout_is)
            metrics["rollout_corr/rollout_is_batch_norm_factor"] = factor
    if rollout_rs is not None:
        rules = rejection_rules(rollout_rs, rollout_rs_threshold)
        keep = kept_by_all(rules, log_ratio, layout)
        metrics |= rejection_metrics(rules, keep, log_ratio, layout)
    return Correction(weights=weights, keep=keep, metrics=metrics)


def normalized(
    weights: Float[Tensor, " tok"], layout: Layout, *, rollout_is: str
) -> tuple[Float[Tensor, " tok"], float]:
    """Weights divided by their mean, and that mean; untouched, with 1, when all of them are 0."""
    factor = batch_norm_factor(weights, layout, rollout_is=rollout_is)
    factor = torch.where(factor > 0.0, factor, 1.0)
    return weights / factor, float(factor)
