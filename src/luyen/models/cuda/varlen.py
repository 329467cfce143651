"""Attention of packed segments: the training forward pass and prefill, bit for bit like decoding.

`flash_varlen` is PyTorch's own kernel, for runs that do not ask for exactness.
"""
# pyright: reportMissingImports=false, reportIndexIssue=false

from typing import Any, final

import torch
import triton
import triton.language as tl
from torch import Tensor

from luyen.models.attention import AttentionWindow
from luyen.models.cuda.attend_block import (
    BLOCK,
    EXACT,
    LOG2E,
    attend_keys,
    dense,
    finish,
    fitting_stages,
    score_factors,
)
from luyen.models.cuda.varlen_gradients import Gradients, attention_gradients, flash_gradients
from luyen.models.cuda.varlen_segments import Segments

TILE = 64
"""Queries that are computed together; the result must not depend on it."""
WARPS = 4
STAGES = 3


@triton.jit
def _varlen_kernel(
    query, keys, values, tables, ranges, sinks, out, lse, tiles, listed, rate, cap,
    GROUP: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr,
    SLIDING: tl.constexpr, HAS_CAP: tl.constexpr, HAS_SINKS: tl.constexpr, IS_PAGED: tl.constexpr,
):  # fmt: skip
    """Some queries of one segment and one head."""
    place, head = tl.program_id(0), tl.program_id(1)
    if listed is not None:
        segment, begin = tl.load(listed + 2 * place), tl.load(listed + 2 * place + 1)
    else:
        # The last queries of a segment see most keys: they start first.
        segment, begin = place // tiles, (tiles - 1 - place % tiles) * TILE
    queries, length = tl.load(ranges[2] + segment), tl.load(ranges[3] + segment)
    if begin >= queries:
        return
    token, column = begin + tl.arange(0, TILE), tl.arange(0, PADDED)
    mask = (token < queries)[:, None] & (column < WIDTH)[None, :]
    packed = tl.load(ranges[0] + segment).to(tl.int64) + token
    at = packed[:, None] * query[1] + head * query[2] + column[None, :]
    tile = tl.load(query[0] + at, mask=mask, other=0.0)
    positions = length - queries + token
    newest = tl.minimum(length, length - queries + begin + TILE)
    first = tl.maximum(length - queries + begin + 1 - SLIDING, 0) if SLIDING > 0 else 0
    group = head // GROUP
    key_pointer, value_pointer = keys[0] + group * keys[2], values[0] + group * values[2]
    if IS_PAGED:
        table = tables[0] + segment.to(tl.int64) * tables[1]
    else:
        table = ranges[1]
        key_pointer += tl.load(ranges[1] + segment).to(tl.int64) * keys[3]
        value_pointer += tl.load(ranges[1] + segment).to(tl.int64) * values[3]
    top, total, mixed = attend_keys(
        tile, positions, (key_pointer, keys[1], keys[3]), (value_pointer, values[1], values[3]),
        table, first, newest, rate, cap, WIDTH, SLIDING, HAS_CAP, IS_PAGED,
    )  # fmt: skip
    sink = tl.zeros([TILE], tl.float32)
    sink += tl.load(sinks + head).to(tl.float32) * LOG2E if HAS_SINKS else 0.0
    result, logs = finish(top, total, mixed, sink, HAS_SINKS)
    at = packed[:, None] * out[1] + head * out[2] + column[None, :]
    tl.store(out[0] + at, result.to(out[0].dtype.element_ty), mask=mask)
    tl.store(lse[0] + head * lse[1] + packed, logs, mask=token < queries)


def varlen_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Segments,
    scale: float,
    *,
    sliding: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    tile: int = TILE,
    warps: int = WARPS,
    stages: int = STAGES,
) -> tuple[Tensor, Tensor]:
    """`[tok, heads, width]` over `[keys, kv heads, width]`: output, and log-sum-exp `[heads, tok]`.

    Every query must belong to a segment.
    """
    key, value = dense(key), dense(value)
    sources = tuple((x, BLOCK.value * x.stride(0), x.stride(1), x.stride(0)) for x in (key, value))
    window = AttentionWindow(sliding=sliding, softcap=softcap, sinks=sinks)
    launch = (tile, warps, stages)
    return _launch(query, sources, None, key.shape[1], segments, scale, window, launch)


