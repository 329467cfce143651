"""Attention of one new token a row over a paged cache, and writing to that cache.

Nothing here waits for the device, and no shape depends on lengths: one CUDA graph serves rows of
all lengths.
"""
# pyright: reportMissingImports=false, reportIndexIssue=false

from dataclasses import dataclass
from typing import Any, final

import torch
import triton
from torch import Tensor

from luyen.models.cuda.attend_block import (
    BLOCK,
    EXACT,
    SPLIT,
    dense,
    fitting_stages,
    score_factors,
)
from luyen.models.cuda.decode_kernels import split_kernel, store_kernel, whole_kernel
from luyen.models.cuda.early import early

_BESIDE, _WHOLE = (2, 5), (1, 4)
"""Warps and stages that were fastest on an H200 for splits and for whole rows: no bit changes."""


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Fresh:
    """New keys and values as the projection made them, which are not in the cache yet.

    Example:
        `Fresh(keys=k, values=v, cos=cos, sin=sin, rotated=64)` beside queries of the same kind.
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

    With `is_split` the splits of a row run beside each other, with the same bits: faster unless
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
    usual = _BESIDE if is_split else _WHOLE
    padded = max(16, triton.next_power_of_2(keys.shape[3]))
    fitting = fitting_stages(stages or usual[1], padded, keys.element_size())
    return {"num_warps": warps or usual[0], "num_stages": fitting, **early(keys), **EXACT}


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
