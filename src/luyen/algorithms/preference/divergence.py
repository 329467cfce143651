"""Scores of log-ratios under an f-divergence (f-DPO, Wang et al. 2023, arXiv:2309.16240).

DPO's implicit reward is f'(π/π_ref); for the reverse KL that is the log-ratio itself. The term that
the partition function leaves behind cancels in the difference of a pair alone, so only losses of
that difference take another divergence.
"""

import math
from collections.abc import Callable

from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import logsigmoid

from luyen.base.errors import UserError
from luyen.base.suggest import did_you_mean

_STEEPEST = 20.0
"""Exponent from which an exponential goes on as its tangent."""


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
