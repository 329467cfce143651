"""Importance weights against numbers worked out by hand."""

import math

import pytest
import torch
from torch import Tensor

from luyen.algorithms.correction.importance import batch_norm_factor, importance_weights
from luyen.base.errors import UserError
from tests.unit.algorithms.credit_batches import NAN, layout_of, row

ROWS = [row(0, "x.x", [0.0] * 3), row(1, "xx", [0.0] * 2), row(2, ".", [0.0])]
LAYOUT = layout_of(ROWS)
# log-ratios: ln 2 and ln 4 | ln 0.5 and ln 0.25 | masked
LOG = torch.tensor([2.0, NAN, 4.0, 0.5, 0.25, NAN], dtype=torch.float64).log()


def weights(log_ratio: Tensor = LOG, **hparams: object) -> list[float]:
    return importance_weights(log_ratio, LAYOUT, **hparams).tolist()


def test_a_token_weight_is_the_ratio_cut_at_the_threshold():
    result = weights(rollout_is="token", rollout_is_threshold=3.0)
    assert result == pytest.approx([2.0, 0.0, 3.0, 0.5, 0.25, 0.0], rel=1e-12)


def test_a_sequence_weight_is_the_product_of_its_ratios():
    result = weights(rollout_is="sequence", rollout_is_threshold=100.0)
    assert result == pytest.approx([8.0, 0.0, 8.0, 0.125, 0.125, 0.0], rel=1e-12)


def test_a_geometric_weight_is_the_geometric_mean_of_its_ratios():
    root = math.sqrt(8.0)
    result = weights(rollout_is="geometric", rollout_is_threshold=100.0)
    assert result == pytest.approx([root, 0.0, root, 1 / root, 1 / root, 0.0], rel=1e-12)


def test_the_threshold_is_two_unless_said():
    assert weights(rollout_is="sequence")[0] == 2.0


def test_a_threshold_may_be_the_text_of_a_number():
    assert weights(rollout_is="token", rollout_is_threshold="3.0")[2] == 3.0


def test_a_band_sets_weights_outside_it_to_zero_and_keeps_its_ends():
    exact = torch.tensor([0.0, NAN, 1.0, -1.0, 2.0, NAN])
    low, high = math.exp(-1.0), math.e
    result = weights(exact.double(), rollout_is="token", rollout_is_threshold=f"{low}_{high}")
    assert result == pytest.approx([1.0, 0.0, high, low, 0.0, 0.0], rel=1e-12)


def test_a_band_applies_to_whole_sequences_too():
    result = weights(rollout_is="sequence", rollout_is_threshold="0.1_2.0")
    assert result == pytest.approx([0.0, 0.0, 0.0, 0.125, 0.125, 0.0], rel=1e-12)


def test_a_floor_lifts_small_weights_on_trainable_tokens_only():
    result = weights(rollout_is="token", rollout_is_threshold=3.0, rollout_is_floor=0.4)
    assert result == pytest.approx([2.0, 0.0, 3.0, 0.5, 0.4, 0.0], rel=1e-12)


def test_log_ratios_are_cut_at_twenty():
    far = torch.tensor([500.0, NAN, -500.0, 15.0, 15.0, NAN], dtype=torch.float64)
    result = weights(far, rollout_is="token", rollout_is_threshold=1e300)
    assert result[0] == pytest.approx(math.exp(20.0))
    assert result[2] == pytest.approx(math.exp(-20.0))
    assert weights(far, rollout_is="sequence", rollout_is_threshold=1e300)[3] == pytest.approx(
        math.exp(20.0)
    )


def test_weights_carry_no_gradient():
    log_ratio = torch.zeros(6, requires_grad=True)
    assert not importance_weights(log_ratio, LAYOUT, rollout_is="token").requires_grad


def test_the_norm_factor_is_a_mean_over_tokens_or_over_live_sequences():
    w = torch.tensor([2.0, NAN, 2.0, 0.5, 0.5, NAN], dtype=torch.float64)
    assert float(batch_norm_factor(w, LAYOUT, rollout_is="token")) == pytest.approx(1.25)
    uneven = [row(0, "xxx", [0.0] * 3), row(1, "x", [0.0]), row(2, ".", [0.0])]
    w = torch.tensor([2.0, 2.0, 2.0, 0.5, 9.0], dtype=torch.float64)
    layout = layout_of(uneven)
    assert float(batch_norm_factor(w, layout, rollout_is="token")) == pytest.approx(6.5 / 4)
    assert float(batch_norm_factor(w, layout, rollout_is="sequence")) == pytest.approx(1.25)
    assert float(batch_norm_factor(w, layout, rollout_is="geometric")) == pytest.approx(1.25)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_the_norm_factor_of_nothing_is_one(level: str):
    layout = layout_of([row(0, "..", [0.0, 0.0])])
    assert float(batch_norm_factor(torch.zeros(2), layout, rollout_is=level)) == 1.0


def test_an_unknown_level_is_refused_with_a_near_name():
    with pytest.raises(UserError, match=r"rollout_is = 'sequnce'.*`sequence`"):
        weights(rollout_is="sequnce")


@pytest.mark.parametrize("value", [True, 0.0, -2.0, NAN, math.inf, "two", "", "1_2_3", "_2", "a_2"])
def test_a_threshold_that_is_no_threshold_is_refused(value: object):
    with pytest.raises(UserError, match="rollout_is_threshold"):
        weights(rollout_is="token", rollout_is_threshold=value)


def test_a_band_upside_down_is_refused():
    with pytest.raises(UserError, match=r"'5_2'.*lower bound 5.0 is above"):
        weights(rollout_is="token", rollout_is_threshold="5_2")


def test_a_floor_under_a_band_is_refused():
    with pytest.raises(UserError, match=r"rollout_is_floor = 0.1.*no floor can act"):
        weights(rollout_is="token", rollout_is_threshold="0.5_2.0", rollout_is_floor=0.1)


def test_a_floor_above_the_threshold_is_refused():
    with pytest.raises(UserError, match=r"rollout_is_floor = 3.0.*above rollout_is_threshold 2"):
        weights(rollout_is="token", rollout_is_floor=3.0)


def test_a_log_ratio_of_another_shape_is_refused_with_both_shapes():
    with pytest.raises(UserError, match=r"log_ratio = \(2,\).*mask \(6,\)"):
        weights(torch.zeros(2), rollout_is="token")
