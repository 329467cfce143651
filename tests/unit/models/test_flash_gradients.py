"""Gradients of long sequences, which are made a part of the queries at a time.

The flash kernel itself needs a GPU (tests/gpu/test_attention_kernels.py): here attention by blocks
stands for it, from the same outputs and log-sums.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from luyen.models.cuda import varlen_gradients
from luyen.models.cuda.varlen_segments import Segments

SCALE = 0.3


def attend(
    q: Tensor, k: Tensor, v: Tensor, segments: Segments, sliding: int | None
) -> tuple[Tensor, Tensor]:
    """Outputs `[tok, heads, width]` and log-sums `[heads, tok]`, written out."""
    out, lse = torch.empty_like(q), q.new_empty(q.shape[1], q.shape[0])
    for start, first, queries, keys in zip(*(x.tolist() for x in segments.ranges()), strict=True):
        own, seen = slice(start, start + queries), slice(first, first + keys)
        key, value = (x[seen].repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q[own], key) * SCALE
        last = torch.arange(queries)[:, None] + keys - queries
        place = torch.arange(keys)[None]
        is_hidden = place > last
        if sliding is not None:
            is_hidden |= place <= last - sliding
        scores = scores.masked_fill(is_hidden, -torch.inf)
        lse[:, own] = scores.logsumexp(-1)
        out[own] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), value)
    return out, lse


@pytest.mark.parametrize("sliding", [None, 6])
@pytest.mark.parametrize("rows", [4, 7, 64])
def test_parts_of_the_queries_have_the_gradients_of_all(
    monkeypatch: pytest.MonkeyPatch, rows: int, sliding: int | None
):
    segments = Segments.packed((19, 1, 8), (19, 5, 17))
    generator = torch.Generator().manual_seed(rows)
    shapes = ((28, 4, 8), (28, 4, 8), (41, 2, 8), (41, 2, 8))
    grad, q, k, v = (torch.randn(s, generator=generator) for s in shapes)
    out, lse = attend(q, k, v, segments, sliding)
    calls = list[int]()

    def flash(given: list[Tensor], part: Segments, scale: float, window: int | None) -> Any:
        calls.append(given[1].shape[0])
        g, q, k, v, o, logs = given
        return varlen_gradients.blockwise_gradients(
            g, q, k, v, o, logs, None, part, scale, window, None
        )[:3]

    monkeypatch.setattr(varlen_gradients, "_flash", flash)
    monkeypatch.setattr(varlen_gradients, "_rows_of_a_pass", lambda query, segments: rows)
    found = varlen_gradients.flash_gradients(grad, q, k, v, out, lse, segments, SCALE, sliding)
    assert max(calls) <= rows
    assert sum(calls) == len(q)
    assert len(calls) == (1 if rows == 64 else sum(-(-n // rows) for n in (19, 1, 8)))
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    query, key, value = inputs
    torch.autograd.backward(attend_by_autograd(query, key, value, segments, sliding), grad)
    for one, leaf in zip(found, inputs, strict=True):
        torch.testing.assert_close(one, leaf.grad, rtol=1e-4, atol=1e-4)


def attend_by_autograd(
    q: Tensor, k: Tensor, v: Tensor, segments: Segments, sliding: int | None
) -> Tensor:
    """`attend`'s outputs, with gradients."""
    parts = list[Tensor]()
    for start, first, queries, keys in zip(*(x.tolist() for x in segments.ranges()), strict=True):
        parts += [
            _row(q, k, v, start + i, first, keys - queries + i, sliding) for i in range(queries)
        ]
    return torch.cat(parts)


def _row(
    q: Tensor, k: Tensor, v: Tensor, query: int, first: int, last: int, sliding: int | None
) -> Tensor:
    begin = first if sliding is None else first + max(0, last - sliding + 1)
    seen = slice(begin, first + last + 1)
    key, value = (x[seen].repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    weights = (torch.einsum("hd,khd->hk", q[query], key) * SCALE).softmax(-1)
    return torch.einsum("hk,khd->hd", weights, value)[None]
