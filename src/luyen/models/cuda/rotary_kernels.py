"""Triton kernels that rotate queries and keys, with or without a norm per head before it.

One program has all heads of a token, so that a token never depends on other tokens.
"""
# pyright: reportMissingImports=false, reportIndexIssue=false

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from luyen.models.cuda.attend_block import EXACT

_PROGRAMS = 1024
"""Programs that share the tokens of a backward pass through the norms."""


@triton.jit
def _rotate_one(
    source,
    out,
    cosine,
    sine,
    source_head,
    out_head,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    HALF: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
    TAIL: tl.constexpr,
):
    head = tl.arange(0, HEAD_BLOCK)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (head < HEADS) & (column < HALF)
    place = source + head * source_head + column
    a = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(place + HALF, mask=inside, other=0.0).to(tl.float32)
    kind = out.dtype.element_ty
    target = out + head * out_head + column
    tl.store(target, (a * cosine - b * sine).to(kind), mask=inside)
    tl.store(target + HALF, (b * cosine + a * sine).to(kind), mask=inside)
    if TAIL > 0:
        rest = 2 * HALF + tl.arange(0, TAIL)[None, :]
        kept = (head < HEADS) & (rest < WIDTH)
        x = tl.load(source + head * source_head + rest, mask=kept, other=0.0)
        tl.store(out + head * out_head + rest, x, mask=kept)


@triton.jit
def _rotate(
    q, k, q_out, k_out, cos, sin,
    q_row, q_head, k_row, k_head, q_out_row, q_out_head, k_out_row, k_out_head, cos_row, sin_row,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr, HALF: tl.constexpr,
    QUERY_BLOCK: tl.constexpr, KEY_BLOCK: tl.constexpr, BLOCK: tl.constexpr, TAIL: tl.constexpr,
    IS_INVERSE: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)[None, :]
    inside = column < HALF
    cosine = tl.load(cos + token * cos_row + column, mask=inside, other=0.0).to(tl.float32)
    sine = tl.load(sin + token * sin_row + column, mask=inside, other=0.0).to(tl.float32)
    if IS_INVERSE:
        sine = -sine
    _rotate_one(
        q + token * q_row, q_out + token * q_out_row, cosine, sine, q_head, q_out_head,
        QUERIES, WIDTH, HALF, QUERY_BLOCK, BLOCK, TAIL,
    )  # fmt: skip
    _rotate_one(
        k + token * k_row, k_out + token * k_out_row, cosine, sine, k_head, k_out_head,
        KEYS, WIDTH, HALF, KEY_BLOCK, BLOCK, TAIL,
    )  # fmt: skip


@triton.jit
def _norm_rotate_one(
    source, out, weight, cosine, sine, source_head, eps, offset,
    HEADS: tl.constexpr, HALF: tl.constexpr, HEAD_BLOCK: tl.constexpr, BLOCK: tl.constexpr,
    IS_WIDE: tl.constexpr,
):  # fmt: skip
    head = tl.arange(0, HEAD_BLOCK)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    some = column < HALF
    inside = (head < HEADS) & some
    kind = out.dtype.element_ty
    place = source + head * source_head + column
    a = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(place + HALF, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(a * a + b * b, axis=1) / (2 * HALF) + eps)[:, None]
    first = tl.load(weight + column, mask=some, other=0.0).to(tl.float32)
    second = tl.load(weight + HALF + column, mask=some, other=0.0).to(tl.float32)
    a, b = a * scale, b * scale
    # Rounded where the norm would be if it were a kernel of its own.
    if IS_WIDE:
        a = (a * (first + offset)).to(kind).to(tl.float32)
        b = (b * (second + offset)).to(kind).to(tl.float32)
    else:
        a = (a.to(kind).to(tl.float32) * first).to(kind).to(tl.float32)
        b = (b.to(kind).to(tl.float32) * second).to(kind).to(tl.float32)
    target = out + head * (2 * HALF) + column
    tl.store(target, (a * cosine - b * sine).to(kind), mask=inside)
    tl.store(target + HALF, (b * cosine + a * sine).to(kind), mask=inside)


@triton.jit
def _norm_rotate(
    q, k, q_out, k_out, q_weight, k_weight, cos, sin,
    q_row, q_head, k_row, k_head, cos_row, sin_row, eps, offset,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, HALF: tl.constexpr,
    QUERY_BLOCK: tl.constexpr, KEY_BLOCK: tl.constexpr, BLOCK: tl.constexpr, IS_WIDE: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)[None, :]
    some = column < HALF
    cosine = tl.load(cos + token * cos_row + column, mask=some, other=0.0).to(tl.float32)
    sine = tl.load(sin + token * sin_row + column, mask=some, other=0.0).to(tl.float32)
    _norm_rotate_one(
        q + token * q_row, q_out + token * (QUERIES * 2 * HALF), q_weight, cosine, sine, q_head,
        eps, offset, QUERIES, HALF, QUERY_BLOCK, BLOCK, IS_WIDE,
    )  # fmt: skip
    _norm_rotate_one(
        k + token * k_row, k_out + token * (KEYS * 2 * HALF), k_weight, cosine, sine, k_head,
        eps, offset, KEYS, HALF, KEY_BLOCK, BLOCK, IS_WIDE,
    )  # fmt: skip


