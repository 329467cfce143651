"""The same mathematics for `[batch, time]` tensors with masks: flatten, call, unflatten.

Inputs are checked by name at the door: shapes, dtypes, and finite numbers wherever the mask is
true. What masked positions hold does not matter. Knobs carry the name of their config key.
"""

from collections.abc import Hashable, Iterable, Mapping
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
from luyen.algorithms.policy_losses import PolicyInputs, TokenLoss, policy_losses
from luyen.algorithms.value import value_loss as flat_value_loss
from luyen.base.errors import UserError

Groups = Tensor | Iterable[Hashable]


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
    clean = _mask(mask)
    layout = _layout(clean, groups)
    parts = components or {}
    inputs = CreditInputs(
        rewards=_rewards(rewards, clean).flatten(),
        layout=layout,
        values=_stream("values", values, clean),
        baselines=_per_row("baselines", baselines, clean),
        components={k: _row(f"components[{k!r}]", v, clean) for k, v in parts.items()} or None,
        old_logp=_stream("old_logp", old_logp, clean),
        sum_pi_squared=_stream("sum_pi_squared", sum_pi_squared, clean),
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
    clean = _mask(mask)
    inputs = PolicyInputs(
        logp=_required("logp", logp, clean),
        old_logp=_required("old_logp", old_logp, clean),
        advantages=_required("advantages", advantages, clean),
        layout=_layout(clean, range(clean.shape[0])),
        rollout_logp=_stream("rollout_logp", rollout_logp, clean),
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
    clean = _mask(mask)
    layout = _layout(clean, range(clean.shape[0]))
    token_loss = flat_value_loss(
        _required("values", values, clean),
        _required("old_values", old_values, clean),
        _required("returns", returns, clean),
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
    clean = _mask(mask)
    correction = correct.rollout_correction(
        _required("old_logp", old_logp, clean),
        _required("rollout_logp", rollout_logp, clean),
        _layout(clean, range(clean.shape[0])),
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


def _mask(mask: Tensor) -> Tensor:
    """The mask as booleans; a UserError unless it is `[batch, time]` of zeros and ones."""
    if mask.dim() != 2 or mask.shape[1] == 0:
        why = "it must be [batch, time] with at least one position"
        raise UserError("mask", tuple(mask.shape), why, "pass one row per sequence")
    odd = (mask != 0) & (mask != 1)
    if bool(odd.any()):
        why = "a mask holds 0 and 1 only"
        raise UserError("mask", mask[odd][0].item(), why, "pass weights as rollout_is_weights")
    return mask.bool()


def _layout(mask: Tensor, groups: Groups) -> Layout:
    """Rows as sequences of the padded width, one after the other."""
    batch, width = mask.shape
    if isinstance(groups, Tensor):
        rows = mask.new_zeros(batch)
        require_same_shape("groups", groups, "the rows of mask", rows)
    labels: list[Hashable] = (
        [x.item() for x in groups] if isinstance(groups, Tensor) else list(groups)
    )
    if len(labels) != batch:
        why = f"mask {tuple(mask.shape)} has {batch} rows, and there are {len(labels)} labels"
        raise UserError("groups", len(labels), why, "pass one label per row")
    numbers: dict[Hashable, int] = {}
    index = [numbers.setdefault(label, len(numbers)) for label in labels]
    return Layout(
        mask=mask.flatten(),
        offsets=torch.arange(batch + 1, device=mask.device) * width,
        groups=torch.tensor(index, dtype=torch.int64, device=mask.device),
    )


def _required(name: str, x: Tensor, mask: Tensor) -> Tensor:
    """x flattened, after checking its dtype, its shape, and that it is finite on the mask."""
    require_float(name, x)
    require_same_shape(name, x, "mask", mask)
    require_finite(name, x.detach(), mask)
    return x.flatten()


def _stream(name: str, x: Tensor | None, mask: Tensor) -> Tensor | None:
    """`_required`, or None for a stream that was not given."""
    return None if x is None else _required(name, x, mask)


def _weights(x: Tensor | None, mask: Tensor) -> Tensor | None:
    """Importance weights: a stream that is nowhere negative on the mask."""
    weights = _stream("rollout_is_weights", x, mask)
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


def _row(name: str, x: Tensor, mask: Tensor) -> Tensor:
    """One finite number per row."""
    require_float(name, x)
    require_same_shape(name, x, "the rows of mask", mask.new_zeros(mask.shape[0]))
    require_finite(name, x.detach())
    return x


def _per_row(name: str, x: Tensor | None, mask: Tensor) -> Tensor | None:
    """`_row`, or None for numbers that were not given."""
    return None if x is None else _row(name, x, mask)


def _rewards(rewards: Tensor, mask: Tensor) -> Tensor:
    """Rewards per token. NaN on a masked token is no reward; infinity is refused anywhere."""
    if rewards.dim() == 1:
        row = _row("rewards", rewards, mask)
        columns = torch.arange(mask.shape[1], device=mask.device)
        last = torch.where(mask, columns, -1).amax(1)
        last = torch.where(last < 0, mask.shape[1] - 1, last)
        return torch.where(columns == last[:, None], row[:, None], 0.0)
    require_float("rewards", rewards)
    require_same_shape("rewards", rewards, "mask", mask)
    require_finite("rewards", rewards, mask | ~rewards.isnan())
    return rewards
