"""Triton kernels of `act(gate) * up`, forward and backward. Element by element, no reduction."""
# pyright: reportMissingImports=false, reportIndexIssue=false

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from luyen.models.cuda.early import early
from luyen.models.cuda.norm_kernels import as_rows

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
def _forward(
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
def _backward(
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
        _forward[_grid(rows, inner)](
            g,
            u,
            out,
            g.stride(0),
            u.stride(0),
            INNER=inner,
            CODE=_CODES[activation],
            BLOCK=_BLOCK,
            **early(g),
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
        _backward[_grid(rows, inner)](
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
