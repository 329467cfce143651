"""The arithmetic of attention on a GPU, once, for every kernel.

What a query gets depends on the query and its keys only. Keys are taken in blocks by their position
in the sequence, blocks form splits of fixed size, and splits are merged in order. A block or a
split that a query does not see changes none of its bits, so kernels may take several queries
together, start at the first key that anyone sees, or compute splits apart.

Launch every kernel with `EXACT`: the compiler may otherwise fuse a product and a sum in one kernel
and not in another.
"""
# pyright: reportMissingImports=false

import triton
import triton.language as tl
from torch import Tensor

BLOCK = tl.constexpr(64)
"""Keys of one step, and of one page of the cache."""
SPLIT = tl.constexpr(512)
"""Keys between two merges."""
EXACT = {"enable_fp_fusion": False}
"""Launch options that every kernel shares."""
LOG2E = tl.constexpr(1.4426950408889634)
_LN2 = tl.constexpr(0.6931471805599453)
_SHARED_BYTES = 160 * 1024
"""Of a multiprocessor's shared memory, what one program takes at most."""
HALF_SHARED_BYTES = 108 * 1024
"""What each of two programs on one multiprocessor may take."""


def score_factors(scale: float, softcap: float | None) -> tuple[float, float]:
    """`(rate, cap)` as `attend_block` takes them: scores are in powers of two."""
    if softcap is None:
        return scale * LOG2E.value, 0.0
    return 2.0 * LOG2E.value * scale / softcap, softcap * LOG2E.value


