"""Weights of each aggregation, by hand."""

import pytest
import torch

from luyen.algorithms.aggregation import AGGREGATIONS, aggregation_weights
from luyen.base.errors import UserError
from luyen.config import catalog
from tests.unit.algorithms.batches import layout_of

# 2 trainable tokens of 3, none of 2, 1 of 1, none of 0
LAYOUT = layout_of(3, 2, 1, 0, mask=[True, False, True, False, False, True])


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", [1 / 3, 0, 1 / 3, 0, 0, 1 / 3]),
        ("token-sum", [1, 0, 1, 0, 0, 1]),
        ("seq-mean-token-sum", [1 / 2, 0, 1 / 2, 0, 0, 1 / 2]),
        ("seq-mean-token-mean", [1 / 4, 0, 1 / 4, 0, 0, 1 / 2]),
        ("seq-mean-token-sum-norm", [1 / 8, 0, 1 / 8, 0, 0, 1 / 8]),
    ],
)
def test_weights_by_hand(mode: str, expected: list[float]):
    weights = aggregation_weights(mode, LAYOUT, loss_scale_factor=4.0, dtype=torch.float64)
    assert weights.tolist() == pytest.approx(expected, rel=1e-15)


@pytest.mark.parametrize("mode", sorted(AGGREGATIONS))
def test_a_step_without_trainable_tokens_has_zero_weights(mode: str):
    nothing = layout_of(2, mask=[False, False])
    assert aggregation_weights(mode, nothing, loss_scale_factor=4.0).tolist() == [0.0, 0.0]


def test_weights_are_float32_unless_asked_otherwise():
    assert aggregation_weights("token-mean", LAYOUT).dtype is torch.float32
    assert aggregation_weights("token-mean", LAYOUT, dtype=torch.float64).dtype is torch.float64


def test_the_catalogue_and_the_functions_name_the_same_aggregations():
    assert set(AGGREGATIONS) == set(catalog.AGGREGATIONS)


def test_an_unknown_aggregation_is_refused_with_near_names():
    with pytest.raises(UserError, match="did you mean `token-mean`"):
        aggregation_weights("token-meen", LAYOUT)


def test_the_fixed_length_form_needs_its_length():
    with pytest.raises(UserError, match="loss_scale_factor = None: seq-mean-token-sum-norm"):
        aggregation_weights("seq-mean-token-sum-norm", LAYOUT)


@pytest.mark.parametrize("factor", [0.0, -1.0, float("nan")])
def test_a_length_that_is_not_positive_is_refused(factor: float):
    with pytest.raises(UserError, match=r"loss_scale_factor = .*: it must be greater than 0"):
        aggregation_weights("seq-mean-token-sum-norm", LAYOUT, loss_scale_factor=factor)
