"""Losses that pull each answer of a pair by its own log-ratio: NCA, BCO, SPPO and APO.

c and r are log π/π_ref of the preferred and the other answer.
"""

import torch
from torch.nn.functional import logsigmoid

from luyen.algorithms.knobs import require_positive
from luyen.algorithms.preference.inputs import PairInputs, PreferenceLoss, preference_losses
from luyen.algorithms.preference.report import referenced_report


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