def paged_prefill(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    segments: Segments,
    scale: float,
    *,
    sliding: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    tile: int = TILE,
    warps: int = WARPS,
    stages: int = STAGES,
    tiles: Tensor | None = None,
) -> Tensor:
    """The newest queries of each sequence over the paged cache, which holds their keys already.

    Row `i` of `tables` belongs to segment `i`; the cache is that of `paged_decode`. `tiles` is
    int32 `[programs, 2]`, the segment and the first query of each program; None: as many for each
    segment as for the longest. One captured graph serves all lengths that have no more programs.
    """
    assert keys.shape[2] == BLOCK.value, "a page must be a block of keys"
    assert tables.dtype == torch.int32
    sources = tuple((x, *x.stride()[:3]) for x in (keys, values))
    window = AttentionWindow(sliding=sliding, softcap=softcap, sinks=sinks)
    launch = (tile, warps, stages)
    return _launch(query, sources, tables, keys.shape[1], segments, scale, window, launch, tiles)[0]


def _launch(
    query: Tensor,
    sources: Any,
    tables: Tensor | None,
    kv_heads: int,
    segments: Segments,
    scale: float,
    window: AttentionWindow,
    launch: tuple[int, int, int],
    listed: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp; `launch` is queries at once, warps and stages."""
    tokens, heads, width = query.shape
    out, lse = query.new_empty(query.shape), query.new_empty(heads, tokens, dtype=torch.float32)
    query, padded = dense(query), max(16, triton.next_power_of_2(width))
    tile, warps, stages = launch
    tiles = triton.cdiv(segments.max_query, tile)
    programs = tiles * segments.query_lengths.numel() if listed is None else listed.shape[0]
    _varlen_kernel[(programs, heads)](
        (query, *query.stride()[:2]), *sources,
        None if tables is None else (tables, tables.stride(0)),
        segments.ranges(), window.sinks, (out, *out.stride()[:2]), (lse, lse.stride(0)),
        tiles, listed, *score_factors(scale, window.softcap),
        GROUP=heads // kv_heads,
        TILE=tile,
        WIDTH=width,
        PADDED=padded,
        SLIDING=window.sliding or 0,
        HAS_CAP=window.softcap is not None,
        HAS_SINKS=window.sinks is not None,
        IS_PAGED=tables is not None,
        num_warps=warps,
        num_stages=fitting_stages(stages, padded, query.element_size()),
        **EXACT,
    )  # fmt: skip
    return out, lse


def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Segments,
    scale: float,
    *,
    sliding: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """The output of `varlen_forward`, with gradients for query, key, value and sinks."""
    out: Any = _Varlen.apply(query, key, value, sinks, segments, scale, sliding, softcap)
    return out


def flash_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Segments,
    scale: float,
    sliding: int | None = None,
) -> Tensor:
    """PyTorch's own attention of packed segments, on CUDA in bf16 or fp16, with gradients."""
    assert segments.is_packed, "flash attention takes segments that lie one after the other"
    out: Any = _Flash.apply(query, key, value, segments, scale, sliding)
    return out


@final
class _Varlen(torch.autograd.Function):
    """`varlen_forward` and the gradients of it."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        query, key, value, sinks, segments, scale, sliding, softcap = inputs
        out, lse = varlen_forward(
            query, key, value, segments, scale, sliding=sliding, softcap=softcap, sinks=sinks
        )
        ctx.save_for_backward(query, key, value, out, lse, sinks)
        ctx.rest = (segments, scale, sliding, softcap)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        found: Gradients = attention_gradients(grads[0], *ctx.saved_tensors, *ctx.rest)
        return (*found, None, None, None, None)


@final
class _Flash(torch.autograd.Function):
    """PyTorch's flash attention; called here because its own wrapper differs between versions."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        query, key, value, segments, scale, sliding = inputs
        query, key, value = (dense(x) for x in (query, key, value))
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            query, key, value, segments.query_ends(), segments.key_ends(),
            segments.max_query, segments.max_key, 0.0, sliding is None, False, scale=scale,
            window_size_left=-1 if sliding is None else sliding - 1, window_size_right=0,
        )  # fmt: skip
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.rest = (segments, scale, sliding)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        found = flash_gradients(grads[0], *ctx.saved_tensors, *ctx.rest)
        return (*found, None, None, None)
