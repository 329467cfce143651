"""The same mathematics for `[batch, time]` tensors with masks: flatten, call, unflatten.

Inputs are checked by name: shapes, dtypes, and finite numbers wherever the mask is true. What
masked positions hold does not matter. Keyword hyperparameters are named like their config key.
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from luyen.algorithms.advantages import CreditInputs, adv_estimators
from luyen.algorithms.aggregation import aggregation_weights
from luyen.algorithms.checks import (
    hyperparameter_names,
    read_by,
    require_finite,
    require_float,
    require_known,
    require_not_negative,
    require_same_shape,
)
from luyen.algorithms.correction import correct
from luyen.algorithms.kl import kl_penalty
from luyen.algorithms.layout import Layout
from luyen.algorithms.objective import default_aggregation, loss_hyperparameters, step_statistics
from luyen.algorithms.policy_losses import PolicyInputs, TokenLoss, policy_losses
from luyen.algorithms.preference.inputs import PairInputs, PreferenceLoss, UnpairedInputs
from luyen.algorithms.preference.step import PreferenceObjective, sequence_sums, step_mean
from luyen.algorithms.value import value_loss as flat_value_loss
from luyen.base.errors import UserError

# Checks and flattening of `[batch, time]` tensors.

Groups = Tensor | Iterable[Hashable]


def clean_mask(mask: Tensor) -> Tensor:
    """The mask as booleans; a UserError unless it is `[batch, time]` of zeros and ones."""
    if mask.dim() != 2 or mask.shape[1] == 0:
        why = "it must be [batch, time] with at least one position"
        raise UserError("mask", tuple(mask.shape), why, "pass one row per sequence")
    odd = (mask != 0) & (mask != 1)
    if bool(odd.any()):
        why = "a mask holds 0 and 1 only"
        raise UserError("mask", mask[odd][0].item(), why, "pass weights as rollout_is_weights")
    return mask.bool()


def row_layout(mask: Tensor, groups: Groups) -> Layout:
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


def required_stream(name: str, x: Tensor, mask: Tensor) -> Tensor:
    """x flattened, after checking its dtype, its shape, and that it is finite on the mask."""
    require_float(name, x)
    require_same_shape(name, x, "mask", mask)
    require_finite(name, x.detach(), mask)
    return x.flatten()


def optional_stream(name: str, x: Tensor | None, mask: Tensor) -> Tensor | None:
    """`required_stream`, or None for a stream that was not given."""
    return None if x is None else required_stream(name, x, mask)


def row_numbers(name: str, x: Tensor, mask: Tensor) -> Tensor:
    """One finite number per row."""
    require_float(name, x)
    require_same_shape(name, x, "the rows of mask", mask.new_zeros(mask.shape[0]))
    require_finite(name, x.detach())
    return x


def optional_numbers(name: str, x: Tensor | None, mask: Tensor) -> Tensor | None:
    """`row_numbers`, or None for numbers that were not given."""
    return None if x is None else row_numbers(name, x, mask)


# Preference losses for `[batch, time]` tensors with masks; one call is one whole optimizer step.


def preference_loss(
    name: str | Sequence[str],
    chosen_logp: Tensor,
    rejected_logp: Tensor,
    chosen_mask: Tensor,
    rejected_mask: Tensor,
    *,
    ref_chosen_logp: Tensor | None = None,
    ref_rejected_logp: Tensor | None = None,
    margins: Tensor | None = None,
    loss_weights: Sequence[float] | None = None,
    ld_alpha: float | None = None,
    **hparams: Any,
) -> tuple[Tensor, dict[str, float]]:
    """(loss, metrics) of pairs: row i of the chosen tensors and row i of the rejected ones.

    The two sides may differ in width. Several names with `loss_weights` are a mixture. `margins` is
    one number per pair. `ld_alpha` weighs the tokens beyond the shorter answer of each pair.
    """
    objective = PreferenceObjective(
        losses=(name,) if isinstance(name, str) else tuple(name),
        loss_weights=None if loss_weights is None else tuple(loss_weights),
        ld_alpha=ld_alpha,
        hparams=hparams,
    )
    sides = clean_mask(chosen_mask), clean_mask(rejected_mask)
    if sides[0].shape[0] != sides[1].shape[0]:
        why = f"there are {sides[0].shape[0]} chosen rows"
        raise UserError("rejected_mask", tuple(sides[1].shape), why, "pass one row per pair")
    shared = torch.minimum(sides[0].sum(1), sides[1].sum(1))
    inputs = PairInputs(
        chosen=_sums("chosen_logp", chosen_logp, sides[0], objective, shared),
        rejected=_sums("rejected_logp", rejected_logp, sides[1], objective, shared),
        chosen_tokens=sides[0].sum(1),
        rejected_tokens=sides[1].sum(1),
        ref_chosen=_optional_sums("ref_chosen_logp", ref_chosen_logp, sides[0], objective, shared),
        ref_rejected=_optional_sums(
            "ref_rejected_logp", ref_rejected_logp, sides[1], objective, shared
        ),
        margins=optional_numbers("margins", margins, sides[0]),
    )
    return _reduced_pairs(objective(inputs))


def unpaired_preference_loss(
    name: str,
    logp: Tensor,
    ref_logp: Tensor,
    mask: Tensor,
    desirable: Tensor,
    *,
    mismatched_logp: Tensor | None = None,
    ref_mismatched_logp: Tensor | None = None,
    mismatched_mask: Tensor | None = None,
    density_ratio: Tensor | None = None,
    **hparams: Any,
) -> tuple[Tensor, dict[str, float]]:
    """(loss, metrics) of answers that `desirable` marks good (1) or bad (0), one row each.

    kto also reads answers after prompts that they do not belong to, as rows of their own mask.
    """
    objective = PreferenceObjective(losses=(name,), hparams=hparams)
    clean = clean_mask(mask)
    require_same_shape("desirable", desirable, "the rows of mask", clean[:, 0])
    other = clean if mismatched_mask is None else clean_mask(mismatched_mask)
    inputs = UnpairedInputs(
        logp=_sums("logp", logp, clean, objective),
        ref_logp=_sums("ref_logp", ref_logp, clean, objective),
        desirable=desirable.bool(),
        mismatched=_optional_sums("mismatched_logp", mismatched_logp, other, objective),
        ref_mismatched=_optional_sums("ref_mismatched_logp", ref_mismatched_logp, other, objective),
        density_ratio=optional_numbers("density_ratio", density_ratio, clean),
    )
    return _reduced_pairs(objective(inputs))


def _sums(
    name: str,
    logp: Tensor,
    mask: Tensor,
    objective: PreferenceObjective,
    shared: Tensor | None = None,
) -> Tensor:
    """Sum of each row over its mask, lighter beyond `shared` tokens where the objective says so."""
    layout = row_layout(mask, range(mask.shape[0]))
    weights = None if shared is None else objective.token_weights(layout, shared)
    return sequence_sums(required_stream(name, logp, mask), layout, weights)


def _optional_sums(
    name: str,
    logp: Tensor | None,
    mask: Tensor,
    objective: PreferenceObjective,
    shared: Tensor | None = None,
) -> Tensor | None:
    """`_sums`, or None for log-probabilities that were not given."""
    stream = optional_stream(name, logp, mask)
    return None if stream is None else _sums(name, stream.view(mask.shape), mask, objective, shared)


def _reduced_pairs(result: PreferenceLoss) -> tuple[Tensor, dict[str, float]]:
    """The mean loss, and its metrics as floats."""
    metrics = {name: average.value() for name, average in result.metrics.items()}
    return step_mean(result.loss), metrics


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
    **hparams: Any,
) -> tuple[Tensor, Tensor]:
    """(advantages, returns), both `[batch, time]`, by the estimator of this name.

    `rewards` is `[batch, time]`, or `[batch]`: then each stands on the last trainable token of its
    row. `groups` labels rows; equal labels (numbers, strings, ...) are samples of one prompt.
    `turns` are integers `[batch, time]`, the assistant turn of each token; None: one turn.
    """
    estimator = adv_estimators.get(name)
    require_known(f"advantage estimator `{name}`", hparams, hyperparameter_names(estimator))
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
    credit = estimator(inputs, **hparams)
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
    **hparams: Any,
) -> tuple[Tensor, dict[str, float]]:
    """(loss, metrics) of one whole optimizer step given as one batch.

    `aggregation` None is the loss's own: token-mean for most, seq-mean-token-mean for gspo,
    gspo_token, sapo and geo_mean. `loss_scale_factor` defaults to the padded width. `seed` is for
    losses that sample tokens (clip_cov).
    """
    require_known(f"policy loss `{name}`", hparams, loss_hyperparameters(name))
    clean = clean_mask(mask)
    inputs = PolicyInputs(
        logp=required_stream("logp", logp, clean),
        old_logp=required_stream("old_logp", old_logp, clean),
        advantages=required_stream("advantages", advantages, clean),
        layout=row_layout(clean, range(clean.shape[0])),
        rollout_logp=optional_stream("rollout_logp", rollout_logp, clean),
        is_weights=_weights(rollout_is_weights, clean),
    )
    statistics = step_statistics(name, inputs, seed=seed, hparams=hparams)
    loss = policy_losses.get(name)
    token_loss = loss(replace(inputs, statistics=statistics), **read_by(loss, hparams))
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
    old_logp: Tensor, rollout_logp: Tensor, mask: Tensor, **hparams: Any
) -> tuple[Tensor, Tensor, dict[str, float]]:
    """(weights, mask of the tokens kept, metrics) between the trainer and the sampler."""
    known = hyperparameter_names(correct.rollout_correction)
    require_known("rollout correction", hparams, known)
    clean = clean_mask(mask)
    correction = correct.rollout_correction(
        required_stream("old_logp", old_logp, clean),
        required_stream("rollout_logp", rollout_logp, clean),
        row_layout(clean, range(clean.shape[0])),
        **hparams,
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