def fitting_stages(wanted: int, padded: int, element: int, room: int = _SHARED_BYTES) -> int:
    """As many of the wanted pipeline stages as there is room for in shared memory."""
    return max(1, min(wanted, room // (2 * BLOCK.value * padded * element)))


def dense(x: Tensor) -> Tensor:
    """The same numbers, those of one head side by side."""
    return x if x.stride(-1) == 1 else x.contiguous()


@triton.jit
def row_sums(weights):
    """Sums over a block of keys, by halves in a fixed order.

    The order of a plain sum follows from how numbers lie in registers, which changes with the
    number of warps. Here every step adds two numbers. Bits 0 and 5 of a key's place lie in one
    thread, 1 and 2 in one warp, so that few numbers are left when 3 and 4 cross warps.
    """
    halves = tl.reshape(weights, [weights.shape[0], 2, 2, 2, 2, 2, 2])
    halves = tl.sum(tl.sum(halves, 6), 1)
    halves = tl.sum(tl.sum(halves, 4), 3)
    return tl.sum(tl.sum(halves, 2), 1)


@triton.jit
def attend_block(top, total, mixed, query, key, value, seen, rate, cap, HAS_CAP: tl.constexpr):
    """One block of keys more: largest score, sum of weights and weighted values of each query."""
    scores = tl.dot(query, tl.trans(key), input_precision="ieee") * rate
    if HAS_CAP:
        # cap * tanh(x), with exp2(scores) = exp(2x).
        scores = cap - 2.0 * cap / (tl.exp2(scores) + 1.0)
    scores = tl.where(seen, scores, -float("inf"))
    risen = tl.maximum(top, tl.max(scores, 1))
    # A query that has seen nothing yet: -inf minus -inf would be NaN.
    base = tl.where(risen == -float("inf"), 0.0, risen)
    weights = tl.exp2(scores - base[:, None])
    fade = tl.exp2(top - base)
    total = total * fade + row_sums(weights)
    mixed = tl.dot(
        weights.to(value.dtype), value, acc=mixed * fade[:, None], input_precision="ieee"
    )
    return risen, total, mixed


@triton.jit
def merge_split(top, total, mixed, split_top, split_total, split_mixed):
    """What was merged so far, with the next split; a split that saw nothing has weight zero."""
    risen = tl.maximum(top, split_top)
    base = tl.where(risen == -float("inf"), 0.0, risen)
    fade = tl.exp2(top - base)
    weight = tl.exp2(split_top - base)
    total = total * fade + split_total * weight
    mixed = mixed * fade[:, None] + split_mixed * weight[:, None]
    return risen, total, mixed


@triton.jit
def finish(top, total, mixed, sink, HAS_SINKS: tl.constexpr):
    """Output and natural log-sum-exp; a query without keys gets zeros and infinity.

    A sink is merged like a split whose one key has the value zero.
    """
    if HAS_SINKS:
        top, total, mixed = merge_split(
            top, total, mixed, sink, tl.full(sink.shape, 1.0, tl.float32), tl.zeros_like(mixed)
        )
    is_real = total > 0.0
    divisor = tl.where(is_real, total, 1.0)
    # Adding zero turns -0 into 0: an unseen block does so too.
    out = mixed / divisor[:, None] + 0.0
    lse = tl.where(is_real, (top + tl.log2(divisor)) * _LN2, float("inf"))
    return out, lse


@triton.jit
def nothing_seen(TILE: tl.constexpr, PADDED: tl.constexpr):
    """Largest score, sum of weights and weighted values before the first key."""
    top = tl.full([TILE], -float("inf"), tl.float32)
    return top, tl.zeros([TILE], tl.float32), tl.zeros([TILE, PADDED], tl.float32)


@triton.jit
def attend_split(
    query,
    positions,
    keys,
    values,
    table,
    split,
    first,
    end,
    rate,
    cap,
    WIDTH: tl.constexpr,
    SLIDING: tl.constexpr,
    HAS_CAP: tl.constexpr,
    IS_PAGED: tl.constexpr,
):
    """The keys `first..end` that lie in a split; positions past `end` are never read.

    `keys` and `values` are (pointer, stride of a block, stride of a token); block `n` of a paged
    sequence is `table[n]`, otherwise `n`. The newest key a query sees is the one at its position.
    """
    TILE: tl.constexpr = query.shape[0]
    PADDED: tl.constexpr = query.shape[1]
    top, total, mixed = nothing_seen(TILE, PADDED)
    inside = tl.arange(0, BLOCK)
    column = tl.arange(0, PADDED)
    start = tl.maximum(split * SPLIT, first) // BLOCK
    stop = tl.cdiv(tl.minimum(split * SPLIT + SPLIT, end), BLOCK)
    for block in range(start, stop):
        unit = tl.cast(tl.load(table + block) if IS_PAGED else block, tl.int64)
        places = block * BLOCK + inside
        mask = (places < end)[:, None] & (column < WIDTH)[None, :]
        key_at = unit * keys[1] + inside[:, None] * keys[2] + column[None, :]
        key = tl.load(keys[0] + key_at, mask=mask, other=0.0)
        value_at = unit * values[1] + inside[:, None] * values[2] + column[None, :]
        value = tl.load(values[0] + value_at, mask=mask, other=0.0)
        seen = (places[None, :] <= positions[:, None]) & (places < end)[None, :]
        if SLIDING > 0:
            seen = seen & (positions[:, None] - places[None, :] < SLIDING)
        top, total, mixed = attend_block(
            top, total, mixed, query, key, value, seen, rate, cap, HAS_CAP
        )
    return top, total, mixed


@triton.jit
def attend_keys(
    query,
    positions,
    keys,
    values,
    table,
    first,
    end,
    rate,
    cap,
    WIDTH: tl.constexpr,
    SLIDING: tl.constexpr,
    HAS_CAP: tl.constexpr,
    IS_PAGED: tl.constexpr,
):
    """All splits that hold the keys `first..end`, merged in order."""
    TILE: tl.constexpr = query.shape[0]
    PADDED: tl.constexpr = query.shape[1]
    top, total, mixed = nothing_seen(TILE, PADDED)
    for split in range(first // SPLIT, tl.cdiv(end, SPLIT)):
        part_top, part_total, part_mixed = attend_split(
            query, positions, keys, values, table, split, first, end,
            rate, cap, WIDTH, SLIDING, HAS_CAP, IS_PAGED,
        )  # fmt: skip
        top, total, mixed = merge_split(top, total, mixed, part_top, part_total, part_mixed)
    return top, total, mixed
