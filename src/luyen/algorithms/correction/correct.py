"""Rollout correction as a whole: weights, what is kept, what happened; and verl's presets."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import final

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from luyen.algorithms.checks import require_finite, require_float, require_same_shape
from luyen.algorithms.correction.importance import (
    batch_norm_factor,
    importance_weights,
    kept_by_all,
    read_limits,
)
from luyen.algorithms.correction.metrics import (
    importance_metrics,
    mismatch_metrics,
    rejection_metrics,
)
from luyen.algorithms.layout import Layout
from luyen.base.errors import UserError, did_you_mean
from luyen.config.catalog import rejection_rules


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


# Settings of rollout correction that have a name in verl, as the keys of its config block.

PresetValue = str | float | bool | None

_TOKEN_TIS = {"rollout_is": "token", "rollout_is_threshold": 2.0}
_SEQ_TIS = {"rollout_is": "sequence", "rollout_is_threshold": 2.0}
_ICEPOP = {"rollout_is": "token", "rollout_is_threshold": "0.5_5.0"}
_SEQ_RS = {"rollout_rs": "seq_sum_k1", "rollout_rs_threshold": "0.5_2.0"}
_GEO_RS = {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.999_1.001"}
_K3_RS = {"rollout_rs": "seq_mean_k3", "rollout_rs_threshold": 0.01}
_PPO = {"bypass_mode": True, "loss_type": "ppo_clip"}
_PG = {"bypass_mode": True, "loss_type": "reinforce"}


def _preset(*parts: Mapping[str, PresetValue]) -> Mapping[str, PresetValue]:
    """All the keys of the parts, frozen; keys that no part names are off."""
    hparams: dict[str, PresetValue] = {"rollout_is": None, "rollout_rs": None, "bypass_mode": False}
    for part in parts:
        hparams |= part
    return MappingProxyType(hparams)


PRESETS: Mapping[str, Mapping[str, PresetValue]] = MappingProxyType(
    {
        "disabled": _preset(),
        "decoupled_token_is": _preset(_TOKEN_TIS),
        "decoupled_seq_is": _preset(_SEQ_TIS),
        "decoupled_token_icepop": _preset(_ICEPOP),
        "decoupled_seq_is_rs": _preset(_SEQ_TIS, _SEQ_RS),
        "decoupled_geo_rs": _preset(_GEO_RS),
        "decoupled_geo_rs_seq_tis": _preset(_GEO_RS, _SEQ_TIS),
        "decoupled_geo_rs_token_tis": _preset(_GEO_RS, _TOKEN_TIS),
        "decoupled_k3_rs": _preset(_K3_RS),
        "decoupled_k3_rs_seq_tis": _preset(_K3_RS, _SEQ_TIS),
        "decoupled_k3_rs_token_tis": _preset(_K3_RS, _TOKEN_TIS),
        "bypass_ppo_clip": _preset(_PPO),
        "bypass_ppo_clip_geo_rs": _preset(_PPO, _GEO_RS),
        "bypass_ppo_clip_k3_rs": _preset(_PPO, _K3_RS),
        "bypass_pg_is": _preset(_PG, _SEQ_TIS),
        "bypass_pg_token_icepop": _preset(_PG, _ICEPOP),
        "bypass_pg_geo_rs": _preset(_PG, _GEO_RS),
        "bypass_pg_geo_rs_seq_tis": _preset(_PG, _GEO_RS, _SEQ_TIS),
        "bypass_pg_geo_rs_token_tis": _preset(_PG, _GEO_RS, _TOKEN_TIS),
    }
)
"""Name to keys of `algorithm.rollout_correction`."""


def correction_preset(name: str) -> Mapping[str, PresetValue]:
    """The keys a preset sets; a UserError with near names if there is none of this name.

    Example:
        >>> correction_preset("decoupled_token_is")["rollout_is"]
        'token'
    """
    if name not in PRESETS:
        why = "no rollout-correction preset has this name"
        raise UserError("rollout_correction", name, why, did_you_mean(name, PRESETS))
    return PRESETS[name]
