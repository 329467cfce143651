"""KL penalties: straight-through estimators, signs, and the exact gradient of the KL."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from luyen.algorithms.kl import PENALTIES, full_kl, kl_penalty
from luyen.config.catalog import KL_KINDS

few = settings(max_examples=25, deadline=None, derandomize=True, database=None)
finite = st.floats(-6.0, 0.0)
pairs = st.lists(st.tuples(finite, finite), min_size=1, max_size=6)
ESTIMATORS = ["k1", "kl", "abs", "k2", "mse", "k3", "low_var_kl"]


def leaves(values: list[tuple[float, float]]) -> tuple[Tensor, Tensor]:
    table = torch.tensor(values, dtype=torch.float64)
    return table[:, 0].clone().requires_grad_(), table[:, 1].clone()


def gradient(kind: str, logp: Tensor, ref: Tensor) -> Tensor:
    return torch.autograd.grad(kl_penalty(kind, logp, ref).sum(), [logp])[0]


def test_the_catalogue_and_the_penalties_name_the_same_kinds():
    assert set(PENALTIES) == set(KL_KINDS)


@few
@given(values=pairs)
@pytest.mark.parametrize("kind", ESTIMATORS)
def test_plus_has_the_value_of_the_base_and_the_gradient_of_k2(kind, values):
    logp, ref = leaves(values)
    assert torch.equal(kl_penalty(kind + "+", logp, ref), kl_penalty(kind, logp, ref))
    assert torch.equal(gradient(kind + "+", logp, ref), gradient("k2", logp, ref))
    torch.testing.assert_close(
        gradient(kind + "+", logp, ref), (logp - ref).detach(), rtol=1e-12, atol=1e-12
    )


@few
@given(values=pairs)
@pytest.mark.parametrize("kind", ["abs", "k2", "k3"])
def test_penalties_but_k1_are_never_negative_and_vanish_on_agreement(kind, values):
    logp, ref = leaves(values)
    assert bool((kl_penalty(kind, logp, ref) >= 0).all())
    assert not kl_penalty(kind, logp, logp).any()


def logit_pair(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    table = 2 * torch.randn(2, 7, generator=generator, dtype=torch.float64)
    return table[0].clone().requires_grad_(), table[1]


@few
@given(seed=st.integers(0, 2**32))
def test_the_expected_gradient_of_k2_under_the_policy_is_the_gradient_of_the_full_kl(seed):
    logits, ref_logits = logit_pair(seed)
    (exact,) = torch.autograd.grad(full_kl(logits, ref_logits), [logits])
    (plus,) = torch.autograd.grad(kl_penalty("full+", logits, ref_logits), [logits])
    logp, ref = logits.log_softmax(-1), ref_logits.log_softmax(-1)
    expected = (logp.exp().detach() * kl_penalty("k2", logp, ref)).sum()
    (of_k2,) = torch.autograd.grad(expected, [logits])
    torch.testing.assert_close(of_k2, exact, rtol=1e-12, atol=1e-12)
    assert torch.equal(plus, exact)


@few
@given(seed=st.integers(0, 2**32))
@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_the_expectation_of_k1_and_k3_is_the_full_kl_and_their_gradients_are_not(kind, seed):
    logits, ref_logits = logit_pair(seed)
    logp, ref = logits.log_softmax(-1), ref_logits.log_softmax(-1)
    exact = full_kl(logits, ref_logits)
    d = ref - logp
    unclamped = {"k1": -d, "k3": d.exp() - d - 1.0}[kind]
    expected = (logp.exp().detach() * unclamped).sum()
    torch.testing.assert_close(expected, exact, rtol=1e-12, atol=1e-12)
    (wrong,) = torch.autograd.grad(expected, [logits], retain_graph=True)
    (right,) = torch.autograd.grad(exact, [logits])
    assert not torch.allclose(wrong, right, rtol=1e-3, atol=1e-6)
