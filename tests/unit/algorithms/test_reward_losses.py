"""Losses of reward models by hand and against plain floats, and calibration that merges."""

import math
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from luyen.algorithms.aggregation import BINS, Calibration
from luyen.algorithms.preference.step import step_mean
from luyen.algorithms.reward_losses import bradley_terry, process_reward, regression
from luyen.base.errors import UserError

LOG2 = math.log(2.0)


def t(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=True)


def test_bradley_terry_by_hand():
    found = bradley_terry(t(LOG2, 0.0), t(0.0, LOG2))
    assert found.loss.tolist() == pytest.approx([math.log(3 / 2), math.log(3)])
    centred = bradley_terry(t(1.0), t(2.0), center_rewards_coefficient=0.1)
    assert centred.loss.item() == pytest.approx(math.log1p(math.e) + 0.9)
    offset = bradley_terry(t(2.0), t(0.0), margins=t(2.0))
    assert offset.loss.item() == pytest.approx(LOG2)
    values = {
        name: a.value()
        for name, a in bradley_terry(t(3.0, 1.0, 1.0), t(1.0, 1.0, 2.0)).metrics.items()
    }
    assert values["reward_model/accuracy"] == pytest.approx(0.5)
    assert values["reward_model/margin"] == pytest.approx(1 / 3)


def test_bradley_terry_pulls_scores_apart_and_centring_pulls_them_to_zero():
    chosen, rejected = t(0.5), t(0.5)
    bradley_terry(chosen, rejected).loss.sum().backward()
    assert (chosen.grad.item(), rejected.grad.item()) == pytest.approx((-0.5, 0.5))
    far = t(1e4)
    loss = bradley_terry(far, t(-1e4), margins=t(0.0), center_rewards_coefficient=0.01).loss
    swapped = bradley_terry(t(-1e4), far).loss
    assert loss.isfinite()
    assert swapped.item() == pytest.approx(2e4)
    with pytest.raises(UserError):
        bradley_terry(far, far, center_rewards_coefficient=-1.0)


def test_regression_by_hand():
    found = regression(t(1.0, -2.0), t(3.0, -1.0))
    assert found.loss.tolist() == [4.0, 1.0]
    assert found.metrics["reward_model/bias"].value() == pytest.approx(-1.5)
    assert found.metrics["reward_model/absolute_error"].value() == pytest.approx(1.5)


def test_process_reward_by_hand_and_nothing_leaks_from_unlabelled_steps():
    logits = t(LOG2, math.nan, -LOG2, 0.0)
    labels = torch.tensor([1.0, math.nan, 0.25, 0.5], dtype=torch.float64)
    mask = torch.tensor([True, False, True, True])
    found = process_reward(logits, labels, mask)
    expected = [math.log(3 / 2), 0.0, 0.25 * math.log(3) + 0.75 * math.log(3 / 2), LOG2]
    assert found.loss.tolist() == pytest.approx(expected)
    step_mean(found.loss, of=3).backward()
    assert logits.grad.tolist() == pytest.approx([-1 / 9, 0.0, (1 / 3 - 0.25) / 3, 0.0])
    assert found.metrics["reward_model/accuracy"].value() == pytest.approx(2.5 / 3)


def test_process_reward_is_the_cross_entropy_of_two_classes():
    draw = torch.Generator().manual_seed(0)
    two = torch.randn(6, 2, generator=draw, dtype=torch.float64)
    labels = torch.tensor([0, 1, 1, 0, 1, 0])
    expected = torch.nn.functional.cross_entropy(two, labels, reduction="none")
    mask = torch.ones(6, dtype=torch.bool)
    found = process_reward(two[:, 1] - two[:, 0], labels.double(), mask).loss
    torch.testing.assert_close(found, expected)


def plain_error(said: list[float], held: list[float]) -> float:
    """ECE from its definition, bin by bin."""
    total = 0.0
    for i in range(BINS):
        low, high = i / BINS, (i + 1) / BINS
        inside = [
            (s, h)
            for s, h in zip(said, held, strict=True)
            if low <= s < high or (i == BINS - 1 and s == 1.0)
        ]
        if inside:
            mean_said = sum(s for s, _ in inside) / len(inside)
            mean_held = sum(h for _, h in inside) / len(inside)
            total += len(inside) / len(said) * abs(mean_said - mean_held)
    return total


@given(seed=st.integers(0, 1000), cut=st.integers(0, 20))
def test_calibration_is_the_expected_error_and_merges(seed: int, cut: int):
    draw = random.Random(seed)
    said = [draw.random() for _ in range(20)]
    held = [float(draw.random() < s) for s in said]

    def of(first: int, last: int) -> Calibration:
        part = slice(first, last)
        mask = torch.ones(len(said[part]), dtype=torch.bool)
        return Calibration.of_probabilities(
            torch.tensor(said[part], dtype=torch.float64),
            torch.tensor(held[part], dtype=torch.float64),
            mask,
        )

    whole = of(0, 20).error()
    assert whole == pytest.approx(plain_error(said, held))
    assert of(0, cut).merge(of(cut, 20)).error() == pytest.approx(whole)


def test_a_sure_and_right_model_is_calibrated_and_a_sure_and_wrong_one_is_not():
    right = bradley_terry(t(50.0, 50.0), t(0.0, 0.0)).calibration
    wrong = bradley_terry(t(0.0, 0.0), t(50.0, 50.0)).calibration
    assert right is not None
    assert wrong is not None
    assert right.error() == pytest.approx(0.0)
    assert wrong.error() == pytest.approx(1.0)
    assert math.isnan(bradley_terry(t(), t()).calibration.error())
