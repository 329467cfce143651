"""The output head: values by hand, and gradients that do not depend on chunks."""

import math

import pytest
import torch
from torch import nn

from luyen.models import head as head_module
from luyen.models.batch_invariant_linear import batch_invariant_few_rows
from luyen.models.head import Head, score

LOGITS = [[0.0, math.log(3.0), math.log(4.0)], [1.0, 1.0, 1.0]]


def fixed_head(rows: int = 3, **options) -> tuple[Head, torch.Tensor]:
    """A head whose logits are the hidden state itself."""
    linear = nn.Linear(rows, rows, bias=False)
    with torch.no_grad():
        linear.weight.copy_(torch.eye(rows))
    return Head(linear=linear, vocabulary=3, **options), torch.tensor(LOGITS)


def test_log_probability_entropy_and_squares_by_hand():
    head, hidden = fixed_head()
    found = score(head, hidden, torch.tensor([2, 0]), entropy=True, sum_pi_squared=True)
    p = [1 / 8, 3 / 8, 4 / 8]
    assert found.logp.tolist() == pytest.approx([math.log(0.5), math.log(1 / 3)], abs=1e-6)
    assert found.entropy.tolist() == pytest.approx(
        [-sum(x * math.log(x) for x in p), math.log(3)], abs=1e-6
    )
    assert found.sum_pi_squared.tolist() == pytest.approx([sum(x * x for x in p), 1 / 3], abs=1e-6)


def test_what_is_not_asked_for_is_none():
    head, hidden = fixed_head()
    found = score(head, hidden, torch.tensor([2, 0]))
    assert (found.entropy, found.sum_pi_squared) == (None, None)


def test_temperature_scale_and_cap_are_applied_in_this_order():
    head, hidden = fixed_head(scale=0.5, softcap=2.0)
    logits = head.logits(hidden, temperature=4.0)
    expected = [[2.0 * math.tanh(x * 0.5 / 2.0) / 4.0 for x in row] for row in LOGITS]
    assert torch.allclose(logits, torch.tensor(expected), atol=1e-6)


def test_ids_beyond_the_tokenizer_take_no_probability():
    head, hidden = fixed_head(rows=5)
    known = torch.cat([hidden, torch.full((2, 2), 50.0)], 1)
    found = score(head, known, torch.tensor([2, 0]))
    assert found.logp.tolist() == pytest.approx([math.log(0.5), math.log(1 / 3)], abs=1e-6)
    assert head.logits(known, temperature=1.0).shape == (2, 3)


def test_no_target_gives_no_score():
    head, hidden = fixed_head()
    found = score(head, hidden[:0], torch.zeros(0, dtype=torch.int64), entropy=True)
    assert found.logp.tolist() == []
    assert found.entropy.tolist() == []


def gradients(chunk: int, monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    monkeypatch.setattr(head_module, "_CHUNK_NUMBERS", chunk)
    torch.manual_seed(0)
    linear = nn.Linear(16, 40, bias=False)
    hidden = torch.randn(23, 16, requires_grad=True)
    head = Head(linear=linear, vocabulary=37, softcap=3.0)
    targets = torch.randint(0, 37, (23,))
    batch_invariant_few_rows(linear)
    found = score(head, hidden, targets, temperature=0.8, entropy=True)
    weights = torch.linspace(-1, 1, 23)
    (weights * found.logp + weights.flip(0) * found.entropy).sum().backward()
    return [found.logp.detach(), found.entropy.detach(), hidden.grad, linear.weight.grad]


@pytest.mark.parametrize("chunk", [37, 37 * 4, 1])
def test_chunks_change_neither_scores_nor_gradients(chunk: int, monkeypatch: pytest.MonkeyPatch):
    whole = gradients(1 << 24, monkeypatch)
    parts = gradients(chunk, monkeypatch)
    assert torch.equal(whole[0], parts[0])
    for a, b in zip(whole[1:], parts[1:], strict=True):
        assert (a - b).abs().max() <= 2e-6 * a.abs().max()


def test_chunks_keep_no_logits_for_the_backward_pass(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(head_module, "_CHUNK_NUMBERS", 37 * 4)
    kept: list[int] = []
    head = Head(linear=nn.Linear(16, 37, bias=False), vocabulary=37)
    hidden = torch.randn(23, 16, requires_grad=True)

    def note(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.shape[-1])
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        score(head, hidden, torch.zeros(23, dtype=torch.int64), entropy=True)
    assert 37 not in kept


def test_a_reported_entropy_has_no_gradient():
    head, hidden = fixed_head()
    options = {"entropy": True, "entropy_gradient": False}
    found = score(head, hidden.requires_grad_(), torch.tensor([2, 0]), **options)
    assert found.logp.requires_grad
    assert not found.entropy.requires_grad
    plain = score(head, hidden, torch.tensor([2, 0]), entropy=True)
    assert torch.equal(plain.entropy, found.entropy)
