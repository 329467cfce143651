"""The critic's loss, by hand and against finite differences."""

import math

import pytest
import torch

from luyen.algorithms.value import explained_variance, value_loss
from luyen.base.errors import UserError
from tests.unit.algorithms.batches import f64, layout_of, metrics_of

VALUES, OLD, RETURNS = f64(1.0, 2.0, 0.0), f64(0.8, 1.0, 0.0), f64(0.0, 0.0, 3.0)


def test_values_and_metrics_by_hand():
    loss = value_loss(VALUES, OLD, RETURNS, layout_of(3), cliprange_value=0.5)
    # the second: (2 - 0)² beats (1.5 - 0)²; the third is inside
    assert loss.per_token.tolist() == pytest.approx([0.5, 2.0, 4.5])
    assert metrics_of(loss) == {
        "critic/vf_clipfrac": 0.0,
        "critic/vpred_mean": pytest.approx(1.0),
    }


def test_the_clipped_error_wins_when_the_value_ran_to_its_target():
    loss = value_loss(f64(2.0), f64(0.0), f64(2.0), layout_of(1), cliprange_value=0.5)
    assert loss.per_token.item() == pytest.approx(0.5 * 1.5**2)
    assert metrics_of(loss)["critic/vf_clipfrac"] == 1.0


def test_without_a_clip_range_it_is_half_the_squared_error():
    loss = value_loss(f64(2.0), f64(0.0), f64(2.5), layout_of(1), cliprange_value=None)
    assert loss.per_token.item() == pytest.approx(0.125)
    assert metrics_of(loss)["critic/vf_clipfrac"] == 0.0


def test_gradient_is_the_central_difference():
    h = 1e-6
    for clip in (None, 0.5):
        values = f64(1.0, 2.0, 0.3, 2.0).requires_grad_()
        old, returns = f64(0.8, 1.0, 0.0, 0.0), f64(0.0, 0.0, 3.0, 2.0)

        def total(
            x: torch.Tensor, old: torch.Tensor = old, returns: torch.Tensor = returns, c=clip
        ):
            return value_loss(x, old, returns, layout_of(4), cliprange_value=c).per_token.sum()

        (grad,) = torch.autograd.grad(total(values), [values])
        eye = h * torch.eye(4, dtype=torch.float64)
        base = values.detach()
        numeric = [((total(base + e) - total(base - e)) / (2 * h)).item() for e in eye]
        assert grad.tolist() == pytest.approx(numeric, abs=1e-8)


def test_nan_on_masked_tokens_changes_nothing():
    layout = layout_of(2, mask=[True, False])
    values = f64(1.0, math.nan).requires_grad_()
    loss = value_loss(values, f64(1.0, math.nan), f64(0.5, math.nan), layout)
    assert loss.per_token.tolist() == [0.125, 0.0]
    (grad,) = torch.autograd.grad(loss.per_token.sum(), [values])
    assert grad.tolist() == [0.5, 0.0]
    assert metrics_of(loss)["critic/vpred_mean"] == 1.0


@pytest.mark.parametrize("clip", [0.0, -0.5])
def test_a_clip_range_that_is_not_positive_is_refused(clip: float):
    with pytest.raises(UserError, match=r"cliprange_value = .*: it must be greater than 0"):
        value_loss(VALUES, OLD, RETURNS, layout_of(3), cliprange_value=clip)


def test_explained_variance_is_1_for_the_returns_0_for_a_constant_and_less_for_nonsense():
    returns = f64(0.0, 1.0, 2.0, 3.0)
    assert explained_variance(returns, returns, layout_of(4)) == 1.0
    assert explained_variance(f64(7.0, 7.0, 7.0, 7.0), returns, layout_of(4)) == 0.0
    # residuals -3, -1, 1, 3 vary by 5, the returns by 1.25
    backwards = explained_variance(f64(3.0, 2.0, 1.0, 0.0), returns, layout_of(4))
    assert backwards == pytest.approx(-3.0)


def test_nothing_is_explained_where_returns_are_equal_and_masked_tokens_do_not_count():
    assert explained_variance(f64(0.0, 1.0), f64(2.0, 2.0), layout_of(2)) is None
    masked = layout_of(3, mask=[True, True, False])
    assert explained_variance(f64(0.0, 1.0, math.nan), f64(0.0, 1.0, 9.0), masked) == 1.0
