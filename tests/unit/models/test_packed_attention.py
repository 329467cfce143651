"""Packed attention against attention written out in float64, one sequence at a time."""

import pytest
import torch
from torch import Tensor

from luyen.models.attention import (
    AttentionWindow,
    causal_attention,
    decode_attention,
    decode_mask,
)
from luyen.models.packed_attention import PackedContext, packed_positions

LENGTHS = (3, 1, 40, 33, 8, 70)
WINDOWS = {
    "plain": AttentionWindow(),
    "sliding": AttentionWindow(sliding=5),
    "capped": AttentionWindow(softcap=1.5),
    "capped and sliding": AttentionWindow(softcap=1.5, sliding=5),
    "sinks": AttentionWindow(sinks=torch.tensor([0.3, -1.0, 2.0, 0.0])),
}


def dense(q: Tensor, k: Tensor, v: Tensor, scale: float, window: AttentionWindow) -> Tensor:
    """`[tok, heads, width]` of one sequence, head by head and query by query, in float64."""
    q, k, v = q.double(), k.double(), v.double()
    out = torch.zeros(q.shape[0], q.shape[1], v.shape[2], dtype=torch.float64)
    shared = q.shape[1] // k.shape[1]
    for head in range(q.shape[1]):
        for i in range(q.shape[0]):
            first = 0 if window.sliding is None else max(0, i - window.sliding + 1)
            scores = k[first : i + 1, head // shared] @ q[i, head] * scale
            if window.softcap is not None:
                scores = window.softcap * torch.tanh(scores / window.softcap)
            if window.sinks is not None:
                scores = torch.cat([scores, window.sinks[head : head + 1].double()])
            weights = torch.softmax(scores, 0)[: i + 1 - first]
            out[i, head] = weights @ v[first : i + 1, head // shared]
    return out


def packed(value_width: int = 16) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values `[1, heads, tok, width]` of 4 heads that share 2 keys."""
    torch.manual_seed(0)
    tokens = sum(LENGTHS)
    return (
        torch.randn(1, 4, tokens, 16),
        torch.randn(1, 2, tokens, 16),
        torch.randn(1, 2, tokens, value_width),
    )


@pytest.mark.parametrize("name", WINDOWS)
def test_packed_attention_is_that_of_each_sequence_alone(name: str):
    q, k, v = packed()
    out = PackedContext.of(LENGTHS).attend(0, q, k, v, 0.3, WINDOWS[name])[0]
    parts = zip(*(x[0].transpose(0, 1).split(LENGTHS) for x in (q, k, v)), strict=True)
    expected = torch.cat([dense(*part, 0.3, WINDOWS[name]) for part in parts])
    assert (out.double() - expected).abs().max() < 1e-5


def test_values_may_be_narrower_than_keys():
    q, k, v = packed(value_width=8)
    out = PackedContext.of(LENGTHS).attend(0, q, k, v, 0.3, AttentionWindow())[0]
    parts = zip(*(x[0].transpose(0, 1).split(LENGTHS) for x in (q, k, v)), strict=True)
    expected = torch.cat([dense(*part, 0.3, AttentionWindow()) for part in parts])
    assert (out.double() - expected).abs().max() < 1e-5


@pytest.mark.parametrize("name", WINDOWS)
def test_decoding_one_query_is_the_last_row_of_the_whole(name: str):
    q, k, v = (x[0].transpose(0, 1) for x in packed())
    rows = torch.stack([x[:50].transpose(0, 1) for x in (k, k)])
    values = torch.stack([x[:50].transpose(0, 1) for x in (v, v)])
    lengths = torch.tensor([9, 50])
    query = torch.stack([q[8], q[49]])
    shown = decode_mask(lengths, 50, WINDOWS[name], query.dtype)
    out = decode_attention(query, rows, values, shown, 0.3, WINDOWS[name])
    for row, length in enumerate(lengths.tolist()):
        whole = dense(q[:length], k[:length], v[:length], 0.3, WINDOWS[name])
        assert (out[row].double() - whole[-1]).abs().max() < 1e-5


@pytest.mark.parametrize("name", WINDOWS)
def test_gradients_stay_inside_a_sequence(name: str):
    q, k, v = (x.requires_grad_() for x in packed())
    out = PackedContext.of(LENGTHS).attend(0, q, k, v, 0.3, WINDOWS[name])
    out[0, 4:44].square().sum().backward()
    for grad in (q.grad, k.grad, v.grad):
        assert grad is not None
        assert grad[0, :, 4:44].abs().min() >= 0
        assert grad[0, :, 4:44].abs().sum() > 0
        assert grad[0, :, :4].abs().max() == 0
        assert grad[0, :, 44:].abs().max() == 0


def test_garbage_in_another_sequence_changes_nothing():
    q, k, v = packed()
    context = PackedContext.of(LENGTHS)
    before = context.attend(0, q, k, v, 0.3, AttentionWindow())
    for x in (q, k, v):
        x[:, :, :4] = torch.nan
    after = context.attend(0, q, k, v, 0.3, AttentionWindow())
    assert torch.equal(before[:, 4:], after[:, 4:])


def test_the_sink_gets_every_key_and_value_once():
    q, k, v = packed()
    seen: dict[int, tuple[Tensor, Tensor]] = {}

    class Keep:
        def store(self, layer: int, keys: Tensor, values: Tensor) -> None:
            seen[layer] = (keys, values)

    PackedContext.of(LENGTHS, sink=Keep()).attend(3, q, k, v, 0.3, AttentionWindow())
    assert torch.equal(seen[3][0], k[0].transpose(0, 1))
    assert torch.equal(seen[3][1], v[0].transpose(0, 1))


def test_positions_start_anew():
    assert packed_positions([3, 1, 2], "cpu").tolist() == [0, 1, 2, 0, 0, 1]


def test_empty_sequences_are_passed_over():
    q, k, v = (x[:, :, :5] for x in packed())
    both = PackedContext.of([0, 3, 0, 2]).attend(0, q, k, v, 0.3, AttentionWindow())
    assert torch.equal(both, PackedContext.of([3, 2]).attend(0, q, k, v, 0.3, AttentionWindow()))


def test_a_wide_window_is_plain_attention():
    q, k, v = packed()
    wide = causal_attention(q, k, v, 0.3, AttentionWindow(sliding=1000))
    plain = causal_attention(q, k, v, 0.3, AttentionWindow())
    assert (wide - plain).abs().max() < 1e-6
