"""RMSNorm together with the residual addition before it."""

from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from luyen.models.fused.gradient_free import applied


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class NormStyle:
    """How an architecture writes RMSNorm.

    Example:
        >>> NormStyle(eps=1e-6, offset=1.0, is_wide=True).offset
        1.0
    """

    eps: float
    """Added to the mean square."""
    offset: float = 0.0
    """Added to the weight (Gemma: 1)."""
    is_wide: bool = False
    """Whether the weight is applied in fp32, before rounding (Gemma, gpt-oss) and not after it."""


def add_rms_norm(
    hidden: Tensor, residual: Tensor | None, weight: Tensor, style: NormStyle
) -> tuple[Tensor, Tensor]:
    """The norm of `hidden + residual`, and that sum; without a residual the sum is `hidden`.

    The sum is rounded to the type of `hidden` before the norm reads it, so that the result is the
    same whether the addition is made here or earlier. A row never depends on the others.
    """
    if not hidden.is_cuda:
        return reference_add_rms_norm(hidden, residual, weight, style)
    made = applied(AddRmsNorm, hidden, residual, weight, style)
    return (made, hidden) if residual is None else made


def reference_add_rms_norm(
    hidden: Tensor, residual: Tensor | None, weight: Tensor, style: NormStyle
) -> tuple[Tensor, Tensor]:
    """The same in plain PyTorch, in the rounding order of the Hugging Face modules."""
    total = hidden if residual is None else residual + hidden
    wide = total.float()
    scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + style.eps)
    if style.is_wide:
        factor = weight.float() + style.offset if style.offset else weight
        return (scaled * factor).to(total.dtype), total
    assert style.offset == 0.0, "a weight with an offset is applied in fp32"
    return weight * scaled.to(total.dtype), total


@final
class AddRmsNorm(torch.autograd.Function):
    """Triton kernels: `(normed, sum)` with a residual, and `normed` alone without one."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, residual: Tensor | None, weight: Tensor, style: NormStyle
    ) -> Any:
        """Norm of the sum."""
        from luyen.models.cuda.norm_kernels import norm_forward

        normed, total, inverse = norm_forward(
            hidden,
            residual,
            weight,
            eps=style.eps,
            offset=style.offset,
            is_wide=style.is_wide,
        )
        ctx.save_for_backward(total, weight, inverse)
        ctx.style, ctx.has_residual = style, residual is not None
        ctx.set_materialize_grads(False)
        return (normed, total) if residual is not None else normed

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        """One gradient for both summands, and the weight's in a fixed order of addition."""
        from luyen.models.cuda.norm_kernels import norm_backward

        total, weight, inverse = ctx.saved_tensors
        passed = grads[1] if ctx.has_residual else None
        if grads[0] is None:
            return passed, passed, None, None
        summed, learned = norm_backward(
            grads[0],
            passed,
            total,
            weight,
            inverse,
            offset=ctx.style.offset,
            needs_weight=ctx.needs_input_grad[2],
        )
        return summed, summed if ctx.has_residual else None, learned, None