@triton.jit
def _norm_rotate_backward(
    source, grad, weight, out, partial, cos, sin, tokens,
    source_row, source_head, grad_row, grad_head, out_row, out_head, cos_row, sin_row, eps, offset,
    HEADS: tl.constexpr, HALF: tl.constexpr, HEAD_BLOCK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    start = tl.program_id(0)
    head = tl.arange(0, HEAD_BLOCK)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    some = column < HALF
    inside = (head < HEADS) & some
    first = tl.load(weight + column, mask=some, other=0.0).to(tl.float32) + offset
    second = tl.load(weight + HALF + column, mask=some, other=0.0).to(tl.float32) + offset
    first_sum = tl.zeros([BLOCK], tl.float32)
    second_sum = tl.zeros([BLOCK], tl.float32)
    for index in range(start, tokens, tl.num_programs(0)):
        token = tl.cast(index, tl.int64)
        place = source + token * source_row + head * source_head + column
        a = tl.load(place, mask=inside, other=0.0).to(tl.float32)
        b = tl.load(place + HALF, mask=inside, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(a * a + b * b, axis=1) / (2 * HALF) + eps)[:, None]
        a, b = a * scale, b * scale
        cosine = tl.load(cos + token * cos_row + column, mask=some, other=0.0).to(tl.float32)
        sine = tl.load(sin + token * sin_row + column, mask=some, other=0.0).to(tl.float32)
        given = grad + token * grad_row + head * grad_head + column
        c = tl.load(given, mask=inside, other=0.0).to(tl.float32)
        d = tl.load(given + HALF, mask=inside, other=0.0).to(tl.float32)
        e = c * cosine + d * sine
        f = d * cosine - c * sine
        first_sum += tl.sum(e * a, axis=0)
        second_sum += tl.sum(f * b, axis=0)
        e, f = e * first, f * second
        shared = tl.sum(e * a + f * b, axis=1)[:, None] / (2 * HALF)
        target = out + token * out_row + head * out_head + column
        kind = out.dtype.element_ty
        tl.store(target, (scale * (e - a * shared)).to(kind), mask=inside)
        tl.store(target + HALF, (scale * (f - b * shared)).to(kind), mask=inside)
    flat = tl.arange(0, BLOCK)
    row = partial + start.to(tl.int64) * (2 * HALF) + flat
    tl.store(row, first_sum, mask=flat < HALF)
    tl.store(row + HALF, second_sum, mask=flat < HALF)


def rotate(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    rotated: int,
    *,
    is_inverse: bool = False,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Queries and keys `[tok, heads, width]`, turned by the angles or back."""
    q, k, cos, sin = (_dense(x) for x in (q, k, cos, sin))
    tokens, queries, width = q.shape
    made = out or tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k))
    if tokens:
        tail = width - rotated
        _rotate[(tokens,)](
            q, k, *made, cos, sin,
            *(stride for x in (q, k, *made) for stride in x.stride()[:2]),
            cos.stride(0), sin.stride(0),
            QUERIES=queries, KEYS=k.shape[1], WIDTH=width, HALF=rotated // 2,
            QUERY_BLOCK=triton.next_power_of_2(queries),
            KEY_BLOCK=triton.next_power_of_2(k.shape[1]),
            BLOCK=triton.next_power_of_2(rotated // 2),
            TAIL=triton.next_power_of_2(tail) if tail else 0,
            IS_INVERSE=is_inverse,
            num_warps=_warps(queries * width),
            # Decoding turns heads in a kernel of its own, and must round as this one does.
            **EXACT,
        )  # fmt: skip
    return made[0], made[1]


def norm_rotate(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    query_weight: Tensor,
    key_weight: Tensor,
    eps: float,
    offset: float,
    is_wide: bool,
) -> tuple[Tensor, Tensor]:
    """Queries and keys, normed by head and then rotated."""
    q, k, cos, sin = (_dense(x) for x in (q, k, cos, sin))
    tokens, queries, width = q.shape
    made = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k)]
    if tokens:
        _norm_rotate[(tokens,)](
            q, k, *made, query_weight, key_weight, cos, sin,
            *q.stride()[:2], *k.stride()[:2], cos.stride(0), sin.stride(0), eps, offset,
            QUERIES=queries, KEYS=k.shape[1], HALF=width // 2,
            QUERY_BLOCK=triton.next_power_of_2(queries),
            KEY_BLOCK=triton.next_power_of_2(k.shape[1]),
            BLOCK=triton.next_power_of_2(width // 2), IS_WIDE=is_wide,
            num_warps=_warps(queries * width),
        )  # fmt: skip
    return made[0], made[1]


def norm_rotate_backward(
    given: tuple[tuple[Tensor, Tensor, Tensor, Tensor], ...],
    cos: Tensor,
    sin: Tensor,
    eps: float,
    offset: float,
) -> Any:
    """Gradients of the weights; each of `given` is heads, their gradient, weight, and where to."""
    cos, sin = _dense(cos), _dense(sin)
    learned: list[Tensor] = []
    for source, given_grad, weight, out in given:
        x, grad = _dense(source), _dense(given_grad)
        programs = max(1, min(x.shape[0], _PROGRAMS))
        partial = torch.zeros(programs, x.shape[2], device=x.device)
        _norm_rotate_backward[(programs,)](
            x, grad, weight, out, partial, cos, sin, x.shape[0],
            *(stride for t in (x, grad, out) for stride in t.stride()[:2]),
            cos.stride(0), sin.stride(0), eps, offset,
            HEADS=x.shape[1], HALF=x.shape[2] // 2, HEAD_BLOCK=triton.next_power_of_2(x.shape[1]),
            BLOCK=triton.next_power_of_2(x.shape[2] // 2),
            num_warps=_warps(x.shape[1] * x.shape[2]),
        )  # fmt: skip
        learned.append(partial.sum(0).to(weight.dtype))
    return tuple(learned)


def _warps(numbers: int) -> int:
    return max(1, min(8, triton.next_power_of_2(numbers) // 512))


def _dense(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()
