"""Decode attention of one new token a row over a paged KV cache, and writing to that cache.

Nothing here waits for the device, and no shape depends on lengths: one CUDA graph serves rows of
all lengths.
"""

from dataclasses import dataclass
from typing import Any, final

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from luyen.models.cuda.attend_block import (
    BLOCK,
    EXACT,
    HALF_SHARED_BYTES,
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
from luyen.models.cuda.norm_gate_kernels import dependent_launch

# Decode kernels, one new token per row: attention over the row's pages, and writing to pages.
#
# A row's queries and its new key may come as the projection made them. They are then turned by
# their positions here, and the new key and value are stored before the row looks at its pages.

# pyright: reportMissingImports=false, reportIndexIssue=false


@triton.jit
def _tile(rows, row, group, GROUP: tl.constexpr, TILE: tl.constexpr, WIDTH, PADDED: tl.constexpr):
    """Offsets and mask of the heads that share one key head; `rows` holds strides of row, head."""
    head = tl.arange(0, TILE)
    column = tl.arange(0, PADDED)
    at = row.to(tl.int64) * rows[0] + (group * GROUP + head)[:, None] * rows[1] + column[None, :]
    return at, (head < GROUP)[:, None] & (column < WIDTH)[None, :]


@triton.jit
def _turned(pointer, mask, cos, sin, column, HALF: tl.constexpr):
    """The numbers of a head, of which the first `2 x HALF` turn as the rotary kernel turns them.

    `cos` and `sin` are those of the row. Products are rounded before they are added: `EXACT`.
    """
    found = tl.load(pointer, mask=mask, other=0.0)
    if HALF > 0:
        is_first, is_turned = column < HALF, column < 2 * HALF
        across = tl.where(is_first, HALF, -HALF)
        other = tl.load(pointer + across, mask=mask & is_turned, other=0.0).to(tl.float32)
        angle = tl.where(is_first, column, column - HALF)
        other *= tl.load(sin + angle, mask=is_turned, other=0.0).to(tl.float32)
        cosine = tl.load(cos + angle, mask=is_turned, other=0.0).to(tl.float32)
        turned = found.to(tl.float32) * cosine + tl.where(is_first, -other, other)
        found = tl.where(is_turned, turned.to(found.dtype), found)
    return found


@triton.jit
def _keep(
    new, cache, row, group, page, place, cos, sin,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """One new head of a row to its place in the cache."""
    column = tl.arange(0, PADDED)
    mask = column < WIDTH
    source = new[0] + row * new[1] + group * new[2] + column
    found = _turned(source, mask, cos, sin, column, HALF)
    at = page * cache[1] + group * cache[2] + place * cache[3] + column
    tl.store(cache[0] + at, found.to(cache[0].dtype.element_ty), mask=mask)


@triton.jit
def _start(
    query, fresh, keys, values, table, row, group, length, is_newest,
    GROUP: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr,
    HALF: tl.constexpr,
):  # fmt: skip
    """The queries of a key head; where they come unturned, the row's new key is stored as well."""
    at, mask = _tile(query[1:], row, group, GROUP, TILE, WIDTH, PADDED)
    if HALF > 0:
        wide = row.to(tl.int64)
        cos, sin = fresh[6] + wide * fresh[7], fresh[8] + wide * fresh[9]
        if is_newest & (length > 0):
            page = tl.load(table + (length - 1) // BLOCK).to(tl.int64)
            place = (length - 1) % BLOCK
            _keep(fresh[:3], keys, wide, group, page, place, cos, sin, WIDTH, PADDED, HALF)
            _keep(fresh[3:6], values, wide, group, page, place, cos, sin, WIDTH, PADDED, 0)
        # The row reads its new key back from memory.
        tl.debug_barrier()
        tile = _turned(query[0] + at, mask, cos, sin, tl.arange(0, PADDED)[None, :], HALF)
    else:
        tile = tl.load(query[0] + at, mask=mask, other=0.0)
    return tile


@triton.jit
def _write(
    out, sinks, row, group, top, total, mixed,
    GROUP: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """The outputs of the heads that share a key head; a sink counts here, and so once."""
    head = tl.arange(0, TILE)
    sink = tl.zeros([TILE], tl.float32)
    if HAS_SINKS:
        found = tl.load(sinks + group * GROUP + head, mask=head < GROUP, other=0.0)
        sink = found.to(tl.float32) * LOG2E
    result, _ = finish(top, total, mixed, sink, HAS_SINKS)
    at, mask = _tile(out[1:], row, group, GROUP, TILE, WIDTH, PADDED)
    tl.store(out[0] + at, result.to(out[0].dtype.element_ty), mask=mask)


@triton.jit
def whole_kernel(
    query, fresh, keys, values, tables, lengths, sinks, out, rate, cap,
    GROUP: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr,
    SLIDING: tl.constexpr, HALF: tl.constexpr, HAS_CAP: tl.constexpr, HAS_SINKS: tl.constexpr,
    IS_EARLY: tl.constexpr,
):  # fmt: skip
    """One row and one key head: every split, merged in registers."""
    row, group = tl.program_id(0), tl.program_id(1)
    if IS_EARLY:
        gdc_wait()
    length = tl.load(lengths + row)
    table = tables[0] + row.to(tl.int64) * tables[1]
    tile = _start(
        query, fresh, keys, values, table, row, group, length, True,
        GROUP, TILE, WIDTH, PADDED, HALF,
    )  # fmt: skip
    positions = tl.zeros([TILE], tl.int32) + (length - 1)
    first = tl.maximum(length - SLIDING, 0) if SLIDING > 0 else 0
    top, total, mixed = attend_keys(
        tile, positions,
        (keys[0] + group * keys[2], keys[1], keys[3]),
        (values[0] + group * values[2], values[1], values[3]),
        table, first, length, rate, cap, WIDTH, SLIDING, HAS_CAP, True,
    )  # fmt: skip
    _write(out, sinks, row, group, top, total, mixed, GROUP, TILE, WIDTH, PADDED, HAS_SINKS)


@triton.jit
def split_kernel(
    query, fresh, keys, values, tables, lengths, sinks, out, rate, cap, parts, arrivals,
    GROUP: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr,
    SLIDING: tl.constexpr, HALF: tl.constexpr, HAS_CAP: tl.constexpr, HAS_SINKS: tl.constexpr,
    IS_EARLY: tl.constexpr,
):  # fmt: skip
    """One row, one key head and one split; the last to finish merges them all in order."""
    row, group, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if IS_EARLY:
        gdc_wait()
    length = tl.load(lengths + row)
    first = tl.maximum(length - SLIDING, 0) if SLIDING > 0 else 0
    begin = first // SPLIT
    # A row without keys has one split, which sees nothing.
    end = tl.maximum(tl.cdiv(length, SPLIT), begin + 1)
    if (split < begin) | (split >= end):
        return
    table = tables[0] + row.to(tl.int64) * tables[1]
    tile = _start(
        query, fresh, keys, values, table, row, group, length, split == end - 1,
        GROUP, TILE, WIDTH, PADDED, HALF,
    )  # fmt: skip
    positions = tl.zeros([TILE], tl.int32) + (length - 1)
    top, total, mixed = attend_split(
        tile, positions,
        (keys[0] + group * keys[2], keys[1], keys[3]),
        (values[0] + group * values[2], values[1], values[3]),
        table, split, first, length, rate, cap, WIDTH, SLIDING, HAS_CAP, True,
    )  # fmt: skip
    pair = row * tl.num_programs(1) + group
    at = (pair.to(tl.int64) * tl.num_programs(2)) * GROUP + tl.arange(0, TILE)
    is_last = begin < end
    if end - begin > 1:
        is_last = _deliver(
            parts, arrivals + pair, at + split * GROUP, end - begin, top, total, mixed, GROUP
        )
        if is_last:
            top, total, mixed = _merged(parts, at, begin, end, GROUP, TILE, PADDED)
    if is_last:
        _write(out, sinks, row, group, top, total, mixed, GROUP, TILE, WIDTH, PADDED, HAS_SINKS)


@triton.jit
def _deliver(parts, arrivals, at, count, top, total, mixed, GROUP: tl.constexpr):
    """Write a split down; whether all `count` are there now. The counter is then 0 again."""
    is_head = tl.arange(0, mixed.shape[0]) < GROUP
    column = tl.arange(0, mixed.shape[1])
    tl.store(parts[0] + at, top, mask=is_head)
    tl.store(parts[1] + at, total, mask=is_head)
    places = at[:, None] * mixed.shape[1] + column[None, :]
    tl.store(parts[2] + places, mixed, mask=is_head[:, None])
    # All threads have written before one of them says so.
    tl.debug_barrier()
    is_last = tl.atomic_add(arrivals, 1, sem="acq_rel", scope="gpu") == count - 1
    if is_last:
        tl.store(arrivals, 0)
    return is_last


@triton.jit
def _merged(
    parts, at, begin, end, GROUP: tl.constexpr, TILE: tl.constexpr, PADDED: tl.constexpr
):  # fmt: skip
    """The splits `begin..end`, which other programs have written, merged in order."""
    is_head = tl.arange(0, TILE) < GROUP
    column = tl.arange(0, PADDED)
    top, total, mixed = nothing_seen(TILE, PADDED)
    for split in range(begin, end):
        here = at + split * GROUP
        part_top = tl.load(parts[0] + here, mask=is_head, other=0.0, cache_modifier=".cg")
        part_total = tl.load(parts[1] + here, mask=is_head, other=0.0, cache_modifier=".cg")
        places = parts[2] + here[:, None] * PADDED + column[None, :]
        part_mixed = tl.load(places, mask=is_head[:, None], other=0.0, cache_modifier=".cg")
        top, total, mixed = merge_split(top, total, mixed, part_top, part_total, part_mixed)
    return top, total, mixed


@triton.jit
def store_kernel(
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


# pyright: reportMissingImports=false, reportIndexIssue=false


_SPLIT_LAUNCH, _WHOLE_LAUNCH = (2, 5), (1, 4)
"""Warps and stages that were fastest on an H200 for splits and for whole rows: no bit changes."""


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Fresh:
    """New keys and values as the projection made them, which are not in the cache yet.

    Example:
        `Fresh(keys=k, values=v, cos=cos, sin=sin, rotated=64)`, with queries of the same kind.
    """

    keys: Tensor
    """`[rows, kv heads, width]`, not turned."""
    values: Tensor
    """The same shape."""
    cos: Tensor
    """`[rows, at least rotated / 2]`."""
    sin: Tensor
    """The same shape."""
    rotated: int
    """Numbers of a head that turn, of queries and keys."""


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
    fresh: Fresh | None = None,
    arrivals: Tensor | None = None,
    is_split: bool,
    warps: int | None = None,
    stages: int | None = None,
) -> Tensor:
    """`query [rows, heads, width]` over `keys, values [pages, kv heads, 64, width]`.

    `tables [rows, pages of a row]` says where a row's keys lie, `lengths [rows]` how many there
    are, the query's own included; both int32. A row of length 0 gets zeros. With `fresh` the query
    is not turned yet, and each row's newest key is turned and stored first.

    With `is_split` the splits of a row run in parallel, with the same bits: faster unless
    rows are many and alike. `arrivals` is int32, `[rows x kv heads]` or more, zeros before and
    after; a caller that has one saves the making.
    """
    assert keys.shape[2] == BLOCK.value, "a page must be a block of keys"
    assert lengths.dtype == tables.dtype == torch.int32
    query, keys, values, tables = (dense(x) for x in (query, keys, values, tables))
    (rows, heads, _), kv_heads = query.shape, keys.shape[1]
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    options = _shape(query, kv_heads, sliding) | {
        "HALF": fresh.rotated // 2 if fresh is not None else 0,
        "HAS_CAP": softcap is not None,
        "HAS_SINKS": sinks is not None,
        **_launch(keys, is_split, warps, stages),
    }
    pages = (keys, *keys.stride()[:3]), (values, *values.stride()[:3])
    seen = *pages, (tables, tables.stride(0)), lengths, sinks, (out, *out.stride()[:2])
    brought = (query, *query.stride()[:2]), None if fresh is None else _flat(fresh)
    arguments = *brought, *seen, *score_factors(scale, softcap)
    if not is_split:
        whole_kernel[rows, kv_heads](*arguments, **options)
        return out
    splits = triton.cdiv(tables.shape[1] * BLOCK.value, SPLIT.value)
    parts = _parts(rows * heads * splits, options["PADDED"], query.device)
    arrivals = _counters(rows * kv_heads, query.device) if arrivals is None else arrivals
    split_kernel[rows, kv_heads, splits](*arguments, parts, arrivals, **options)
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
    store_kernel[(tokens,)](
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


def _flat(fresh: Fresh) -> tuple[Any, ...]:
    """Tensors and strides as the kernels take them."""
    new = (dense(x) for x in (fresh.keys, fresh.values))
    angles = (dense(x) for x in (fresh.cos, fresh.sin))
    heads = (part for x in new for part in (x, *x.stride()[:2]))
    return (*heads, *(part for x in angles for part in (x, x.stride(0))))


def _launch(keys: Tensor, is_split: bool, warps: int | None, stages: int | None) -> dict[str, Any]:
    """How many warps a program has, and how many blocks of keys are under way."""
    usual = _SPLIT_LAUNCH if is_split else _WHOLE_LAUNCH
    padded = max(16, triton.next_power_of_2(keys.shape[3]))
    fitting = stages or usual[1]
    if stages is None and is_split:
        # A split is short: while one begins or ends, another one there keeps memory busy.
        fitting = fitting_stages(fitting, padded, keys.element_size(), HALF_SHARED_BYTES)
    fitting = fitting_stages(fitting, padded, keys.element_size())
    return {
        "num_warps": warps or usual[0],
        "num_stages": fitting,
        **dependent_launch(keys),
        **EXACT,
    }


def _shape(query: Tensor, kv_heads: int, sliding: int | None) -> dict[str, Any]:
    """What the kernels are compiled for: the tile is the heads of a key head, 16 at least."""
    _, heads, width = query.shape
    group = heads // kv_heads
    return {
        "GROUP": group,
        "TILE": max(16, triton.next_power_of_2(group)),
        "WIDTH": width,
        "PADDED": max(16, triton.next_power_of_2(width)),
        "SLIDING": sliding or 0,
    }


def _counters(count: int, device: torch.device) -> Tensor:
    return torch.zeros(count, dtype=torch.int32, device=device)


def _parts(lanes: int, padded: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Room for largest score, sum of weights and weighted values of every split."""
    flat = torch.empty(2, lanes, dtype=torch.float32, device=device)
    mixed = torch.empty(lanes, padded, dtype=torch.float32, device=device)
    return flat[0], flat[1], mixed
