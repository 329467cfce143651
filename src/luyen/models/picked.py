"""Rows of a tensor, some of them several times, with a gradient that repeats to the bit."""

from typing import Any, final

import torch
from torch import Tensor

from luyen.models.fixed_order import in_fixed_order

_FEW = 4096
"""Up to 3,072 rows PyTorch's kernel rounds between additions; it is given fp32 then."""


def picked(x: Tensor, rows: Tensor) -> Tensor:
    """`x[rows]` for `[n, width]`; the gradient is the same in every run, however often a row is."""
    if not x.is_cuda:
        return x.index_select(0, rows)
    found: Any = _Picked.apply(x, rows)
    return found


@final
class _Picked(torch.autograd.Function):
    """Gradients of a row are summed in fp32 and in a fixed order.

    PyTorch's own gradient adds them as threads come along, and rounds to the type of `x` each time.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.count = x.shape[0]
        return x.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (rows,) = ctx.saved_tensors
        grad = grads[0].float() if rows.numel() <= _FEW else grads[0]
        with in_fixed_order():
            total = torch.ops.aten.embedding_dense_backward(grad, rows, ctx.count, -1, False)
        return total.to(grads[0].dtype), None
