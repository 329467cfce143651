"""A batch-invariant matrix product: its rows do not depend on how many there are.

Every number of the result is one chain of sums over the depth, from the first column to the last,
in fp32. The tile only decides which program computes it. Nothing is split along the depth, nothing
is tuned at run time, and the host never waits, so that a graph can hold the call.
"""
# pyright: reportMissingImports=false, reportIndexIssue=false

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from luyen.models.cuda.attend_block import EXACT
from luyen.models.cuda.norm_gate_kernels import as_rows

_GROUP = tl.constexpr(8)
"""Tiles of rows that are computed side by side, so that they find the same weights in the cache."""
_FULL = 132
"""Programs that keep a large GPU busy."""

TILES_HALF: tuple[dict[str, int], ...] = (
    {"TILE_M": 128, "TILE_N": 128, "STEP": 64, "num_warps": 8, "num_stages": 3},
    {"TILE_M": 64, "TILE_N": 64, "STEP": 64, "num_warps": 4, "num_stages": 4},
    {"TILE_M": 64, "TILE_N": 32, "STEP": 64, "num_warps": 4, "num_stages": 5},
    {"TILE_M": 16, "TILE_N": 32, "STEP": 128, "num_warps": 4, "num_stages": 4},
)
TILES_FLOAT: tuple[dict[str, int], ...] = (
    {"TILE_M": 64, "TILE_N": 64, "STEP": 16, "num_warps": 8, "num_stages": 3},
    {"TILE_M": 16, "TILE_N": 32, "STEP": 16, "num_warps": 4, "num_stages": 3},
)
"""Launch options, large tiles first; they change the work split, and no bit of a number."""


@triton.jit
def _tile_place(rows, columns, TILE_M: tl.constexpr, TILE_N: tl.constexpr):
    """Rows and columns of this program's tile. Tiles go down a group of rows, then across."""
    across = tl.cdiv(columns, TILE_N)
    group = tl.program_id(0) // (_GROUP * across)
    inside = tl.program_id(0) % (_GROUP * across)
    height = tl.minimum(tl.cdiv(rows, TILE_M) - group * _GROUP, _GROUP)
    row = (group * _GROUP + inside % height) * TILE_M + tl.arange(0, TILE_M)
    return row, inside // height * TILE_N + tl.arange(0, TILE_N)


@triton.jit(do_not_specialize=["rows"])
def _product(
    x,
    weight,
    bias,
    out,
    rows,
    columns,
    depth,
    x_stride,
    weight_stride,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    STEP: tl.constexpr,
    IS_WHOLE: tl.constexpr,
):
    """One tile of `x @ weight.T + bias`; `IS_WHOLE`: the depth is a multiple of the step."""
    row, column = _tile_place(rows, columns, TILE_M, TILE_N)
    place = tl.arange(0, STEP)
    # Outside the result some row is read again: its numbers are never stored.
    x_row = tl.where(row < rows, row, 0).to(tl.int64)
    weight_row = tl.where(column < columns, column, 0).to(tl.int64)
    x_at = x + x_row[:, None] * x_stride + place[None, :]
    weight_at = weight + weight_row[None, :] * weight_stride + place[:, None]
    total = tl.zeros([TILE_M, TILE_N], tl.float32)
    for start in range(0, depth, STEP):
        if IS_WHOLE:
            left, right = tl.load(x_at), tl.load(weight_at)
        else:
            is_there = place < depth - start
            left = tl.load(x_at, mask=is_there[None, :], other=0.0)
            right = tl.load(weight_at, mask=is_there[:, None], other=0.0)
        total = tl.dot(left, right, acc=total, input_precision="ieee")
        x_at += STEP
        weight_at += STEP
    if bias is not None:
        added = tl.load(bias + column, mask=column < columns, other=0.0)
        total += added.to(tl.float32)[None, :]
    at = out + row.to(tl.int64)[:, None] * columns + column[None, :]
    mask = (row < rows)[:, None] & (column < columns)[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=mask)


