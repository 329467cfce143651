"""Weights of a step: what they sum to, and what cannot change them."""

import pytest
import torch
from hypothesis import given, settings

from luyen.algorithms.aggregation import AGGREGATIONS, aggregation_weights
from luyen.algorithms.layout import Layout
from tests.laws.steps import Sample, pack, steps

few = settings(max_examples=30, deadline=None, derandomize=True, database=None)


def layout_of(samples: list[Sample]) -> Layout:
    return pack(samples).layout


def weights_of(mode: str, layout: Layout) -> torch.Tensor:
    return aggregation_weights(mode, layout, loss_scale_factor=7.0, dtype=torch.float64)


@few
@given(samples=steps)
@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
def test_means_have_weights_that_sum_to_one(mode, samples):
    layout = layout_of(samples)
    expected = 1.0 if bool(layout.mask.any()) else 0.0
    assert float(weights_of(mode, layout).sum()) == pytest.approx(expected, abs=1e-12)


@few
@given(samples=steps)
@pytest.mark.parametrize("mode", sorted(AGGREGATIONS))
def test_masked_tokens_weigh_nothing_and_trainable_ones_something(mode, samples):
    layout = layout_of(samples)
    weights = weights_of(mode, layout)
    assert not weights[~layout.mask].any()
    assert bool((weights[layout.mask] > 0).all())


@few
@given(samples=steps)
@pytest.mark.parametrize("mode", sorted(AGGREGATIONS))
def test_masked_tokens_and_sequences_do_not_move_the_weights_of_others(mode, samples):
    bare = [{"mask": s["mask"][s["mask"]], **only(s)} for s in samples if bool(s["mask"].any())]
    kept = weights_of(mode, layout_of(samples))[layout_of(samples).mask]
    torch.testing.assert_close(kept, weights_of(mode, layout_of(bare)), rtol=1e-12, atol=0.0)


def only(sample: Sample) -> Sample:
    return {k: v[sample["mask"]] for k, v in sample.items() if k != "mask"}
