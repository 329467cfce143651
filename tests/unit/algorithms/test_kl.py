"""KL penalties, by hand."""

import math

import pytest
import torch

from luyen.algorithms.kl import full_kl, kl_penalty
from luyen.base.errors import UserError
from tests.unit.algorithms.batches import f64


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("k1", [0.5, -0.5]),
        ("kl", [0.5, -0.5]),
        ("abs", [0.5, 0.5]),
        ("k2", [0.125, 0.125]),
        ("mse", [0.125, 0.125]),
        ("k3", [math.exp(-0.5) - 0.5, math.exp(0.5) - 1.5]),
        ("low_var_kl", [math.exp(-0.5) - 0.5, math.exp(0.5) - 1.5]),
    ],
)
@pytest.mark.parametrize("suffix", ["", "+"])
def test_values_by_hand(kind: str, suffix: str, expected: list[float]):
    got = kl_penalty(kind + suffix, f64(-1.0, -1.0), f64(-1.5, -0.5))
    assert got.tolist() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("kind", "slope"),
    [("k1", 1.0), ("abs", 1.0), ("k2", 0.5), ("k3", 1.0 - math.exp(-0.5)), ("k3+", 0.5)],
)
def test_gradients_by_hand(kind: str, slope: float):
    logp = f64(-1.0).requires_grad_()
    (grad,) = torch.autograd.grad(kl_penalty(kind, logp, f64(-1.5)).sum(), [logp])
    assert grad.item() == pytest.approx(slope, rel=1e-12)


def test_k3_is_clamped_at_10_and_only_its_plus_form_still_pulls_back_there():
    logp = f64(-30.0).requires_grad_()
    for kind, slope in (("k3", 0.0), ("k3+", -30.0)):
        value = kl_penalty(kind, logp, f64(0.0))
        assert value.item() == 10.0
        (grad,) = torch.autograd.grad(value.sum(), [logp])
        assert grad.item() == slope


def test_full_kl_by_hand_and_as_a_penalty():
    p, q = f64(0.5, 0.25, 0.25).log(), f64(0.25, 0.25, 0.5).log()
    expected = 0.5 * math.log(2.0) - 0.25 * math.log(2.0)
    assert full_kl(p, q).item() == pytest.approx(expected)
    table = torch.stack([p, q])
    for kind in ("full", "full+"):
        got = kl_penalty(kind, table, torch.stack([q, q]))
        assert got.tolist() == pytest.approx([expected, 0.0])


def test_full_kl_does_not_depend_on_a_shift_of_the_logits():
    p, q = f64(0.3, -1.0, 2.0), f64(0.1, 0.2, 0.3)
    assert full_kl(p + 5.0, q - 3.0).item() == pytest.approx(full_kl(p, q).item(), rel=1e-12)


def test_forbidden_tokens_add_nothing_to_the_full_kl_nor_to_its_gradient():
    p = f64(0.0, 1.0, -math.inf).requires_grad_()
    value = full_kl(p, f64(1.0, 0.0, -math.inf))
    two = full_kl(f64(0.0, 1.0), f64(1.0, 0.0))
    assert value.item() == pytest.approx(two.item(), rel=1e-12)
    (grad,) = torch.autograd.grad(value, [p])
    assert bool(grad.isfinite().all())


def test_an_unknown_kind_is_refused_with_near_names():
    with pytest.raises(UserError, match="did you mean `low_var_kl`"):
        kl_penalty("low_var_k", f64(0.0), f64(0.0))
