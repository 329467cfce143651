"""Divergences between a student and a teacher: by hand, against plain floats, in any chunk."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from luyen.algorithms.distillation import (
    distillation_advantages,
    forward_kl,
    forward_kl_topk,
    generalised_jsd,
    reverse_kl,
)
from luyen.algorithms.layout import Layout
from luyen.base.errors import UserError

VOCAB = 7


def layout_of(mask: list[bool]) -> Layout:
    return Layout(
        mask=torch.tensor(mask, dtype=torch.bool),
        offsets=torch.tensor([0, len(mask)]),
        groups=torch.tensor([0]),
    )


def rows(seed: int, tokens: int, scale: float = 1.5) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return scale * torch.randn(tokens, VOCAB, generator=draw, dtype=torch.float64)


def logp(logits: Tensor) -> Tensor:
    return torch.log_softmax(logits, -1)


def kl(p: list[float], q: list[float]) -> float:
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))


def middle(s: list[float], t: list[float], beta: float) -> float:
    m = [beta * b + (1 - beta) * a for a, b in zip(s, t, strict=True)]
    return beta * kl(t, m) + (1 - beta) * kl(s, m)


def topk(s: list[float], t: list[float], k: int) -> float:
    ids = sorted(range(VOCAB), key=lambda i: -t[i])[:k]
    a, b = [t[i] for i in ids], [s[i] for i in ids]
    rest = [(1 - sum(a), 1 - sum(b))] if k < VOCAB else []
    return kl([*a, *(x for x, _ in rest)], [*b, *(y for _, y in rest)])


@given(seed=st.integers(0, 500), chunk=st.integers(1, 6))
def test_every_divergence_equals_its_definition_in_any_chunk(seed: int, chunk: int):
    student, teacher = logp(rows(seed, 4)), logp(rows(seed + 999, 4))
    mask = [True, True, False, True]
    layout = layout_of(mask)
    s, t = student.exp().tolist(), teacher.exp().tolist()
    ids = teacher.topk(3).indices
    cases = [
        (reverse_kl(student, teacher, layout, chunk_tokens=chunk), lambda i: kl(s[i], t[i])),
        (forward_kl(student, teacher, layout, chunk_tokens=chunk), lambda i: kl(t[i], s[i])),
        (
            generalised_jsd(student, teacher, layout, beta=0.3, chunk_tokens=chunk),
            lambda i: middle(s[i], t[i], 0.3),
        ),
        (
            forward_kl_topk(student, ids, teacher.gather(1, ids), layout, chunk_tokens=chunk),
            lambda i: topk(s[i], t[i], 3),
        ),
    ]
    for found, expected in cases:
        wanted = [expected(i) if trains else 0.0 for i, trains in enumerate(mask)]
        assert found.per_token.tolist() == pytest.approx(wanted, rel=1e-9, abs=1e-12)
        assert found.metrics["distill/divergence"].value() == pytest.approx(sum(wanted) / 3)


def test_the_ends_of_the_jsd_are_the_two_kls():
    student, teacher, layout = logp(rows(1, 3)), logp(rows(2, 3)), layout_of([True] * 3)
    ends = generalised_jsd(student, teacher, layout, beta=0.0), forward_kl(student, teacher, layout)
    assert torch.equal(ends[0].per_token, ends[1].per_token)
    ends = generalised_jsd(student, teacher, layout, beta=1.0), reverse_kl(student, teacher, layout)
    assert torch.equal(ends[0].per_token, ends[1].per_token)
    near = generalised_jsd(student, teacher, layout, beta=1e-5).per_token / 1e-5
    torch.testing.assert_close(
        near, forward_kl(student, teacher, layout).per_token, rtol=1e-3, atol=0
    )
    with pytest.raises(UserError):
        generalised_jsd(student, teacher, layout, beta=1.1)
    with pytest.raises(UserError):
        reverse_kl(student, teacher, layout, chunk_tokens=0)


@given(seed=st.integers(0, 500))
def test_more_ids_give_more_of_the_forward_kl_and_all_ids_give_it_all(seed: int):
    student, teacher, layout = logp(rows(seed, 2)), logp(rows(seed + 7, 2)), layout_of([True] * 2)

    def of(k: int) -> Tensor:
        ids = teacher.topk(k).indices
        return forward_kl_topk(student, ids, teacher.gather(1, ids), layout).per_token

    full = forward_kl(student, teacher, layout).per_token
    ladder = [of(k) for k in range(1, VOCAB + 1)]
    assert (ladder[0] >= -1e-12).all()
    assert all((b >= a - 1e-12).all() for a, b in pairwise(ladder))
    torch.testing.assert_close(ladder[-1], full, rtol=1e-9, atol=1e-9)


def test_gradients_are_those_of_the_definition_and_the_teacher_has_none():
    logits, taught = rows(3, 5).requires_grad_(), rows(4, 5).requires_grad_()
    layout = layout_of([True, False, True, True, True])
    ids = taught.topk(3).indices
    losses = [
        lambda x: reverse_kl(logp(x), logp(taught), layout, chunk_tokens=2).per_token.sum(),
        lambda x: generalised_jsd(logp(x), logp(taught), layout, beta=0.4).per_token.sum(),
        lambda x: forward_kl_topk(
            logp(x), ids, logp(taught).gather(1, ids), layout, chunk_tokens=2
        ).per_token.sum(),
    ]
    for loss in losses:
        assert torch.autograd.gradcheck(loss, (logits,))
        assert torch.autograd.grad(loss(logits), taught, allow_unused=True) == (None,)


def test_ids_that_nobody_can_draw_do_not_spoil_a_gradient():
    cut = torch.tensor([[0.0, 1.0, -math.inf]], dtype=torch.float64, requires_grad=True)
    other = torch.tensor([[1.0, 0.5, -math.inf]], dtype=torch.float64)
    layout = layout_of([True])
    for found in (
        reverse_kl(logp(cut), logp(other), layout),
        forward_kl(logp(cut), logp(other), layout),
        generalised_jsd(logp(cut), logp(other), layout),
    ):
        assert found.per_token.isfinite().all()
        (gradient,) = torch.autograd.grad(found.per_token.sum(), cut)
        assert gradient[:, :2].isfinite().all()
        assert gradient[:, :2].any()


def test_a_step_that_trains_on_nothing_has_no_divergence():
    found = reverse_kl(logp(rows(0, 2)), logp(rows(1, 2)), layout_of([False, False]))
    assert not found.per_token.any()


def test_the_sampled_gap_is_an_advantage_whose_policy_gradient_is_that_of_the_reverse_kl():
    logits, teacher = rows(5, 1).requires_grad_(), logp(rows(6, 1))
    student = logp(logits)
    layout = layout_of([True] * VOCAB)
    advantages = distillation_advantages(student[0], teacher[0], layout)
    assert not advantages.requires_grad
    surrogate = -(student[0].exp().detach() * advantages * student[0]).sum()
    expected = reverse_kl(logp(logits), teacher, layout_of([True])).per_token.sum()
    torch.testing.assert_close(
        torch.autograd.grad(surrogate, logits)[0], torch.autograd.grad(expected, logits)[0]
    )
    half = distillation_advantages(student[0], teacher[0], layout, distillation_loss_coef=0.5)
    torch.testing.assert_close(half, 0.5 * advantages)
