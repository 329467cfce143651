"""Alignment by optimal transport: the distribution of one side over that of the other (AOT).

Melnyk et al. 2024, arXiv:2406.05882. In one dimension the transport is a sort, and the sort is over
all pairs of the optimizer step: what a micro-batch would sort is another loss.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from luyen.algorithms.knobs import require_positive
from luyen.algorithms.preference.inputs import PairInputs, PreferenceLoss, preference_losses
from luyen.algorithms.preference.pairwise import smoothed
from luyen.algorithms.preference.report import referenced_report


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
