"""Attention of one new token a row over a paged cache, and writing to that cache.

Nothing here waits for the device, and no shape depends on lengths: one CUDA graph serves rows of
all lengths.
"""
# pyright: reportMissingImports=false, reportIndexIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from luyen.models.cuda.attend_block import (
    BLOCK,
    EXACT,
    LOG2E,
    SPLIT,
    attend_keys,
    attend_split,
    dense,
    finish,
    fitting_stages,
    merge_split,
    nothing_seen,
    score_factors,
)

FULL = 512
"""Programs from which on an H200 is busy with one each."""
FEW, MANY = (2, 5), (1, 4)
"""Warps and stages that were fastest below and from there on; they change no bit."""


@triton.jit
def _tile(rows, row, group, GROUP: tl.constexpr, TILE: tl.constexpr, WIDTH, PADDED: tl.constexpr):
    """Offsets and mask of the heads that share one key head; `rows` holds strides of row, head."""
    head = tl.arange(0, TILE)
    column = tl.arange(0, PADDED)
    at = row.to(tl.int64) * rows[0] + (group * GROUP + head)[:, None] * rows[1] + column[None, :]
    return at, (head < GROUP)[:, None] & (column < WIDTH)[None, :]


@triton.jit
def _sinks_of(sinks, group, GROUP: tl.constexpr, TILE: tl.constexpr, HAS_SINKS: tl.constexpr):
    """The sinks of the heads of a group, in powers of two."""
    head = tl.arange(0, TILE)
    if HAS_SINKS:
        found = tl.load(sinks + group * GROUP + head, mask=head < GROUP, other=0.0)
    else:
        found = tl.zeros([TILE], tl.float32)
    return found.to(tl.float32) * LOG2E


@triton.jit
def _decode_kernel(
    query, keys, values, tables, lengths, sinks, out, rate, cap,
    GROUP: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr,
    SLIDING: tl.constexpr, HAS_CAP: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """One row and one key head: every split, merged in registers."""
    row, group = tl.program_id(0), tl.program_id(1)
    length = tl.load(lengths + row)
    at, mask = _tile(query[1:], row, group, GROUP, TILE, WIDTH, PADDED)
    tile = tl.load(query[0] + at, mask=mask, other=0.0)
    positions = tl.zeros([TILE], tl.int32) + (length - 1)
    first = tl.maximum(length - SLIDING, 0) if SLIDING > 0 else 0
    top, total, mixed = attend_keys(
        tile, positions,
        (keys[0] + group * keys[2], keys[1], keys[3]),
        (values[0] + group * values[2], values[1], values[3]),
        tables[0] + row.to(tl.int64) * tables[1], first, length,
        rate, cap, WIDTH, SLIDING, HAS_CAP, True,
    )  # fmt: skip
    sink = _sinks_of(sinks, group, GROUP, TILE, HAS_SINKS)
    result, _ = finish(top, total, mixed, sink, HAS_SINKS)
    at, mask = _tile(out[1:], row, group, GROUP, TILE, WIDTH, PADDED)
    tl.store(out[0] + at, result.to(out[0].dtype.element_ty), mask=mask)


@triton.jit
def _split_kernel(
    query, keys, values, tables, lengths, parts, rate, cap,
    GROUP: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr,
    SLIDING: tl.constexpr, HAS_CAP: tl.constexpr,
):  # fmt: skip
    """One row, one key head and one split; splits without visible keys write nothing."""
    row, group, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths + row)
    first = tl.maximum(length - SLIDING, 0) if SLIDING > 0 else 0
    if (split * SPLIT >= length) | (split * SPLIT + SPLIT <= first):
        return
    at, mask = _tile(query[1:], row, group, GROUP, TILE, WIDTH, PADDED)
    tile = tl.load(query[0] + at, mask=mask, other=0.0)
    positions = tl.zeros([TILE], tl.int32) + (length - 1)
    top, total, mixed = attend_split(
        tile, positions,
        (keys[0] + group * keys[2], keys[1], keys[3]),
        (values[0] + group * values[2], values[1], values[3]),
        tables[0] + row.to(tl.int64) * tables[1], split, first, length,
        rate, cap, WIDTH, SLIDING, HAS_CAP, True,
    )  # fmt: skip
    lane = tl.arange(0, TILE)
    part = ((row * tl.num_programs(1) + group).to(tl.int64) * tl.num_programs(2) + split) * TILE
    tl.store(parts[0] + part + lane, top)
    tl.store(parts[1] + part + lane, total)
    column = tl.arange(0, PADDED)
    tl.store(parts[2] + (part + lane)[:, None] * PADDED + column[None, :], mixed)


