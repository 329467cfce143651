"""Losses of each answer by its own log-ratio: NCA, BCO, SPPO, APO; KTO of marked answers.

c and r are log π/π_ref of the preferred and the other answer.
"""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import logsigmoid

from luyen.algorithms.aggregation import Average
from luyen.algorithms.checks import require_not_negative, require_positive
from luyen.algorithms.preference.inputs import (
    PairInputs,
    PreferenceLoss,
    UnpairedInputs,
    answer_report,
    by_mark,
    over_all,
    preference_losses,
    referenced_report,
)
from luyen.base.errors import UserError


@preference_losses.register("nca_pair")
def nca_pair(inputs: PairInputs, *, beta: float = 0.1) -> PreferenceLoss:
    """-log σ(βc) - ½·log σ(-βc) - ½·log σ(-βr) (NCA, arXiv:2402.05369).

    The preferred answer is pulled up to a finite log-ratio instead of being pushed apart alone.
    """
    require_positive("beta", beta)
    chosen, rejected = beta * inputs.chosen_ratio, beta * inputs.rejected_ratio
    noise = 0.5 * (logsigmoid(-chosen) + logsigmoid(-rejected))
    return referenced_report(inputs, -logsigmoid(chosen) - noise, beta)


@preference_losses.register("bco_pair")
def bco_pair(inputs: PairInputs, *, beta: float = 0.1) -> PreferenceLoss:
    """-log σ(βc) - log σ(-βr): a classifier of good and bad (BCO, arXiv:2404.04656).

    There is no reward shift here; the unpaired `bco` has it.
    """
    require_positive("beta", beta)
    chosen, rejected = beta * inputs.chosen_ratio, beta * inputs.rejected_ratio
    return referenced_report(inputs, -logsigmoid(chosen) - logsigmoid(-rejected), beta)


@preference_losses.register("sppo_hard")
def sppo_hard(inputs: PairInputs, *, beta: float = 0.1) -> PreferenceLoss:
    """(c - 1/(2β))² + (r + 1/(2β))²: SPPO with a win probability of 1 (arXiv:2405.00675)."""
    require_positive("beta", beta)
    goal = 0.5 / beta
    loss = (inputs.chosen_ratio - goal).square() + (inputs.rejected_ratio + goal).square()
    return referenced_report(inputs, loss, beta)


@preference_losses.register("apo_zero")
def apo_zero(inputs: PairInputs, *, beta: float = 0.1) -> PreferenceLoss:
    """σ(-βc) + σ(βr): good answers up, bad answers down (APO-zero, arXiv:2408.06266).

    For preferred answers that are better than what the policy writes.
    """
    require_positive("beta", beta)
    good = torch.sigmoid(-beta * inputs.chosen_ratio)
    bad = torch.sigmoid(beta * inputs.rejected_ratio)
    return referenced_report(inputs, good + bad, beta)


@preference_losses.register("apo_down")
def apo_down(inputs: PairInputs, *, beta: float = 0.1) -> PreferenceLoss:
    """σ(βc) + σ(-β(c - r)): both answers down, the other one more (APO-down, arXiv:2408.06266).

    For preferred answers that are worse than what the policy writes: near the reference the
    gradient does not raise them.
    """
    require_positive("beta", beta)
    chosen, rejected = inputs.chosen_ratio, inputs.rejected_ratio
    loss = torch.sigmoid(beta * chosen) + torch.sigmoid(-beta * (chosen - rejected))
    return referenced_report(inputs, loss, beta)


# Losses of answers that are marked good or bad, without partners: KTO, APO-zero and BCO.
#
# x is log π/π_ref of an answer.


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
        why = "kto estimates its reference point from answers to other prompts"
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
