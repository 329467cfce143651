"""Whitening against numbers worked out by hand."""

import math
import statistics

import pytest
import torch

from luyen.algorithms.advantages.grouping import whiten

NAN = float("nan")


def test_two_values_whiten_to_plus_and_minus_one_over_root_two():
    x = torch.tensor([1.0, 3.0], dtype=torch.float64)
    result = whiten(x, torch.tensor([True, True])).tolist()
    expected = 1.0 / math.sqrt(2.0 + 1e-8)
    assert result == pytest.approx([-expected, expected], rel=1e-12)


def test_only_tokens_that_take_part_count_and_the_others_are_exactly_zero():
    x = torch.tensor([NAN, 2.0, 7.0, 3.0, float("inf"), -1.0], dtype=torch.float64)
    part = torch.tensor([False, True, True, False, False, True])
    mean, variance = 8.0 / 3.0, statistics.variance([2.0, 7.0, -1.0])
    scale = 1.0 / math.sqrt(variance + 1e-8)
    expected = [0.0, (2 - mean) * scale, (7 - mean) * scale, 0.0, 0.0, (-1 - mean) * scale]
    assert whiten(x, part).tolist() == pytest.approx(expected, rel=1e-12)


def test_the_result_has_mean_zero_and_sample_variance_one():
    x = torch.linspace(-3.0, 11.0, 57, dtype=torch.float64)
    result = whiten(x, torch.ones(57, dtype=torch.bool)).tolist()
    assert statistics.fmean(result) == pytest.approx(0.0, abs=1e-12)
    assert statistics.variance(result) == pytest.approx(1.0, rel=1e-8)


def test_a_single_token_whitens_to_zero():
    assert whiten(torch.tensor([5.0, 2.0]), torch.tensor([True, False])).tolist() == [0.0, 0.0]


def test_nothing_taking_part_gives_zeros():
    assert whiten(torch.tensor([5.0, NAN]), torch.tensor([False, False])).tolist() == [0.0, 0.0]
    assert whiten(torch.zeros(0), torch.zeros(0, dtype=torch.bool)).tolist() == []


def test_equal_values_stay_at_zero_in_float32():
    result = whiten(torch.full((999,), 0.7), torch.ones(999, dtype=torch.bool))
    assert float(result.abs().max()) < 1e-9


def test_the_argument_is_left_as_it_was():
    x = torch.tensor([1.0, 2.0])
    whiten(x, torch.tensor([True, True]))
    assert x.tolist() == [1.0, 2.0]
