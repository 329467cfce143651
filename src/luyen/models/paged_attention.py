"""Attention over a paged KV cache: Triton kernels on CUDA, plain PyTorch otherwise.

Pages of a layer are `[pages, kv heads, 64, width]`; a row of `tables` lists the pages of a sequence
in order. Entries beyond a sequence's length are never looked at.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from luyen.models.attention import AttentionWindow, decode_attention, decode_mask, masked_attention
from luyen.models.fused.ops import Joint

PAGE = 64
"""Tokens of a page."""
QUERY_TILE = 64
"""Queries of a chunk that one program computes."""


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pages:
    """Keys and values of one layer.

    Example:
        >>> Pages(keys=torch.zeros(2, 1, 64, 8), values=torch.zeros(2, 1, 64, 8)).keys.shape[0]
        2
    """

    keys: Tensor
    """`[pages, kv heads, 64, width]`."""
    values: Tensor
    """The same shape, or another width."""


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Groups:
    """Rows whose tables begin with the same pages, and may read them together.

    Example:
        >>> members = torch.tensor([[0, 2]], dtype=torch.int32)
        >>> Groups(members=members, shared=torch.tensor([64, 0, 64])).members.shape[1]
        2
    """

    members: Tensor
    """int32 `[groups, most members]`: row numbers, -1 where there is none."""
    shared: Tensor
    """int32 `[rows]`: keys in the common pages, fewer than the row has; 0: a row of no group."""


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Chunks:
    """New tokens of some sequences, packed: each chunk is the end of what its sequence has so far.

    Example:
        Made by `luyen.rollout.native.paged.prefill.read_pass` for every pass over prompts.
    """

    starts: Tensor
    """int32: first packed token of each chunk."""
    queries: Tensor
    """int32: tokens of each chunk; 0: no chunk."""
    keys: Tensor
    """int32: tokens of each sequence, the chunk included."""
    longest_query: int
    """No chunk has more tokens."""
    longest_key: int
    """No sequence has more tokens."""
    tiles: Tensor
    """int32 `[programs, 2]`: chunk and first query of each program, one for every tile."""


def sent(
    values: Sequence[Any] | np.ndarray[Any, Any],
    device: torch.device | str,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """A tensor of host numbers on the device, without waiting for what the device is doing.

    An array of numpy is much faster than a list.
    """
    if isinstance(values, np.ndarray):
        made = torch.from_numpy(values)
    else:
        made = torch.tensor(values, dtype=dtype)
    if torch.device(device).type != "cuda":
        return made
    # Pinned memory is kept until the copy has run; a plain copy would wait for the stream.
    return made.pin_memory().to(device, non_blocking=True)


def store(pages: Pages, keys: Tensor, values: Tensor, slots: Tensor) -> None:
    """Write `[tok, kv heads, width]` at each token's slot (page x 64 + place); below 0: nowhere."""
    if keys.is_cuda:
        from luyen.models.cuda.decode import store_keys_values

        store_keys_values(keys, values, pages.keys, pages.values, slots)
        return
    kept = slots >= 0
    page, place = slots[kept] // PAGE, slots[kept] % PAGE
    pages.keys[page, :, place] = keys[kept]
    pages.values[page, :, place] = values[kept]


def decode(
    query: Tensor,
    pages: Pages,
    tables: Tensor,
    lengths: Tensor,
    scale: float,
    window: AttentionWindow,
    *,
    is_split: bool,
    arrivals: Tensor | None = None,
) -> Tensor:
    """One query a row, `[rows, heads, width]`; a row of length 0 gives zeros.

    `is_split` spreads a row over several programs, which pays unless rows are many; it does not
    change a bit. `arrivals` is room for their counters, int32 zeros before and after.
    """
    if query.is_cuda:
        from luyen.models.cuda.decode import paged_decode

        return paged_decode(
            query,
            pages.keys,
            pages.values,
            tables,
            lengths,
            scale,
            sliding=window.sliding,
            softcap=window.softcap,
            sinks=window.sinks,
            is_split=is_split,
            arrivals=arrivals,
        )
    keys, values = (_gathered(x, tables) for x in (pages.keys, pages.values))
    shown = decode_mask(lengths.clamp(min=1), keys.shape[2], window, query.dtype)
    out = decode_attention(query, keys, values, shown, scale, window)
    return torch.where(lengths[:, None, None] > 0, out, 0.0)


def decode_grouped(
    query: Tensor,
    pages: Pages,
    tables: Tensor,
    lengths: Tensor,
    groups: Groups,
    scale: float,
    window: AttentionWindow,
    *,
    is_split: bool,
) -> Tensor:
    """As `decode`, but the rows of a group read their common pages once; other order of sums.

    A layer with a sliding window reads row by row: few of the common keys may be in sight.
    """
    if window.sliding is not None:
        return decode(query, pages, tables, lengths, scale, window, is_split=is_split)
    if query.is_cuda:
        from luyen.models.cuda.decode_groups import grouped_decode

        return grouped_decode(
            query,
            pages.keys,
            pages.values,
            tables,
            lengths,
            groups.members,
            groups.shared,
            scale,
            softcap=window.softcap,
            sinks=window.sinks,
            is_split=is_split,
        )
    return _decode_in_parts(query, pages, tables, lengths, groups, scale, window)


