"""Decode attention where samples of a prompt read its pages together (shared prefix).

The queries of a group meet the pages it shares in one product; each row then meets its own keys,
and the parts are merged by their largest scores. That is the attention of `paged_decode` with
another order of sums. Groups are data: nothing waits for the device, and one CUDA graph serves all
lengths and memberships.
"""

from dataclasses import dataclass
from typing import Any, final

import torch
import triton
import triton.language as tl
from torch import Tensor

from luyen.models.cuda.attend_block import (
    BLOCK,
    LOG2E,
    attend_block,
    dense,
    finish,
    fitting_stages,
    merge_split,
    nothing_seen,
    score_factors,
)

# Shared-prefix kernels: attention over common pages, over a row's own pages, and the merge.
#
# Pages are cut into parts of equal size, at least `LEAST` pages each. A part is the largest
# score, the sum of weights and the weighted values of each query; parts that got no pages are
# not written.

# pyright: reportMissingImports=false, reportIndexIssue=false


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


# pyright: reportMissingImports=false, reportIndexIssue=false


_PROGRAMS = 256
"""Programs that the common pages should keep busy: they are cut into parts until there are."""
_MOST_PARTS = 16
"""Common pages are not cut into more parts."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """How the kernels are launched; rounding may follow it.

    Example:
        `Launch(shared_parts=4)` cuts common pages in four, with all else as usual.
    """

    lanes: int = 64
    """Queries of one product at most: members of a group x heads that share a key head."""
    shared_parts: int | None = None
    """Parts of the common pages; None: by the number of rows."""
    shared_warps: int | None = None
    """Warps where common pages are read; None: by the queries of a product."""
    shared_stages: int = 4
    """Pages in flight there."""
    own_parts: int = 8
    """Parts of a row's own pages, where rows are few."""
    own_warps: int = 2
    """Warps where own pages are read."""
    own_stages: int = 4
    """Pages in flight there."""


_USUAL = Launch()


def grouped_decode(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    lengths: Tensor,
    members: Tensor,
    shared: Tensor,
    scale: float,
    *,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    is_split: bool,
    launch: Launch = _USUAL,
) -> Tensor:
    """`paged_decode` in another order of sums, for layers without a sliding window.

    A line of `members [groups, most]` lists the rows of a group, -1 where there is none; the tables
    of these rows begin with the same pages. `shared [rows]` says how many keys those hold: whole
    pages, fewer keys than the row has, 0 for a row of no group. Both are int32. With `is_split` a
    row's own keys are spread over several programs as well: faster where rows are few.
    """
    assert keys.shape[2] == BLOCK.value, "a page must be a block of keys"
    assert lengths.dtype == tables.dtype == members.dtype == shared.dtype == torch.int32
    query, keys, values, tables, members = map(dense, (query, keys, values, tables, members))
    read = (
        (query, *query.stride()[:2]),
        (keys, *keys.stride()[:3]),
        (values, *values.stride()[:3]),
        (tables, tables.stride(0)),
        lengths,
        shared,
    )
    tile = _tile_of(query, keys, members, launch)
    own = launch.own_parts if is_split else 1
    size = _sizes(query, keys, launch.shared_parts or _parts_for(tile["programs"]), own)
    parts = _room(query.shape[0] * query.shape[1] * size["PARTS"], size["PADDED"], query.device)
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    factors = score_factors(scale, softcap)
    _read_shared(read, members, parts, factors, tile, size, launch)
    _read_own(read, (parts, sinks, (out, *out.stride()[:2])), factors, size, own, launch)
    return out


def _read_shared(
    read: tuple[Any, ...],
    members: Tensor,
    parts: tuple[Tensor, ...],
    factors: tuple[float, float],
    tile: dict[str, int],
    size: dict[str, int],
    launch: Launch,
) -> None:
    """Every part of the common pages, for all members of a group at once."""
    keys: Tensor = read[1][0]
    grid = members.shape[0] * tile["TILES"], keys.shape[1], size["SHARED_PARTS"]
    compiled = {name: tile[name] for name in ("TILES", "MEMBERS", "TILE")}
    shared_kernel[grid](
        *read,
        (members, members.stride(0), members.shape[1]),
        parts,
        *factors,
        HAS_CAP=factors[1] != 0.0,
        **compiled,
        **size,
        num_warps=launch.shared_warps or max(1, min(8, tile["TILE"] // 16)),
        num_stages=fitting_stages(launch.shared_stages, size["PADDED"], keys.element_size()),
    )


def _read_own(
    read: tuple[Any, ...],
    write: tuple[Any, ...],
    factors: tuple[float, float],
    size: dict[str, int],
    own: int,
    launch: Launch,
) -> None:
    """Every row's own pages, and all parts merged."""
    keys: Tensor = read[1][0]
    grid = read[0][0].shape[0], keys.shape[1]
    compiled = {**size, "TILE": _padded(size["GROUP"]), "OWN": own}
    compiled["HAS_SINKS"] = write[1] is not None
    own_kernel[(*grid, own)](
        *read,
        *write,
        *factors,
        HAS_CAP=factors[1] != 0.0,
        **compiled,
        num_warps=launch.own_warps,
        num_stages=fitting_stages(launch.own_stages, size["PADDED"], keys.element_size()),
    )
    if own > 1:
        merge_kernel[grid](*read[4:], *write, **compiled)


def _tile_of(query: Tensor, keys: Tensor, members: Tensor, launch: Launch) -> dict[str, int]:
    """Members of a group that share a product, and how many such products full groups make."""
    (rows, heads, _), kv_heads, most = query.shape, keys.shape[1], members.shape[1]
    together = min(most, max(1, launch.lanes * kv_heads // heads))
    tiles = triton.cdiv(most, together)
    return {
        "MEMBERS": together,
        "TILES": tiles,
        "TILE": _padded(together * heads // kv_heads),
        "programs": max(1, rows // most) * tiles * kv_heads,
    }


def _sizes(query: Tensor, keys: Tensor, shared_parts: int, own: int) -> dict[str, int]:
    """What all kernels are compiled for.

    A row's only own part is merged where it is computed, and needs no room.
    """
    _, heads, width = query.shape
    return {
        "GROUP": heads // keys.shape[1],
        "WIDTH": width,
        "PADDED": _padded(width),
        "SHARED_PARTS": shared_parts,
        "PARTS": shared_parts + (own if own > 1 else 0),
    }


def _padded(count: int) -> int:
    """Rows or columns of a product that holds so many."""
    return max(16, triton.next_power_of_2(count))


def _parts_for(programs: int) -> int:
    """Parts of the common pages, where one part each makes so many programs."""
    return min(_MOST_PARTS, triton.next_power_of_2(triton.cdiv(_PROGRAMS, programs)))


def _room(lanes: int, padded: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Largest score, sum of weights and weighted values of every part, not written yet."""
    flat = torch.empty(2, lanes, dtype=torch.float32, device=device)
    mixed = torch.empty(lanes, padded, dtype=torch.float32, device=device)
    return flat[0], flat[1], mixed
