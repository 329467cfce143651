"""Preference losses without a reference: ORPO, CPO, SimPO and AlphaPO.

c and r are the sums of log-probabilities, or their means per token where that is said.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import logsigmoid

from luyen.algorithms.checks import require_not_negative, require_positive
from luyen.algorithms.preference.inputs import (
    PairInputs,
    PreferenceLoss,
    pair_report,
    preference_losses,
)
from luyen.algorithms.preference.pairwise import likelihood, smoothed, tangent_exp


def log_odds(mean_logp: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
    """Log p/(1 - p) from log p; p = 1 counts as the largest number below 1.

    Example:
        >>> log_odds(torch.tensor([0.5, 0.25]).log()).exp()
        tensor([1.0000, 0.3333])
    """
    logp = mean_logp.clamp(max=-torch.finfo(mean_logp.dtype).eps)
    half = -math.log(2.0)
    # Each branch sees only numbers that it is exact for, so that neither spoils the gradient.
    near_one = torch.log(-torch.expm1(logp.clamp(min=half)))
    far = torch.log1p(-torch.exp(logp.clamp(max=half)))
    return logp - torch.where(logp > half, near_one, far)


def _means(inputs: PairInputs) -> tuple[Float[Tensor, " pair"], Float[Tensor, " pair"]]:
    """Mean log-probability per token of both answers."""
    chosen = inputs.per_token(inputs.chosen, chosen=True)
    return chosen, inputs.per_token(inputs.rejected, chosen=False)


@preference_losses.register("orpo")
def orpo(inputs: PairInputs, *, beta: float = 0.1) -> PreferenceLoss:
    """NLL of the preferred answer - β·log σ(log odds(y_c) - log odds(y_r)) (arXiv:2403.07691).

    Odds are of the mean probability per token. The NLL is over the tokens of the answers of the
    step, as in the paper; TRL's counts the tokens of the prompt as well, so its number differs.
    """
    require_positive("beta", beta)
    chosen, rejected = _means(inputs)
    gap = log_odds(chosen) - log_odds(rejected)
    loss = likelihood(inputs) - beta * logsigmoid(gap)
    return pair_report(inputs, loss, beta * chosen, beta * rejected)


@preference_losses.register("cpo")
def cpo(
    inputs: PairInputs,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    cpo_alpha: float = 1.0,
) -> PreferenceLoss:
    """-log σ(β(c - r)) + cpo_alpha·NLL of the preferred answer (CPO, arXiv:2401.08417).

    The NLL is the mean over the tokens of the preferred answers of the step.
    """
    require_positive("beta", beta)
    loss = smoothed(beta * (inputs.chosen - inputs.rejected), label_smoothing)
    loss = _with_likelihood(loss, inputs, cpo_alpha)
    return pair_report(inputs, loss, beta * inputs.chosen, beta * inputs.rejected)


@preference_losses.register("simpo")
def simpo(
    inputs: PairInputs,
    *,
    beta: float = 0.1,
    simpo_gamma: float = 0.5,
    label_smoothing: float = 0.0,
    cpo_alpha: float = 0.0,
) -> PreferenceLoss:
    """-log σ(β(c - r) - γ) of means per token (SimPO, arXiv:2405.14734).

    TRL's `cpo_alpha` is 1 here too unless it is set, which is CPO-SimPO; under its own name SimPO
    has no likelihood term.
    """
    require_positive("beta", beta)
    chosen, rejected = _means(inputs)
    loss = smoothed(beta * (chosen - rejected) - simpo_gamma, label_smoothing)
    loss = _with_likelihood(loss, inputs, cpo_alpha)
    return pair_report(inputs, loss, beta * chosen, beta * rejected)


@preference_losses.register("alphapo")
def alphapo(
    inputs: PairInputs,
    *,
    beta: float = 0.1,
    simpo_gamma: float = 0.5,
    alpha: float = 0.25,
    label_smoothing: float = 0.0,
) -> PreferenceLoss:
    """SimPO with the reward (1 - p^(-α))/α of the mean probability p (AlphaPO, arXiv:2501.03884).

    α = 0 is SimPO. Exponents above 20 continue as a tangent.
    """
    require_positive("beta", beta)
    chosen, rejected = (_shaped(x, alpha) for x in _means(inputs))
    loss = smoothed(beta * (chosen - rejected) - simpo_gamma, label_smoothing)
    return pair_report(inputs, loss, beta * chosen, beta * rejected)


def _shaped(mean_logp: Float[Tensor, " pair"], alpha: float) -> Float[Tensor, " pair"]:
    """(1 - p^(-α))/α from log p; log p itself in the limit α = 0."""
    if abs(alpha) < 1e-6:
        return mean_logp
    return (1.0 - tangent_exp(-alpha * mean_logp)) / alpha


def _with_likelihood(
    loss: Float[Tensor, " pair"], inputs: PairInputs, cpo_alpha: float
) -> Float[Tensor, " pair"]:
    """The loss plus cpo_alpha times the NLL of the preferred answer."""
    require_not_negative("cpo_alpha", cpo_alpha)
    return loss if cpo_alpha == 0.0 else loss + cpo_alpha * likelihood(inputs)
