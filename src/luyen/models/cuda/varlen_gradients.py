"""Gradients of packed attention, from its output and log-sum-exp. No triton here.

Where PyTorch's flash kernel knows the kind of attention, it is used. Otherwise scores are computed
again, a few queries at a time: right for every kind of attention, and slow.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from luyen.models.batch_invariant import deterministic_algorithms
from luyen.models.cuda.varlen_segments import Segments

_QUERIES = 128
"""Queries whose scores are in memory at once."""

Gradients = tuple[Tensor, Tensor, Tensor, Tensor | None]
"""Of query, key, value and sinks."""


def attention_gradients(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    sinks: Tensor | None,
    segments: Segments,
    scale: float,
    sliding: int | None,
    softcap: float | None,
) -> Gradients:
    """Gradients by the fastest way that fits."""
    is_known = softcap is None and sinks is None and segments.is_packed and query.is_cuda
    width, is_half = query.shape[-1], query.dtype in (torch.bfloat16, torch.float16)
    if is_known and is_half and width <= 256 and width % 8 == 0:
        found = flash_gradients(grad, query, key, value, out, lse, segments, scale, sliding)
        return (*found, None)
    return blockwise_gradients(
        grad, query, key, value, out, lse, sinks, segments, scale, sliding, softcap
    )


def flash_gradients(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    segments: Segments,
    scale: float,
    sliding: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """PyTorch's flash kernel, on CUDA in bf16 or fp16; segments must be packed.

    The same inputs give the same gradients, to the bit.
    """
    given = [x.contiguous() for x in (grad, query, key, value, out, lse)]
    if query.shape[0] <= _rows_of_a_pass(query, len(segments.query_lengths)):
        return _flash(given, segments, scale, sliding)
    below = torch.empty_like(given[1])
    # Parts of keys that several passes read are summed in fp32, in order.
    sums = [torch.zeros_like(x, dtype=torch.float32) for x in given[2:4]]
    for part in query_parts(segments, _rows_of_a_pass(query, 1)):
        (first, end), (first_key, end_key) = part
        own, seen = slice(first, end), slice(first_key, end_key)
        g, q, k, v, o, logs = given
        piece = [g[own], q[own], k[seen], v[seen], o[own], logs[:, own].contiguous()]
        one = Segments.packed((end - first,), (end_key - first_key,), device=query.device)
        below[own], *grads = _flash(piece, one, scale, sliding)
        for total, grad_part in zip(sums, grads, strict=True):
            total[seen] += grad_part
    return below, sums[0].to(key.dtype), sums[1].to(value.dtype)


def _flash(
    given: list[Tensor], segments: Segments, scale: float, sliding: int | None
) -> tuple[Tensor, Tensor, Tensor]:
    # There is no dropout: the state of the random numbers is never read.
    state = torch.zeros(2, dtype=torch.uint64, device=given[0].device)
    ends = segments.query_ends(), segments.key_ends()
    with deterministic_algorithms():
        return torch.ops.aten._flash_attention_backward(
            *given, *ends, segments.max_query, segments.max_key,
            0.0, sliding is None, state, state[:0], scale=scale,
            window_size_left=-1 if sliding is None else sliding - 1, window_size_right=0,
        )  # fmt: skip


_PARTIAL_SUMS = 1 << 29
"""Bytes of partial gradients of queries that exist at once."""
_TILE = 128


def _rows_of_a_pass(query: Tensor, segments: int) -> int:
    """Queries of one call of the flash kernel.

    To repeat, the kernel keeps gradients of queries in as many fp32 parts as it takes to occupy all
    multiprocessors with so few heads and segments: a long sequence would need gigabytes of them, on
    a rank with a quarter of the heads too.
    """
    _, heads, width = query.shape
    units = torch.cuda.get_device_properties(query.device).multi_processor_count
    parts = -(-units // max(1, segments * heads))
    each = 4 * parts * heads * (-(-width // 32) * 32)
    return max(_TILE, _PARTIAL_SUMS // each // _TILE * _TILE)


def query_parts(segments: Segments, rows: int) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """Ranges of at most `rows` queries, each with the range of keys that some of them see.

    Example:
        >>> for part in query_parts(Segments.packed((3, 1), (3, 5)), 2):
        ...     print(*part)
        (0, 2) (0, 2)
        (2, 3) (0, 3)
        (3, 4) (3, 8)
    """
    columns = (column.tolist() for column in segments.ranges())
    for start, first_key, queries, keys in zip(*columns, strict=True):
        for begin in range(0, queries, rows):
            end = min(begin + rows, queries)
            yield (start + begin, start + end), (first_key, first_key + keys - queries + end)


def blockwise_gradients(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    sinks: Tensor | None,
    segments: Segments,
    scale: float,
    sliding: int | None,
    softcap: float | None,
) -> Gradients:
    """Recompute the scores, `_QUERIES` queries of one segment at a time; waits for the device."""
    kv_heads, width = key.shape[1:]
    groups = query.shape[1] // kv_heads
    delta = (grad.float() * out.float()).sum(-1)
    grads = [torch.zeros_like(x, dtype=torch.float32) for x in (query, key, value)]
    for query_start, key_start, queries, keys in torch.stack(segments.ranges(), 1).tolist():
        span = slice(key_start, key_start + keys)
        k, v = key[span].float(), value[span].float()
        for begin in range(0, queries, _QUERIES):
            count = min(_QUERIES, queries - begin)
            now = slice(query_start + begin, query_start + begin + count)
            q, g = (x[now].float().view(count, kv_heads, groups, width) for x in (query, grad))
            logs, d = (x.view(count, kv_heads, groups, 1) for x in (lse.T[now], delta[now]))
            place = torch.arange(count, device=q.device) + (keys - queries + begin)
            weights, slope = _weights(q, k, logs, place, scale, sliding, softcap)
            steps = weights * (torch.einsum("qkgw,nkw->qkgn", g, v) - d) * slope
            grads[0][now] += torch.einsum("qkgn,nkw->qkgw", steps, k).flatten(1, 2)
            grads[1][span] += torch.einsum("qkgn,qkgw->nkw", steps, q)
            grads[2][span] += torch.einsum("qkgn,qkgw->nkw", weights, g)
    sink = None
    if sinks is not None:
        sink = -(torch.exp(sinks.float() - lse.T) * delta).sum(0).to(sinks.dtype)
    q, k, v = (g.to(x.dtype) for g, x in zip(grads, (query, key, value), strict=True))
    return q, k, v, sink


def _weights(
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    place: Tensor,
    scale: float,
    sliding: int | None,
    softcap: float | None,
) -> tuple[Tensor, Tensor | float]:
    """Probabilities `[query, kv head, group, key]`, and how the score moves with `q` times `k`."""
    scores = torch.einsum("qkgw,nkw->qkgn", q, k) * scale
    slope: Tensor | float = scale
    if softcap is not None:
        squashed = torch.tanh(scores / softcap)
        scores, slope = softcap * squashed, scale * (1.0 - squashed * squashed)
    distance = place[:, None] - torch.arange(k.shape[0], device=k.device)[None, :]
    seen = distance >= 0
    if sliding is not None:
        seen &= distance < sliding
    weights = torch.exp(scores - lse).masked_fill(~seen[:, None, None, :], 0.0)
    return weights, slope
