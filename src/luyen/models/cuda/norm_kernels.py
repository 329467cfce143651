"""Triton kernels of RMSNorm with a residual addition, forward and backward.

A row is reduced by one program in an order that its width alone decides. Nothing is tuned at run
time: another tile would round differently.
"""
# pyright: reportMissingImports=false, reportIndexIssue=false

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from luyen.models.cuda.early import early

_PROGRAMS = 1024
"""Programs that share the rows of a backward pass; each keeps one partial gradient."""


@triton.jit
def _forward(
    hidden,
    residual,
    weight,
    normed,
    total,
    inverse,
    hidden_stride,
    residual_stride,
    eps,
    offset,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    IS_WIDE: tl.constexpr,
    IS_EARLY: tl.constexpr,
):
    if IS_EARLY:
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    kind = normed.dtype.element_ty
    x = tl.load(hidden + row * hidden_stride + column, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        r = tl.load(residual + row * residual_stride + column, mask=inside, other=0.0)
        rounded = (x + r.to(tl.float32)).to(kind)
        tl.store(total + row * WIDTH + column, rounded, mask=inside)
        x = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / WIDTH + eps)
    tl.store(inverse + row, scale)
    w = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    scaled = x * scale
    # The rounding order of the architecture.
    made = scaled * (w + offset) if IS_WIDE else scaled.to(kind).to(tl.float32) * w
    tl.store(normed + row * WIDTH + column, made.to(kind), mask=inside)


@triton.jit
def _backward(
    grad,
    passed,
    total,
    weight,
    inverse,
    summed,
    partial,
    rows,
    grad_stride,
    passed_stride,
    total_stride,
    offset,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_PASSED: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
):
    first = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    w = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32) + offset
    learned = tl.zeros([BLOCK], tl.float32)
    for index in range(first, rows, tl.num_programs(0)):
        row = tl.cast(index, tl.int64)
        g = tl.load(grad + row * grad_stride + column, mask=inside, other=0.0).to(tl.float32)
        x = tl.load(total + row * total_stride + column, mask=inside, other=0.0).to(tl.float32)
        scale = tl.load(inverse + row)
        scaled = x * scale
        pull = tl.where(inside, g * w, 0.0)
        through = scale * (pull - scaled * (tl.sum(pull * scaled, axis=0) / WIDTH))
        if HAS_PASSED:
            p = tl.load(passed + row * passed_stride + column, mask=inside, other=0.0)
            through += p.to(tl.float32)
        tl.store(summed + row * WIDTH + column, through.to(summed.dtype.element_ty), mask=inside)
        if HAS_WEIGHT:
            learned += g * scaled
    if HAS_WEIGHT:
        tl.store(partial + first.to(tl.int64) * WIDTH + column, learned, mask=inside)


def norm_forward(
    hidden: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    *,
    eps: float,
    offset: float,
    is_wide: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Normed rows, the sum that was normed, and the factor of each row."""
    flat = as_rows(hidden)
    more = flat if residual is None else as_rows(residual)
    rows, width = flat.shape
    normed = torch.empty_like(flat, memory_format=torch.contiguous_format)
    total = flat if residual is None else torch.empty_like(normed)
    inverse = torch.empty(rows, dtype=torch.float32, device=flat.device)
    if rows:
        _forward[(rows,)](
            flat,
            more,
            weight,
            normed,
            total,
            inverse,
            flat.stride(0),
            more.stride(0),
            eps,
            offset,
            WIDTH=width,
            HAS_RESIDUAL=residual is not None,
            IS_WIDE=is_wide,
            **tile(width),
            **early(flat),
        )
    return normed.view(hidden.shape), total.view(hidden.shape), inverse


def norm_backward(
    grad: Tensor,
    passed: Tensor | None,
    total: Tensor,
    weight: Tensor,
    inverse: Tensor,
    *,
    offset: float,
    needs_weight: bool,
) -> tuple[Tensor, Tensor | None]:
    """Gradient of the sum and, if needed, of the weight."""
    flat, seen = as_rows(grad), as_rows(total)
    more = flat if passed is None else as_rows(passed)
    rows, width = flat.shape
    summed = torch.empty_like(seen, memory_format=torch.contiguous_format)
    programs = max(1, min(rows, _PROGRAMS))
    partial = torch.zeros(programs if needs_weight else 1, width, device=grad.device)
    _backward[(programs,)](
        flat,
        more,
        seen,
        weight,
        inverse,
        summed,
        partial,
        rows,
        flat.stride(0),
        more.stride(0),
        seen.stride(0),
        offset,
        WIDTH=width,
        HAS_PASSED=passed is not None,
        HAS_WEIGHT=needs_weight,
        **tile(width),
    )
    learned = partial.sum(0).to(weight.dtype) if needs_weight else None
    return summed.view(total.shape), learned


def as_rows(x: Tensor) -> Tensor:
    """`[rows, width]` with neighbouring columns; a view wherever it can be one."""
    flat = x.reshape(-1, x.shape[-1])
    return flat if flat.stride(-1) == 1 else flat.contiguous()


def tile(width: int) -> dict[str, Any]:
    """Block and warps for rows of this width."""
    block = triton.next_power_of_2(width)
    return {"BLOCK": block, "num_warps": max(1, min(16, block // 512))}
