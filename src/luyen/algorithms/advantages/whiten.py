"""Whitening: mean 0 and variance 1 over the tokens that take part, and nothing anywhere else."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

VARIANCE_FLOOR = 1e-8
"""Added to the variance before the root, so that equal values whiten to 0."""


def whiten(x: Float[Tensor, " tok"], takes_part: Bool[Tensor, " tok"]) -> Float[Tensor, " tok"]:
    """(x - mean) / sqrt(var + 1e-8) with the sample variance (n - 1 below); 0 on all other tokens.

    One token alone gives 0. The mean is subtracted twice, since the second pass removes what
    rounding left of the first: values that are all equal stay at 0 in float32 too.

    Example:
        >>> whiten(torch.tensor([1.0, 3.0, 9.0]), torch.tensor([True, True, False]))
        tensor([-0.7071,  0.7071,  0.0000])
    """
    count = takes_part.sum()
    centred = torch.where(takes_part, x, 0.0)
    for _ in range(2):
        mean = centred.sum() / count.clamp(min=1)
        centred = torch.where(takes_part, centred - mean, 0.0)
    variance = centred.square().sum() / (count - 1).clamp(min=1)
    return centred * torch.rsqrt(variance + VARIANCE_FLOOR)
