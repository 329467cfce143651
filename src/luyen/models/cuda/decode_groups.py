"""Attention of one new token a row, where samples of a prompt read its pages together.

The queries of a group meet the pages it shares in one product; each row then meets its own keys,
and the parts are merged by their largest scores. That is the attention of `paged_decode` with
another order of sums. Groups are data: nothing waits for the device, and one CUDA graph serves all
lengths and memberships.
"""
# pyright: reportMissingImports=false, reportIndexIssue=false

from dataclasses import dataclass
from typing import Any, final

import torch
import triton
from torch import Tensor

from luyen.models.cuda.attend_block import BLOCK, dense, fitting_stages, score_factors
from luyen.models.cuda.decode_groups_kernels import merge_kernel, own_kernel, shared_kernel

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