@triton.jit
def _combine_kernel(
    parts, splits, lengths, sinks, out,
    GROUP: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr,
    SLIDING: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """Merges the splits of one row and one key head in order."""
    row, group = tl.program_id(0), tl.program_id(1)
    length = tl.load(lengths + row)
    first = tl.maximum(length - SLIDING, 0) if SLIDING > 0 else 0
    lane = tl.arange(0, TILE)
    column = tl.arange(0, PADDED)
    top, total, mixed = nothing_seen(TILE, PADDED)
    for split in range(first // SPLIT, tl.cdiv(length, SPLIT)):
        part = ((row * tl.num_programs(1) + group).to(tl.int64) * splits + split) * TILE + lane
        part_top = tl.load(parts[0] + part)
        part_total = tl.load(parts[1] + part)
        part_mixed = tl.load(parts[2] + part[:, None] * PADDED + column[None, :])
        top, total, mixed = merge_split(top, total, mixed, part_top, part_total, part_mixed)
    sink = _sinks_of(sinks, group, GROUP, TILE, HAS_SINKS)
    result, _ = finish(top, total, mixed, sink, HAS_SINKS)
    at, mask = _tile(out[1:], row, group, GROUP, TILE, WIDTH, PADDED)
    tl.store(out[0] + at, result.to(out[0].dtype.element_ty), mask=mask)


@triton.jit
def _store_kernel(
    new_keys, new_values, keys, values, slots,
    HEADS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """All key heads of one token."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    if slot < 0:
        return
    head = tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, PADDED)[None, :]
    mask = (head < HEADS) & (column < WIDTH)
    page, place = slot // BLOCK, slot % BLOCK
    key = tl.load(new_keys[0] + token * new_keys[1] + head * new_keys[2] + column, mask=mask)
    at = page * keys[1] + head * keys[2] + place * keys[3] + column
    tl.store(keys[0] + at, key.to(keys[0].dtype.element_ty), mask=mask)
    value = tl.load(
        new_values[0] + token * new_values[1] + head * new_values[2] + column, mask=mask
    )
    at = page * values[1] + head * values[2] + place * values[3] + column
    tl.store(values[0] + at, value.to(values[0].dtype.element_ty), mask=mask)


def paged_decode(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    lengths: Tensor,
    scale: float,
    *,
    sliding: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    is_split: bool,
    warps: int | None = None,
    stages: int | None = None,
) -> Tensor:
    """`query [rows, heads, width]` over `keys, values [pages, kv heads, 64, width]`.

    `tables [rows, pages of a row]` says where a row's keys lie, `lengths [rows]` how many there
    are, the query's own included; both int32. A row of length 0 gets zeros. With `is_split` the
    splits of a row run beside each other, with the same bits: faster where rows are few and long.
    """
    assert keys.shape[2] == BLOCK.value, "a page must be a block of keys"
    assert lengths.dtype == tables.dtype == torch.int32
    query, keys, values, tables = (dense(x) for x in (query, keys, values, tables))
    rows, kv_heads = query.shape[0], keys.shape[1]
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    shape = _shape(query, kv_heads, sliding)
    read = (
        (query, *query.stride()[:2]),
        (keys, *keys.stride()[:3]),
        (values, *values.stride()[:3]),
        (tables, tables.stride(0)),
        lengths,
    )
    launch = _launch(rows * kv_heads, shape["PADDED"], keys.element_size(), warps, stages)
    launch["HAS_CAP"] = softcap is not None
    factors, write = score_factors(scale, softcap), (sinks, (out, *out.stride()[:2]))
    grid, has_sinks = (rows, kv_heads), sinks is not None
    if not is_split:
        _decode_kernel[grid](*read, *write, *factors, HAS_SINKS=has_sinks, **shape, **launch)
        return out
    splits = triton.cdiv(tables.shape[1] * BLOCK.value, SPLIT.value)
    parts = _parts(rows * kv_heads * splits * shape["TILE"], shape["PADDED"], query.device)
    _split_kernel[(*grid, splits)](*read, parts, *factors, **shape, **launch)
    _combine_kernel[grid](parts, splits, lengths, *write, HAS_SINKS=has_sinks, **shape)
    return out


def store_keys_values(
    new_keys: Tensor, new_values: Tensor, keys: Tensor, values: Tensor, slots: Tensor
) -> None:
    """Write `[tok, kv heads, width]` into the cache at `slots` (page x 64 + place).

    A negative slot is passed over.
    """
    tokens, heads, width = new_keys.shape
    if tokens == 0:
        return
    new_keys, new_values = dense(new_keys), dense(new_values)
    _store_kernel[(tokens,)](
        (new_keys, *new_keys.stride()[:2]),
        (new_values, *new_values.stride()[:2]),
        (keys, *keys.stride()[:3]),
        (values, *values.stride()[:3]),
        slots,
        HEADS=heads,
        ROWS=triton.next_power_of_2(heads),
        WIDTH=width,
        PADDED=triton.next_power_of_2(width),
        num_warps=1,
    )


def _launch(
    programs: int, padded: int, size: int, warps: int | None, stages: int | None
) -> dict[str, int]:
    """Warps and stages: those asked for, or the fastest for so many programs."""
    usual = FEW if programs < FULL else MANY
    fitting = fitting_stages(stages or usual[1], padded, size)
    return {"num_warps": warps or usual[0], "num_stages": fitting}


def _shape(query: Tensor, kv_heads: int, sliding: int | None) -> dict[str, int]:
    """What the kernels are compiled for: the tile is the heads of a key head, 16 at least."""
    _, heads, width = query.shape
    group = heads // kv_heads
    return {
        "GROUP": group,
        "TILE": max(16, triton.next_power_of_2(group)),
        "WIDTH": width,
        "PADDED": max(16, triton.next_power_of_2(width)),
        "SLIDING": sliding or 0,
        **EXACT,
    }


def _parts(lanes: int, padded: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Room for largest score, sum of weights and weighted values of every split."""
    flat = torch.empty(2, lanes, dtype=torch.float32, device=device)
    mixed = torch.empty(lanes, padded, dtype=torch.float32, device=device)
    return flat[0], flat[1], mixed
