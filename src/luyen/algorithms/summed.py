"""Sums by index that repeat to the last bit, wherever they are made."""

from jaxtyping import Float, Int
from torch import Tensor


def summed(x: Float[Tensor, " n"], index: Int[Tensor, " n"], count: int) -> Float[Tensor, " count"]:
    """Sum of the x of each index below `count`; the order of the terms is fixed on every device.

    Example:
        >>> import torch
        >>> summed(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([0, 2, 0]), 3)
        tensor([5., 0., 2.])
    """
    zeros = x.new_zeros(count)
    if x.is_cuda:
        # `index_add` takes terms there as threads arrive with them; this sorts them first.
        return zeros.index_put((index,), x, accumulate=True)
    return zeros.index_add(0, index, x)
