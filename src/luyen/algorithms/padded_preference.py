"""Preference losses for `[batch, time]` tensors with masks (`luyen.algorithms.padded` offers them).

One call is one whole optimizer step.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from luyen.algorithms.checks import require_same_shape
from luyen.algorithms.preference.inputs import PairInputs, PreferenceLoss, UnpairedInputs
from luyen.algorithms.preference.length import sequence_sums
from luyen.algorithms.preference.step import PreferenceObjective, step_mean
from luyen.algorithms.rows import (
    clean_mask,
    optional_numbers,
    optional_stream,
    required_stream,
    row_layout,
)
from luyen.base.errors import UserError


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
    **knobs: Any,
) -> tuple[Tensor, dict[str, float]]:
    """(loss, metrics) of pairs: row i of the chosen tensors and row i of the rejected ones.

    The two sides may differ in width. Several names with `loss_weights` are a mixture. `margins` is
    one number per pair. `ld_alpha` weighs the tokens beyond the shorter answer of each pair.
    """
    objective = PreferenceObjective(
        losses=(name,) if isinstance(name, str) else tuple(name),
        loss_weights=None if loss_weights is None else tuple(loss_weights),
        ld_alpha=ld_alpha,
        knobs=knobs,
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
    return _reduced(objective(inputs))


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
    **knobs: Any,
) -> tuple[Tensor, dict[str, float]]:
    """(loss, metrics) of answers that `desirable` marks good (1) or bad (0), one row each.

    kto also reads answers after prompts that they do not belong to, as rows of their own mask.
    """
    objective = PreferenceObjective(losses=(name,), knobs=knobs)
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
    return _reduced(objective(inputs))


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


def _reduced(result: PreferenceLoss) -> tuple[Tensor, dict[str, float]]:
    """The mean loss, and its metrics as floats."""
    metrics = {name: average.value() for name, average in result.metrics.items()}
    return step_mean(result.loss), metrics
