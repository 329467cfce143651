"""Losses of answers that are marked good or bad, without partners: KTO, APO-zero and BCO.

x is log π/π_ref of an answer.
"""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import logsigmoid

from luyen.algorithms.knobs import require_not_negative, require_positive
from luyen.algorithms.preference.inputs import PreferenceLoss, UnpairedInputs, preference_losses
from luyen.algorithms.preference.report import answer_report, by_mark, over_all
from luyen.algorithms.statistic import Average
from luyen.base.errors import UserError


def _weighted(
    inputs: UnpairedInputs,
    good: Float[Tensor, " seq"],
    bad: Float[Tensor, " seq"],
    weights: tuple[float, float],
) -> Float[Tensor, " seq"]:
    """The loss of each answer by its mark, times the weight of the mark."""
    require_not_negative("desirable_weight", weights[0])
    require_not_negative("undesirable_weight", weights[1])
    return by_mark(inputs.desirable, weights[0] * good, weights[1] * bad)


def reference_point(inputs: UnpairedInputs) -> Float[Tensor, ""]:
    """KTO's z: the KL to the reference, max(0, mean of log π/π_ref over mismatched answers).

    It carries no gradient. The mean is over the whole optimizer step.
    """
    if inputs.mismatched is None or inputs.ref_mismatched is None:
        why = "kto estimates its reference point from answers after prompts of others"
        fix = "pass mismatched and ref_mismatched, or choose apo_zero_unpaired"
        raise UserError("mismatched", None, why, fix)
    gaps = inputs.mismatched - inputs.ref_mismatched
    return (gaps.sum() / max(gaps.numel(), 1)).clamp(min=0.0)


@preference_losses.register("kto")
def kto(
    inputs: UnpairedInputs,
    *,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> PreferenceLoss:
    """Good: λ_D·σ(-β(x - z)); bad: λ_U·σ(β(x - z)) (KTO, arXiv:2402.01306).

    z is over the whole step; TRL's is over one micro-batch of all ranks, so numbers agree where
    that is the whole step.
    """
    require_positive("beta", beta)
    point = reference_point(inputs)
    logit = beta * (inputs.ratio - point)
    weights = (desirable_weight, undesirable_weight)
    loss = _weighted(inputs, torch.sigmoid(-logit), torch.sigmoid(logit), weights)
    report = answer_report(inputs, loss, beta * inputs.ratio, beta * point)
    metrics = dict(report.metrics) | {"preference/kl": over_all(point[None])}
    return PreferenceLoss(loss=loss, rewards=report.rewards, metrics=metrics)


@preference_losses.register("apo_zero_unpaired")
def apo_zero_unpaired(
    inputs: UnpairedInputs,
    *,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> PreferenceLoss:
    """Good: λ_D·σ(-βx); bad: λ_U·σ(βx) (APO-zero, arXiv:2408.06266, for marked answers)."""
    require_positive("beta", beta)
    logit = beta * inputs.ratio
    weights = (desirable_weight, undesirable_weight)
    loss = _weighted(inputs, torch.sigmoid(-logit), torch.sigmoid(logit), weights)
    return answer_report(inputs, loss, logit, logit.new_zeros(()))


def step_rewards(inputs: UnpairedInputs, beta: float) -> Average:
    """Implicit rewards of this step and of all before it; keep it as the next step's `history`."""
    now = over_all(beta * inputs.ratio)
    return now if inputs.history is None else inputs.history.merge(now)


@preference_losses.register("bco")
def bco(
    inputs: UnpairedInputs,
    *,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> PreferenceLoss:
    """Good: -log σ(βx - δ); bad: -w·log σ(δ - βx) (BCO, arXiv:2404.04656).

    δ is the mean implicit reward of every answer seen so far, this step's included: `history`
    carries the earlier ones (`step_rewards` gives the next). w is `density_ratio`, p(good | prompt)
    over p(bad | prompt) from a classifier of the caller's, or 1: it weighs bad answers as if their
    prompts were those of the good ones. TRL updates δ by micro-batch; here it is by step.
    """
    require_positive("beta", beta)
    seen = step_rewards(inputs, beta)
    shift = seen.total / seen.count
    logit = beta * inputs.ratio - shift
    bad = -logsigmoid(-logit)
    if inputs.density_ratio is not None:
        bad = inputs.density_ratio * bad
    weights = (desirable_weight, undesirable_weight)
    loss = _weighted(inputs, -logsigmoid(logit), bad, weights)
    report = answer_report(inputs, loss, beta * inputs.ratio, shift)
    metrics = dict(report.metrics) | {"preference/reward_shift": over_all(shift[None])}
    return PreferenceLoss(loss=loss, rewards=report.rewards, metrics=metrics)
