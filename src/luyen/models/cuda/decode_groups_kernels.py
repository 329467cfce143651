"""Kernels for rows that read common pages together: the common pages, a row's own, all merged.

Pages are cut into parts of equal size, at least `LEAST` pages each. A part is the largest score,
the sum of weights and the weighted values of each query; parts that got no pages are not written.
"""
# pyright: reportMissingImports=false, reportIndexIssue=false

import triton
import triton.language as tl

from luyen.models.cuda.attend_block import (
    BLOCK,
    LOG2E,
    attend_block,
    finish,
    merge_split,
    nothing_seen,
)

LEAST = tl.constexpr(2)
"""Pages of a part at least."""


@triton.jit
def _range(first, stop, part, PARTS: tl.constexpr):
    """The pages of `first..stop` that a part takes; none if the parts before took them all."""
    size = tl.maximum(tl.cdiv(stop - first, PARTS), LEAST)
    start = first + part * size
    return start, tl.minimum(start + size, stop)


@triton.jit
def _attend_pages(
    query, keys, values, table, kv, first, stop, end, rate, cap,
    WIDTH: tl.constexpr, HAS_CAP: tl.constexpr, IS_FULL: tl.constexpr,
):  # fmt: skip
    """The pages `first..stop` of a table, one after the other; all queries see the keys to `end`.

    With `IS_FULL` they see all. Offsets inside a page are the same for every page.
    """
    top, total, mixed = nothing_seen(query.shape[0], query.shape[1])
    inside, column = tl.arange(0, BLOCK), tl.arange(0, query.shape[1])
    key_at = inside[:, None] * keys[3] + column[None, :]
    value_at = inside[:, None] * values[3] + column[None, :]
    for block in range(first, stop):
        page = tl.load(table + block).to(tl.int64)
        seen = block * BLOCK + inside < end
        mask = (column < WIDTH)[None, :]
        if not IS_FULL:
            mask = mask & seen[:, None]
        key_page = keys[0] + (page * keys[1] + kv * keys[2])
        value_page = values[0] + (page * values[1] + kv * values[2])
        key = tl.load(key_page + key_at, mask=mask, other=0.0)
        value = tl.load(value_page + value_at, mask=mask, other=0.0)
        top, total, mixed = attend_block(
            top, total, mixed, query, key, value, seen[None, :], rate, cap, HAS_CAP
        )
    return top, total, mixed


