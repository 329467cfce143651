"""The same mathematics for `[batch, time]` tensors with masks: flatten, call, unflatten.

Inputs are checked by name at the door: shapes, dtypes, and finite numbers wherever the mask is
true. What masked positions hold does not matter. Knobs carry the name of their config key.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from luyen.algorithms.advantages import CreditInputs, adv_estimators
from luyen.algorithms.aggregation import aggregation_weights
from luyen.algorithms.checks import require_finite, require_float, require_same_shape
from luyen.algorithms.correction import correct
from luyen.algorithms.kl import kl_penalty
from luyen.algorithms.knobs import knob_names, read_by, require_known, require_not_negative
from luyen.algorithms.layout import Layout
from luyen.algorithms.objective import default_aggregation, loss_knobs, step_statistics
from luyen.algorithms.padded_preference import preference_loss, unpaired_preference_loss
from luyen.algorithms.policy_losses import PolicyInputs, TokenLoss, policy_losses
from luyen.algorithms.rows import (
    Groups,
    clean_mask,
    optional_numbers,
    optional_stream,
    required_stream,
    row_layout,
    row_numbers,
)
from luyen.algorithms.value import value_loss as flat_value_loss
from luyen.base.errors import UserError

__all__ = [
    "advantage",
    "kl",
    "policy_loss",
    "preference_loss",
    "rollout_correction",
    "unpaired_preference_loss",
    "value_loss",
]


def advantage(
    name: str,
    rewards: Tensor,
    mask: Tensor,
    groups: Groups,
    *,
    values: Tensor | None = None,
    baselines: Tensor | None = None,
    components: Mapping[str, Tensor] | None = None,
    old_logp: Tensor | None = None,
    ref_logp: Tensor | None = None,
    sum_pi_squared: Tensor | None = None,
    rollout_is_weights: Tensor | None = None,
    turns: Tensor | None = None,
    **knobs: Any,
) -> tuple[Tensor, Tensor]:
    """(advantages, returns), both `[batch, time]`, by the estimator of this name.

    `rewards` is `[batch, time]`, or `[batch]`: then each stands on the last trainable token of its
    row. `groups` labels rows; equal labels (numbers, strings, ...) are samples of one prompt.
    `turns` are integers `[batch, time]`, the assistant turn of each token; None: one turn.
    """
    estimator = adv_estimators.get(name)
    require_known(f"advantage estimator `{name}`", knobs, knob_names(estimator))
    clean = clean_mask(mask)
    layout = row_layout(clean, groups)
    parts = components or {}
    inputs = CreditInputs(
        rewards=_rewards(rewards, clean).flatten(),
        layout=layout,
        values=optional_stream("values", values, clean),
        baselines=optional_numbers("baselines", baselines, clean),
        components={k: row_numbers(f"components[{k!r}]", v, clean) for k, v in parts.items()}
        or None,
        old_logp=optional_stream("old_logp", old_logp, clean),
        ref_logp=optional_stream("ref_logp", ref_logp, clean),
        sum_pi_squared=optional_stream("sum_pi_squared", sum_pi_squared, clean),
        is_weights=_weights(rollout_is_weights, clean),
        positions=torch.arange(clean.shape[1], device=clean.device).repeat(clean.shape[0]),
        turns=_turns(turns, clean),
    )
    credit = estimator(inputs, **knobs)
    return credit.advantages.view(clean.shape), credit.returns.view(clean.shape)


def policy_loss(
    name: str,
    logp: Tensor,
    old_logp: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    aggregation: str | None = None,
    loss_scale_factor: float | None = None,
    rollout_logp: Tensor | None = None,
    rollout_is_weights: Tensor | None = None,
    seed: int = 0,
    **knobs: Any,
) -> tuple[Tensor, dict[str, float]]:
    """(loss, metrics) of one whole optimizer step given as one batch.

    `aggregation` None is the loss's own: token-mean for most, seq-mean-token-mean for gspo,
    gspo_token, sapo and geo_mean. `loss_scale_factor` defaults to the padded width. `seed` is for
    losses that draw tokens (clip_cov).
    """
    require_known(f"policy loss `{name}`", knobs, loss_knobs(name))
    clean = clean_mask(mask)
    inputs = PolicyInputs(
        logp=required_stream("logp", logp, clean),
        old_logp=required_stream("old_logp", old_logp, clean),
        advantages=required_stream("advantages", advantages, clean),
        layout=row_layout(clean, range(clean.shape[0])),
        rollout_logp=optional_stream("rollout_logp", rollout_logp, clean),
        is_weights=_weights(rollout_is_weights, clean),
    )
    statistics = step_statistics(name, inputs, seed=seed, knobs=knobs)
    loss = policy_losses.get(name)
    token_loss = loss(replace(inputs, statistics=statistics), **read_by(loss, knobs))
    mode = aggregation or default_aggregation(name)
    return _reduced(token_loss, inputs.layout, mode, loss_scale_factor, clean.shape[1])


def kl(kind: str, logp: Tensor, ref_logp: Tensor) -> Tensor:
    """KL penalty of each token; `full` and `full+` take logits `[batch, time, vocab]`."""
    require_float("logp", logp)
    require_float("ref_logp", ref_logp)
    require_same_shape("ref_logp", ref_logp, "logp", logp)
    return kl_penalty(kind, logp, ref_logp)


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    mask: Tensor,
    *,
    clip: float | None = 0.5,
    aggregation: str = "token-mean",
    loss_scale_factor: float | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """(loss, metrics) of the critic; `clip` is `critic.cliprange_value`, None: no clipping."""
    clean = clean_mask(mask)
    layout = row_layout(clean, range(clean.shape[0]))
    token_loss = flat_value_loss(
        required_stream("values", values, clean),
        required_stream("old_values", old_values, clean),
        required_stream("returns", returns, clean),
        layout,
        cliprange_value=clip,
    )
    return _reduced(token_loss, layout, aggregation, loss_scale_factor, clean.shape[1])


def rollout_correction(
    old_logp: Tensor, rollout_logp: Tensor, mask: Tensor, **knobs: Any
) -> tuple[Tensor, Tensor, dict[str, float]]:
    """(weights, mask of the tokens kept, metrics) between the trainer and the sampler."""
    known = knob_names(correct.rollout_correction)
    require_known("rollout correction", knobs, known)
    clean = clean_mask(mask)
    correction = correct.rollout_correction(
        required_stream("old_logp", old_logp, clean),
        required_stream("rollout_logp", rollout_logp, clean),
        row_layout(clean, range(clean.shape[0])),
        **knobs,
    )
    weights, keep = correction.weights.view(clean.shape), correction.keep.view(clean.shape)
    return weights, keep, dict(correction.metrics)


def _reduced(
    loss: TokenLoss, layout: Layout, mode: str, loss_scale_factor: float | None, width: int
) -> tuple[Tensor, dict[str, float]]:
    """The aggregated loss, and its metrics as floats."""
    factor = float(width) if loss_scale_factor is None else loss_scale_factor
    dtype = torch.promote_types(loss.per_token.dtype, torch.float32)
    weights = aggregation_weights(mode, layout, loss_scale_factor=factor, dtype=dtype)
    metrics = {name: average.value() for name, average in loss.metrics.items()}
    return (weights * loss.per_token).sum(), metrics


def _weights(x: Tensor | None, mask: Tensor) -> Tensor | None:
    """Importance weights: a stream that is nowhere negative on the mask."""
    weights = optional_stream("rollout_is_weights", x, mask)
    if weights is not None:
        lowest = torch.where(mask.flatten(), weights.detach(), 0.0).min() if mask.numel() else 0.0
        require_not_negative("rollout_is_weights", float(lowest))
    return weights


def _turns(x: Tensor | None, mask: Tensor) -> Tensor | None:
    """Turns flattened, after checking that they are integers of the mask's shape."""
    if x is None:
        return None
    require_same_shape("turns", x, "mask", mask)
    if x.is_floating_point() or x.dtype == torch.bool:
        raise UserError("turns", str(x.dtype), "turns are counted from 0", "pass integers")
    return x.flatten()


def _rewards(rewards: Tensor, mask: Tensor) -> Tensor:
    """Rewards per token. NaN on a masked token is no reward; infinity is refused anywhere."""
    if rewards.dim() == 1:
        row = row_numbers("rewards", rewards, mask)
        columns = torch.arange(mask.shape[1], device=mask.device)
        last = torch.where(mask, columns, -1).amax(1)
        last = torch.where(last < 0, mask.shape[1] - 1, last)
        return torch.where(columns == last[:, None], row[:, None], 0.0)
    require_float("rewards", rewards)
    require_same_shape("rewards", rewards, "mask", mask)
    require_finite("rewards", rewards, mask | ~rewards.isnan())
    return rewards
