"""Ratios, by hand."""

import math

import pytest
import torch

from luyen.algorithms.policy_losses.inputs import (
    geometric_mean,
    sequence_log_weight,
    sequence_ratio,
    token_ratio,
)
from tests.unit.algorithms.batches import f64, layout_of

MASKED = layout_of(3, 1, mask=[True, True, False, True])


def test_token_ratio_is_clamped_and_stops_the_gradient_beyond():
    logp = f64(-1.0, 0.0, -60.0).requires_grad_()
    ratio = token_ratio(logp, f64(-2.0, -50.0, 0.0))
    assert ratio.tolist() == pytest.approx([math.e, math.exp(20), math.exp(-20)])
    (grad,) = torch.autograd.grad(ratio.sum(), [logp])
    assert grad.tolist() == pytest.approx([math.e, 0.0, 0.0])


def test_sequence_ratio_is_the_geometric_mean_in_value_and_the_token_in_gradient():
    logp = f64(0.3, 0.1, 9.0, 0.5).requires_grad_()
    ratio = sequence_ratio(logp, torch.zeros(4, dtype=torch.float64), MASKED)
    assert ratio[[0, 1, 3]].tolist() == pytest.approx([math.exp(0.2)] * 2 + [math.exp(0.5)])
    (grad,) = torch.autograd.grad(ratio[0], [logp])
    assert grad.tolist() == pytest.approx([math.exp(0.2), 0.0, 0.0, 0.0])


def test_sequence_log_weight_sums_and_clamps():
    logp, old = f64(0.3, 0.1, 9.0, -40.0), torch.zeros(4, dtype=torch.float64)
    floor = math.log(1e-8)
    got = sequence_log_weight(logp, old, MASKED)
    assert got.tolist() == pytest.approx([0.4, 0.4, 0.0, floor])
    weights = f64(2.0, 1.0, 0.0, 1.0)
    joined = sequence_log_weight(logp, old, MASKED, weights)
    assert joined[0].item() == pytest.approx(0.4 + math.log(2.0))
    up = sequence_log_weight(f64(15.0, 15.0, 0.0, 0.0), old, MASKED)
    assert up.tolist() == [20.0, 20.0, 0.0, 0.0]


def test_geometric_mean_ignores_masked_tokens_and_is_one_without_any():
    layout = layout_of(3, 1, mask=[True, True, False, False])
    got = geometric_mean(f64(2.0, 8.0, math.nan, 5.0), layout)
    assert got.tolist() == pytest.approx([4.0, 1.0])