@triton.jit
def shared_kernel(
    query, keys, values, tables, lengths, shared, members, parts, rate, cap,
    TILES: tl.constexpr, MEMBERS: tl.constexpr, TILE: tl.constexpr, GROUP: tl.constexpr,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, HAS_CAP: tl.constexpr,
    SHARED_PARTS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Some members of a group, one key head, and one part of the shared pages."""
    group, kv, part = tl.program_id(0) // TILES, tl.program_id(1), tl.program_id(2)
    lane, column = tl.arange(0, TILE), tl.arange(0, PADDED)
    member = tl.program_id(0) % TILES * MEMBERS + lane // GROUP
    is_lane = (lane < MEMBERS * GROUP) & (member < members[2])
    row = tl.load(members[0] + group * members[1] + member, mask=is_lane, other=-1)
    # A row that rests is no member; pages of a group that rests may have another owner by now.
    length = tl.load(lengths + row, mask=row >= 0, other=0)
    row = tl.where(length > 0, row, -1).to(tl.int64)
    leader = tl.max(row, 0)
    if leader < 0:
        return
    end = tl.load(shared + leader) // BLOCK
    first, stop = _range(0, end, part, SHARED_PARTS)
    if first >= stop:
        return
    head = kv * GROUP + lane % GROUP
    mask = (row >= 0)[:, None] & (column < WIDTH)[None, :]
    at = row[:, None] * query[1] + head[:, None] * query[2] + column[None, :]
    tile = tl.load(query[0] + at, mask=mask, other=0.0)
    top, total, mixed = _attend_pages(
        tile, keys, values, tables[0] + leader * tables[1], kv, first, stop, stop * BLOCK,
        rate, cap, WIDTH, HAS_CAP, True,
    )  # fmt: skip
    at = ((row * tl.num_programs(1) + kv) * PARTS + part) * GROUP + lane % GROUP
    _store_part(parts, at, row >= 0, top, total, mixed)


@triton.jit
def own_kernel(
    query, keys, values, tables, lengths, shared, parts, sinks, out, rate, cap,
    TILE: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr,
    HAS_CAP: tl.constexpr, HAS_SINKS: tl.constexpr,
    SHARED_PARTS: tl.constexpr, OWN: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """One row, one key head, one part of the row's own pages; if it is the only one, all merged."""
    row, kv, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    length, common = tl.load(lengths + row), tl.load(shared + row)
    first, stop = _range(common // BLOCK, tl.cdiv(length, BLOCK), part, OWN)
    if (first >= stop) & (OWN > 1):
        return
    lane, column = tl.arange(0, TILE), tl.arange(0, PADDED)
    mask = (lane < GROUP)[:, None] & (column < WIDTH)[None, :]
    at = row * query[1] + (kv * GROUP + lane)[:, None] * query[2] + column[None, :]
    tile = tl.load(query[0] + at, mask=mask, other=0.0)
    top, total, mixed = _attend_pages(
        tile, keys, values, tables[0] + row * tables[1], kv, first, stop, length,
        rate, cap, WIDTH, HAS_CAP, False,
    )  # fmt: skip
    at = (row * tl.num_programs(1) + kv) * PARTS * GROUP + lane
    if OWN > 1:
        at += (SHARED_PARTS + part) * GROUP
        _store_part(parts, at, lane < GROUP, top, total, mixed)
    else:
        end = tl.where(length > 0, common // BLOCK, 0)
        top, total, mixed = _with_parts(
            top, total, mixed, parts, at, lane < GROUP, 0, end, SHARED_PARTS, GROUP
        )
        _write(out, sinks, row, kv, top, total, mixed, GROUP, WIDTH, HAS_SINKS)


@triton.jit
def merge_kernel(
    lengths, shared, parts, sinks, out,
    TILE: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr,
    HAS_SINKS: tl.constexpr, SHARED_PARTS: tl.constexpr, OWN: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """One row and one key head: all its parts."""
    row, kv = tl.program_id(0).to(tl.int64), tl.program_id(1)
    length, common = tl.load(lengths + row), tl.load(shared + row)
    # A row that rests has no parts, whatever its group shares.
    end = tl.where(length > 0, common // BLOCK, 0)
    lane = tl.arange(0, TILE)
    at = (row * tl.num_programs(1) + kv) * PARTS * GROUP + lane
    top, total, mixed = nothing_seen(TILE, PADDED)
    top, total, mixed = _with_parts(
        top, total, mixed, parts, at, lane < GROUP, 0, end, SHARED_PARTS, GROUP
    )
    at += SHARED_PARTS * GROUP
    own = tl.cdiv(length, BLOCK)
    top, total, mixed = _with_parts(
        top, total, mixed, parts, at, lane < GROUP, end, own, OWN, GROUP
    )
    _write(out, sinks, row, kv, top, total, mixed, GROUP, WIDTH, HAS_SINKS)


@triton.jit
def _store_part(parts, at, mask, top, total, mixed):
    """Largest score, sum of weights and weighted values of each lane."""
    column = tl.arange(0, mixed.shape[1])
    tl.store(parts[0] + at, top, mask=mask)
    tl.store(parts[1] + at, total, mask=mask)
    tl.store(parts[2] + at[:, None] * mixed.shape[1] + column[None, :], mixed, mask=mask[:, None])


@triton.jit
def _with_parts(
    top, total, mixed, parts, at, mask, first, stop, PARTS: tl.constexpr, GROUP: tl.constexpr
):
    """What was merged so far, with the parts that the pages `first..stop` were cut into."""
    column = tl.arange(0, mixed.shape[1])
    size = tl.maximum(tl.cdiv(stop - first, PARTS), LEAST)
    for part in range(0, tl.cdiv(stop - first, size)):
        here = at + part * GROUP
        part_top = tl.load(parts[0] + here, mask=mask, other=-float("inf"))
        part_total = tl.load(parts[1] + here, mask=mask, other=0.0)
        places = here[:, None] * mixed.shape[1] + column[None, :]
        part_mixed = tl.load(parts[2] + places, mask=mask[:, None], other=0.0)
        top, total, mixed = merge_split(top, total, mixed, part_top, part_total, part_mixed)
    return top, total, mixed


@triton.jit
def _write(
    out, sinks, row, kv, top, total, mixed,
    GROUP: tl.constexpr, WIDTH: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """The outputs of a row's heads; a sink counts here, and so once."""
    TILE: tl.constexpr = mixed.shape[0]
    lane, column = tl.arange(0, TILE), tl.arange(0, mixed.shape[1])
    sink = tl.zeros([TILE], tl.float32)
    if HAS_SINKS:
        found = tl.load(sinks + kv * GROUP + lane, mask=lane < GROUP, other=0.0)
        sink = found.to(tl.float32) * LOG2E
    result, _ = finish(top, total, mixed, sink, HAS_SINKS)
    at = row * out[1] + (kv * GROUP + lane)[:, None] * out[2] + column[None, :]
    mask = (lane < GROUP)[:, None] & (column < WIDTH)[None, :]
    tl.store(out[0] + at, result.to(out[0].dtype.element_ty), mask=mask)
