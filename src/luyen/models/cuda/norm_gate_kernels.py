"""Triton kernels of RMSNorm with a residual and of `act(gate) * up`, forward and backward.

A row is reduced by one program in an order that its width alone decides. Nothing is tuned at run
time: another tile would round differently.
"""

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

# Kernels that are launched while the one before them still runs (programmatic dependent
# launch).
#
# Such a kernel begins with `gdc_wait`, after which all that was written before is there. What
# it saves is the launch itself, up to a microsecond: much where a decode step is 250 small
# kernels.

_HOPPER = 9
"""Compute capability from which devices can do it."""


def dependent_launch(x: Tensor) -> dict[str, bool]:
    """Launch options of a kernel over `x`, which must have the parameter `IS_EARLY`."""
    is_early = x.is_cuda and _can(x.device)
    return {"IS_EARLY": True, "launch_pdl": True} if is_early else {"IS_EARLY": False}


@cache
def _can(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device)[0] >= _HOPPER


# pyright: reportMissingImports=false, reportIndexIssue=false


_PROGRAMS = 1024
"""Programs that share the rows of a backward pass; each keeps one partial gradient."""


@triton.jit
def _norm_forward_kernel(
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
def _norm_backward_kernel(
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
        _norm_forward_kernel[(rows,)](
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
            **dependent_launch(flat),
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
    _norm_backward_kernel[(programs,)](
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


# Triton kernels of `act(gate) * up`, forward and backward. Element by element, no reduction.

# pyright: reportMissingImports=false, reportIndexIssue=false


_BLOCK = 512
_CODES = {"silu": 0, "gelu_tanh": 1, "gelu": 2}


@triton.jit
def _activated(x, CODE: tl.constexpr):
    """The activation of `x` and its slope."""
    if CODE == 0:
        share = tl.sigmoid(x)
        value = x * share
        slope = share * (1.0 + x * (1.0 - share))
    elif CODE == 1:
        # (1 + tanh(u)) / 2 is sigmoid(2u): no tanh is needed.
        share = tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
        value = x * share
        inner = 1.5957691216057308 * (1.0 + 0.134145 * x * x)
        slope = share + x * share * (1.0 - share) * inner
    else:
        share = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
        value = x * share
        slope = share + x * 0.3989422804014327 * tl.exp(-0.5 * x * x)
    return value, slope


@triton.jit
def _gated_forward_kernel(
    gate,
    up,
    out,
    gate_stride,
    up_stride,
    INNER: tl.constexpr,
    CODE: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_EARLY: tl.constexpr,
):
    if IS_EARLY:
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < INNER
    kind = out.dtype.element_ty
    g = tl.load(gate + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_stride + column, mask=inside, other=0.0).to(tl.float32)
    value, _slope = _activated(g, CODE)
    tl.store(out + row * INNER + column, (value.to(kind).to(tl.float32) * u).to(kind), mask=inside)


@triton.jit
def _gated_backward_kernel(
    grad,
    gate,
    up,
    gate_grad,
    up_grad,
    grad_stride,
    gate_stride,
    up_stride,
    out_stride,
    INNER: tl.constexpr,
    CODE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < INNER
    kind = gate_grad.dtype.element_ty
    d = tl.load(grad + row * grad_stride + column, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(gate + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_stride + column, mask=inside, other=0.0).to(tl.float32)
    value, slope = _activated(g, CODE)
    tl.store(gate_grad + row * out_stride + column, (d * u * slope).to(kind), mask=inside)
    tl.store(up_grad + row * out_stride + column, (d * value).to(kind), mask=inside)


def gated_forward(gate: Tensor, up: Tensor | None, activation: str) -> Tensor:
    """`act(gate) * up`; without `up`, the columns of `gate` are both."""
    g, u = _halves(gate, up)
    rows, inner = g.shape
    out = torch.empty(rows, inner, dtype=gate.dtype, device=gate.device)
    if rows:
        _gated_forward_kernel[_grid(rows, inner)](
            g,
            u,
            out,
            g.stride(0),
            u.stride(0),
            INNER=inner,
            CODE=_CODES[activation],
            BLOCK=_BLOCK,
            **dependent_launch(g),
        )
    return out.view(*gate.shape[:-1], inner)


def gated_backward(
    grad: Tensor, gate: Tensor, up: Tensor | None, activation: str
) -> tuple[Tensor, Tensor | None]:
    """Gradients of `gate` and `up`; without `up`, one gradient for both."""
    g, u = _halves(gate, up)
    d = as_rows(grad)
    rows, inner = g.shape
    columns = 2 * inner if up is None else inner
    first = torch.empty(rows, columns, dtype=gate.dtype, device=gate.device)
    second = first[:, inner:] if up is None else torch.empty_like(first)
    if rows:
        _gated_backward_kernel[_grid(rows, inner)](
            d,
            g,
            u,
            first,
            second,
            d.stride(0),
            g.stride(0),
            u.stride(0),
            columns,
            INNER=inner,
            CODE=_CODES[activation],
            BLOCK=_BLOCK,
        )
    return first.view(gate.shape), None if up is None else second.view(up.shape)


def _halves(gate: Tensor, up: Tensor | None) -> tuple[Tensor, Tensor]:
    flat = as_rows(gate)
    if up is not None:
        return flat, as_rows(up)
    inner = flat.shape[1] // 2
    return flat[:, :inner], flat[:, inner:]


def _grid(rows: int, inner: int) -> Any:
    return (rows, triton.cdiv(inner, _BLOCK))