def prefill(
    query: Tensor,
    pages: Pages,
    tables: Tensor,
    chunks: Chunks,
    scale: float,
    window: AttentionWindow,
) -> Tensor:
    """Packed queries `[tok, heads, width]` over what their sequences have so far, causally.

    What a query gets that belongs to no chunk is not defined.
    """
    if query.is_cuda:
        from luyen.models.cuda.varlen import Segments, paged_prefill

        segments = Segments(
            query_starts=chunks.starts,
            # Pages say where keys lie; a start has no meaning then.
            key_starts=chunks.starts,
            query_lengths=chunks.queries,
            key_lengths=chunks.keys,
            max_query=chunks.longest_query,
            max_key=chunks.longest_key,
        )
        return paged_prefill(
            query,
            pages.keys,
            pages.values,
            tables,
            segments,
            scale,
            sliding=window.sliding,
            softcap=window.softcap,
            sinks=window.sinks,
            tile=QUERY_TILE,
            tiles=chunks.tiles,
        )
    return _prefill_on_cpu(query, pages, tables, chunks, scale, window)


def _prefill_on_cpu(
    query: Tensor,
    pages: Pages,
    tables: Tensor,
    chunks: Chunks,
    scale: float,
    window: AttentionWindow,
) -> Tensor:
    out = query.new_zeros(*query.shape[:2], pages.values.shape[-1])
    for row, (start, count, length) in enumerate(
        zip(chunks.starts.tolist(), chunks.queries.tolist(), chunks.keys.tolist(), strict=True)
    ):
        if count == 0:
            continue
        table = tables[row : row + 1, : -(-length // PAGE)]
        keys, values = (_gathered(x, table)[:, :, :length] for x in (pages.keys, pages.values))
        q = query[start : start + count].transpose(0, 1)[None]
        place = torch.arange(length)
        mask = place[None, :] <= place[length - count :, None]
        if window.sliding is not None:
            mask &= place[length - count :, None] - place[None, :] < window.sliding
        seen = masked_attention(q, keys, values, mask, scale, window)
        out[start : start + count] = seen[0].transpose(0, 1)
    return out


def _gathered(pages: Tensor, tables: Tensor) -> Tensor:
    """`[rows, kv heads, tokens, width]` of the tables' pages."""
    found = pages[tables.long()]
    rows, count, heads, size, width = found.shape
    return found.transpose(1, 2).reshape(rows, heads, count * size, width)


def _decode_in_parts(
    query: Tensor,
    pages: Pages,
    tables: Tensor,
    lengths: Tensor,
    groups: Groups,
    scale: float,
    window: AttentionWindow,
) -> Tensor:
    """Group by group, then row by row: for checking who belongs together, not for speed."""
    rows, heads = query.shape[:2]
    common: dict[int, tuple[Tensor, Tensor]] = {}
    for line in groups.members.tolist():
        here = [row for row in line if row >= 0 and lengths[row] > 0]
        if here:
            table = tables[here[0], : int(groups.shared[here[0]]) // PAGE]
            out, weight = _part(query[here], pages, table, table.numel() * PAGE, scale, window)
            common |= {row: (out[i], weight[i]) for i, row in enumerate(here)}
    result = query.new_zeros(rows, heads, pages.values.shape[-1])
    for row in lengths.nonzero()[:, 0].tolist():
        first = int(groups.shared[row])
        table = tables[row, first // PAGE : -(-int(lengths[row]) // PAGE)]
        out, weight = _part(
            query[row : row + 1], pages, table, int(lengths[row]) - first, scale, window
        )
        parts = [(out[0], weight[0]), *([common[row]] if first else [])]
        scores = torch.stack([weight for _, weight in parts])
        if window.sinks is not None:
            scores = torch.cat([scores, window.sinks.to(scores)[None]])
        shares = scores.softmax(0)[:, :, None]
        result[row] = sum(share * out for share, (out, _) in zip(shares, parts, strict=False))
    return result


def _part(
    query: Tensor, pages: Pages, table: Tensor, length: int, scale: float, window: AttentionWindow
) -> tuple[Tensor, Tensor]:
    """Output `[queries, heads, width]` over the first keys of a table, and its log-sum-exp."""
    keys, values = (_gathered(x, table[None])[0, :, :length] for x in (pages.keys, pages.values))
    grouped = query.unflatten(1, (keys.shape[0], -1))
    scores = torch.einsum("qhgw,hnw->qhgn", grouped, keys) * scale
    if window.softcap is not None:
        scores = window.softcap * torch.tanh(scores / window.softcap)
    out = torch.einsum("qhgn,hnw->qhgw", scores.softmax(-1), values)
    return out.flatten(1, 2), scores.logsumexp(-1).flatten(1, 2)


# Decoding on CUDA from a joint projection: positions, the cache and attention in one kernel.


def decode_joint(
    joint: Joint,
    pages: Pages,
    tables: Tensor,
    lengths: Tensor,
    scale: float,
    window: AttentionWindow,
    *,
    is_split: bool,
    arrivals: Tensor,
) -> Tensor:
    """As `decode`; each row's newest key is rotated and stored on the way."""
    from luyen.models.cuda.decode import Fresh, paged_decode

    query, key, value = joint.heads.split(joint.qkv)
    return paged_decode(
        query,
        pages.keys,
        pages.values,
        tables,
        lengths,
        scale,
        sliding=window.sliding,
        softcap=window.softcap,
        sinks=window.sinks,
        fresh=Fresh(keys=key, values=value, cos=joint.cos, sin=joint.sin, rotated=joint.rotated),
        arrivals=arrivals,
        is_split=is_split,
    )