def linear_rows(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    out: Tensor | None = None,
    tile: dict[str, Any] | None = None,
) -> Tensor:
    """`x @ weight.T + bias` over the last dimension, rounded once, to the type of `x`.

    A row's bits depend on that row, the weight and the bias only. `out` is dense `[rows, columns]`.
    Another `tile` than the usual one gives the same bits.
    """
    assert x.dtype == weight.dtype, "the product of two types is not defined here"
    assert x.dtype in (torch.float32, torch.bfloat16, torch.float16)
    flat, dense = as_rows(x), as_rows(weight)
    rows, depth = flat.shape
    columns = dense.shape[0]
    assert dense.shape[1] == depth
    if out is None:
        out = flat.new_empty(rows, columns)
    assert out.shape == (rows, columns)
    assert out.is_contiguous()
    if rows and columns:
        tile = tile or usual_tile(rows, columns, x.dtype)
        programs = -(-rows // tile["TILE_M"]) * -(-columns // tile["TILE_N"])
        _product[(programs,)](
            flat,
            dense,
            bias,
            out,
            rows,
            columns,
            depth,
            flat.stride(0),
            dense.stride(0),
            IS_WHOLE=depth % tile["STEP"] == 0,
            **tile,
            **EXACT,
        )
    return out.view(*x.shape[:-1], columns)


def usual_tile(rows: int, columns: int, dtype: torch.dtype) -> dict[str, int]:
    """The largest tile that leaves no part of the GPU idle, or the smallest of those that fit."""
    tiles = TILES_FLOAT if dtype == torch.float32 else TILES_HALF
    if rows <= tiles[-1]["TILE_M"]:
        return tiles[-1]
    for tile in tiles[:-1]:
        if -(-rows // tile["TILE_M"]) * -(-columns // tile["TILE_N"]) >= _FULL:
            return tile
    return tiles[-2]


# Products of experts: each row has a weight of its own among several, and rows of one weight are
# next to each other. How many there are of each is known to the device alone.


@triton.jit
def _grouped_product(
    x,
    weight,
    out,
    columns,
    depth,
    tile_expert,
    tile_start,
    offsets,
    x_stride,
    expert_stride,
    weight_stride,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    STEP: tl.constexpr,
):
    """One tile of the rows of one expert; programs beyond the last tile have nothing to do."""
    expert = tl.load(tile_expert + tl.program_id(0))
    first = tl.load(tile_start + tl.program_id(0))
    end = tl.load(offsets + expert + 1)
    if first < end:
        row = first + tl.arange(0, TILE_M)
        column = tl.program_id(1) * TILE_N + tl.arange(0, TILE_N)
        place = tl.arange(0, STEP)
        x_row = tl.where(row < end, row, first).to(tl.int64)
        weight_row = tl.where(column < columns, column, 0).to(tl.int64)
        own = weight + expert.to(tl.int64) * expert_stride
        x_at = x + x_row[:, None] * x_stride + place[None, :]
        weight_at = own + weight_row[None, :] * weight_stride + place[:, None]
        total = tl.zeros([TILE_M, TILE_N], tl.float32)
        for start in range(0, depth, STEP):
            is_there = place < depth - start
            left = tl.load(x_at, mask=is_there[None, :], other=0.0)
            right = tl.load(weight_at, mask=is_there[:, None], other=0.0)
            total = tl.dot(left, right, acc=total, input_precision="ieee")
            x_at += STEP
            weight_at += STEP
        at = out + row.to(tl.int64)[:, None] * columns + column[None, :]
        mask = (row < end)[:, None] & (column < columns)[None, :]
        tl.store(at, total.to(out.dtype.element_ty), mask=mask)


def grouped_rows(
    x: Tensor, weight: Tensor, offsets: Tensor, *, tile: dict[str, Any] | None = None
) -> Tensor:
    """`x[i] @ weight[e].T` for the rows from `offsets[e]` to `offsets[e + 1]` of each expert.

    A row's bits depend on that row and its weight only. `offsets` stays on the device. Another
    `tile` than the usual one gives the same bits.
    """
    assert x.dtype == weight.dtype, "the product of two types is not defined here"
    assert weight.stride(2) == 1
    (rows, depth), (experts, columns, _) = x.shape, weight.shape
    out = x.new_empty(rows, columns)
    if not rows:
        return out
    tile = tile or usual_tile(-(-rows // experts), columns, x.dtype)
    height = tile["TILE_M"]
    # Each expert may leave one tile unfilled.
    tiles = torch.arange(-(-rows // height) + experts, device=x.device)
    ends = ((offsets.diff() + height - 1) // height).cumsum(0)
    expert = torch.searchsorted(ends, tiles, right=True).clamp_(max=experts - 1)
    before = torch.where(expert > 0, ends[(expert - 1).clamp(min=0)], 0)
    start = offsets[expert] + (tiles - before) * height
    x = x.contiguous()
    _grouped_product[(len(tiles), -(-columns // tile["TILE_N"]))](
        x,
        weight,
        out,
        columns,
        depth,
        expert,
        start,
        offsets,
        x.stride(0),
        weight.stride(0),
        weight.stride(1),
        **tile,
        **EXACT,
    )
    return out
