"""Losses of the difference between the answers of a pair: DPO and relatives, f-DPO, AOT.

With c and r the scores of the preferred and the other answer (log π/π_ref, or another divergence)
every loss here is a function of z = β(c - r) - margin, or of the same with scores per token.
"""

import math
from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import logsigmoid

from luyen.algorithms.checks import require_positive
from luyen.algorithms.preference.inputs import (
    PairInputs,
    PreferenceLoss,
    pair_report,
    preference_losses,
    referenced_report,
)
from luyen.base.errors import UserError, did_you_mean

# Scores of log-ratios under an f-divergence (f-DPO, Wang et al. 2023, arXiv:2309.16240).
#
# DPO's implicit reward is f'(π/π_ref); for the reverse KL that is the log-ratio itself. The
# term that the partition function leaves behind cancels in the difference of a pair alone, so
# only losses of that difference take another divergence.

_STEEPEST = 20.0
"""Exponent from which an exponential continues as its tangent."""


def tangent_exp(x: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
    """e^x up to x = 20, and its tangent beyond: finite everywhere, with a gradient everywhere."""
    near = x.clamp(max=_STEEPEST).exp()
    return near * (1.0 + (x - _STEEPEST).clamp(min=0.0))


def _reverse_kl(x: Float[Tensor, " n"], coef: float) -> Float[Tensor, " n"]:
    """Log t."""
    del coef
    return x


def _forward_kl(x: Float[Tensor, " n"], coef: float) -> Float[Tensor, " n"]:
    """1 - 1/t."""
    del coef
    return 1.0 - tangent_exp(-x)


def _js_divergence(x: Float[Tensor, " n"], coef: float) -> Float[Tensor, " n"]:
    """Log 2t/(1 + t)."""
    del coef
    return math.log(2.0) + logsigmoid(x)


def _alpha_divergence(x: Float[Tensor, " n"], coef: float) -> Float[Tensor, " n"]:
    """(t^(α - 1) - 1)/(α - 1), and log t in the limit α = 1."""
    power = coef - 1.0
    if abs(power) < 1e-6:
        return x
    return (tangent_exp(power * x) - 1.0) / power


DIVERGENCES: dict[str, Callable[[Tensor, float], Tensor]] = {
    "reverse_kl": _reverse_kl,
    "forward_kl": _forward_kl,
    "js_divergence": _js_divergence,
    "alpha_divergence": _alpha_divergence,
}


def divergence_score(
    kind: str, ratio: Float[Tensor, " n"], *, f_alpha_divergence_coef: float = 0.5
) -> Float[Tensor, " n"]:
    """f'(t) at t = e^ratio for the divergence of this name.

    Where f' is a power of t, exponents above 20 continue as a tangent, so that a far answer keeps a
    finite loss and a gradient.

    Example:
        >>> import torch
        >>> divergence_score("forward_kl", torch.tensor([0.0, 100.0]))
        tensor([0., 1.])
    """
    if kind not in DIVERGENCES:
        fix = did_you_mean(kind, DIVERGENCES)
        raise UserError("f_divergence_type", kind, "no such divergence", fix)
    return DIVERGENCES[kind](ratio, f_alpha_divergence_coef)


def smoothed(logit: Float[Tensor, " pair"], label_smoothing: float) -> Float[Tensor, " pair"]:
    """-(1 - ε)·log σ(z) - ε·log σ(-z): the label is wrong with probability ε."""
    require_smoothing(label_smoothing, below=1.0)
    flipped = label_smoothing * logsigmoid(-logit)
    return -(1.0 - label_smoothing) * logsigmoid(logit) - flipped


def require_smoothing(value: float, *, below: float, above: float | None = None) -> None:
    """Raise unless 0 <= value < below (and value > above, where that is given)."""
    low = value >= 0 if above is None else value > above
    if not (low and value < below):
        bound = f"0 or more and below {below:g}" if above is None else f"in ({above:g}, {below:g})"
        why = f"the probability of a wrong label must be {bound}"
        raise UserError("label_smoothing", value, why, f"set label_smoothing {bound}")


def _difference(
    inputs: PairInputs, kind: str, coef: float, *, per_token: bool = False
) -> Float[Tensor, " pair"]:
    """Score of the preferred answer minus that of the other."""
    chosen = divergence_score(kind, inputs.chosen_ratio, f_alpha_divergence_coef=coef)
    rejected = divergence_score(kind, inputs.rejected_ratio, f_alpha_divergence_coef=coef)
    if per_token:
        chosen = inputs.per_token(chosen, chosen=True)
        rejected = inputs.per_token(rejected, chosen=False)
    return chosen - rejected


def _logit(
    inputs: PairInputs, beta: float, kind: str, coef: float, *, per_token: bool = False
) -> Float[Tensor, " pair"]:
    """β·difference - margin."""
    require_positive("beta", beta)
    logit = beta * _difference(inputs, kind, coef, per_token=per_token)
    return logit if inputs.margins is None else logit - inputs.margins


@preference_losses.register("sigmoid")
def sigmoid(
    inputs: PairInputs,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    f_divergence_type: str = "reverse_kl",
    f_alpha_divergence_coef: float = 0.5,
) -> PreferenceLoss:
    """DPO: -log σ(z) (arXiv:2305.18290), with label noise ε the conservative form of the same.

    A margin makes it DPO with an offset (ODPO, arXiv:2402.10571).
    """
    logit = _logit(inputs, beta, f_divergence_type, f_alpha_divergence_coef)
    return referenced_report(inputs, smoothed(logit, label_smoothing), beta)


@preference_losses.register("sigmoid_norm")
def sigmoid_norm(
    inputs: PairInputs,
    *,
    beta: float = 0.1,
    f_divergence_type: str = "reverse_kl",
    f_alpha_divergence_coef: float = 0.5,
) -> PreferenceLoss:
    """-log σ(z) with scores per token: DPO that length cannot win (Tülu 3, arXiv:2411.15124)."""
    logit = _logit(inputs, beta, f_divergence_type, f_alpha_divergence_coef, per_token=True)
    return referenced_report(inputs, -logsigmoid(logit), beta)


@preference_losses.register("hinge")
def hinge(
    inputs: PairInputs,
    *,
    beta: float = 0.1,
    f_divergence_type: str = "reverse_kl",
    f_alpha_divergence_coef: float = 0.5,
) -> PreferenceLoss:
    """max(0, 1 - z) (SLiC, arXiv:2305.10425; RSO, arXiv:2309.06657)."""
    logit = _logit(inputs, beta, f_divergence_type, f_alpha_divergence_coef)
    return referenced_report(inputs, torch.relu(1.0 - logit), beta)


@preference_losses.register("ipo")
def ipo(
    inputs: PairInputs,
    *,
    beta: float = 0.1,
    f_divergence_type: str = "reverse_kl",
    f_alpha_divergence_coef: float = 0.5,
) -> PreferenceLoss:
    """(c/|y_c| - r/|y_r| - 1/(2β))²: the gap has a target, so it cannot run away (IPO).

    Scores are per token, as the authors of arXiv:2310.12036 trained it and as TRL has it.
    """
    require_positive("beta", beta)
    gap = _difference(inputs, f_divergence_type, f_alpha_divergence_coef, per_token=True)
    return referenced_report(inputs, (gap - 0.5 / beta).square(), beta)


@preference_losses.register("robust")
def robust(
    inputs: PairInputs,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    f_divergence_type: str = "reverse_kl",
    f_alpha_divergence_coef: float = 0.5,
) -> PreferenceLoss:
    """[-(1 - ε)·log σ(z) + ε·log σ(-z)]/(1 - 2ε): unbiased under labels flipped with chance ε.

    Robust DPO, arXiv:2403.00409; ε below ½. It has no lower bound when ε > 0.
    """
    require_smoothing(label_smoothing, below=0.5)
    logit = _logit(inputs, beta, f_divergence_type, f_alpha_divergence_coef)
    flipped = label_smoothing * logsigmoid(-logit)
    loss = (flipped - (1.0 - label_smoothing) * logsigmoid(logit)) / (1.0 - 2.0 * label_smoothing)
    return referenced_report(inputs, loss, beta)


@preference_losses.register("exo_pair")
def exo_pair(
    inputs: PairInputs,
    *,
    beta: float = 0.1,
    label_smoothing: float = 1e-3,
    f_divergence_type: str = "reverse_kl",
    f_alpha_divergence_coef: float = 0.5,
) -> PreferenceLoss:
    """KL((σ(z), σ(-z)) ‖ (1 - ε, ε)), the reverse of what DPO minimises (EXO, arXiv:2402.00856)."""
    require_smoothing(label_smoothing, below=1.0, above=0.0)
    logit = _logit(inputs, beta, f_divergence_type, f_alpha_divergence_coef)
    target = torch.tensor(label_smoothing, dtype=logit.dtype, device=logit.device)
    right = torch.sigmoid(logit) * (logsigmoid(logit) - torch.log1p(-target))
    wrong = torch.sigmoid(-logit) * (logsigmoid(-logit) - torch.log(target))
    return referenced_report(inputs, right + wrong, beta)


@preference_losses.register("discopop")
def discopop(
    inputs: PairInputs,
    *,
    beta: float = 0.1,
    discopop_tau: float = 0.05,
    f_divergence_type: str = "reverse_kl",
    f_alpha_divergence_coef: float = 0.5,
) -> PreferenceLoss:
    """(1 - m)·(-log σ(z)) + m·e^(-z) with m = σ(z/τ), found by search (arXiv:2406.08414).

    The blend rises for small z around 0, where the gradient points the other way. With τ in (0, 1]
    the exponential never wins on the wrong side, so the loss is finite; larger τ are refused.
    """
    require_positive("discopop_tau", discopop_tau)
    if discopop_tau > 1.0:
        why = "above 1 the exponential grows without bound on answers ranked wrongly"
        raise UserError("discopop_tau", discopop_tau, why, "set discopop_tau in (0, 1]")
    logit = _logit(inputs, beta, f_divergence_type, f_alpha_divergence_coef)
    logistic = -logsigmoid(logit) * torch.sigmoid(-logit / discopop_tau)
    exponential = (logsigmoid(logit / discopop_tau) - logit).exp()
    return referenced_report(inputs, logistic + exponential, beta)


@preference_losses.register("sft")
def sft(inputs: PairInputs) -> PreferenceLoss:
    """Negative log-likelihood of the preferred answers, mean over the tokens of the step.

    A part of mixtures; the other answer and the reference do not matter. The loss of a pair is its
    sum over the mean number of tokens, so that the mean over pairs is the mean over tokens.
    """
    chosen = inputs.per_token(inputs.chosen, chosen=True)
    rejected = inputs.per_token(inputs.rejected, chosen=False)
    return pair_report(inputs, likelihood(inputs), chosen, rejected)


def likelihood(inputs: PairInputs) -> Float[Tensor, " pair"]:
    """-log π of the preferred answer over the step's mean number of tokens."""
    return -inputs.chosen / inputs.mean_tokens


# Alignment by optimal transport: the distribution of one side over that of the other (AOT).
#
# Melnyk et al. 2024, arXiv:2406.05882. In one dimension the transport is a sort, and the sort
# is over all pairs of the optimizer step: what a micro-batch would sort is another loss.


def _over_ranks(
    upper: Float[Tensor, " pair"], lower: Float[Tensor, " pair"]
) -> Float[Tensor, " pair"]:
    """`upper` minus the entry of `lower` that has its rank, in the order of `upper`."""
    rank = torch.argsort(torch.argsort(upper.detach(), stable=True))
    return upper - torch.sort(lower, stable=True).values[rank]


@preference_losses.register("aot")
def aot(inputs: PairInputs, *, beta: float = 0.1, label_smoothing: float = 0.0) -> PreferenceLoss:
    """-log σ(β(d₍ᵢ₎ - d_ref₍ᵢ₎)) over sorted differences d = log π(y_c) - log π(y_r).

    The policy's margins should lie above the reference's as a distribution. The loss of a pair is
    the one of its rank. TRL sorts inside a micro-batch; where that is the step, numbers agree.
    """
    require_positive("beta", beta)
    gap = _over_ranks(inputs.chosen - inputs.rejected, inputs.ref_difference)
    return referenced_report(inputs, smoothed(beta * gap, label_smoothing), beta)


@preference_losses.register("aot_unpaired")
def aot_unpaired(
    inputs: PairInputs, *, beta: float = 0.1, label_smoothing: float = 0.0
) -> PreferenceLoss:
    """-log σ(β(c₍ᵢ₎ - r₍ᵢ₎)) over sorted log-ratios: good answers above bad ones, of any prompt.

    The loss of a pair is the one of the rank of its preferred answer. TRL sorts inside a
    micro-batch; where that is the whole step, numbers agree.
    """
    require_positive("beta", beta)
    gap = _over_ranks(inputs.chosen_ratio, inputs.rejected_ratio)
    return referenced_report(inputs, smoothed(beta * gap, label_smoothing), beta)
