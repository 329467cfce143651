"""Group statistics, the bias of baselines and the drift of KL, worked out by hand."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from luyen.algorithms.advantages import adv_estimators
from luyen.algorithms.advantages.grouping import (
    BaselineBias,
    KlDrift,
    baseline_bias,
    estimator_baselines,
    group_statistics,
    kl_drift,
)
from luyen.base.errors import UserError
from tests.unit.algorithms.credit_batches import inputs_of, outcome_row

GROUPS = torch.tensor([7, 7, 7, 2, 2, 4, 9, 9])
REWARDS = torch.tensor([1.0, 0.0, 0.5, 1.0, 1.0, 0.0, 0.0, 0.0], dtype=torch.float64)


def double(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_statistics_of_a_batch_of_four_groups():
    found = group_statistics(REWARDS, GROUPS)
    assert found.within_group_variance == pytest.approx(0.25 / 3)
    assert found.zero_std_fraction == pytest.approx(2 / 3)
    assert found.mean_group_size == 2.0
    assert found.singleton_fraction == 0.25
    assert found.solve_all_fraction == 0.25
    assert found.solve_none_fraction == 0.5


def test_what_counts_as_solved_can_be_moved():
    found = group_statistics(REWARDS, GROUPS, solved_at=0.0)
    assert (found.solve_all_fraction, found.solve_none_fraction) == (1.0, 0.0)


def test_equal_rewards_count_as_zero_spread_in_float32():
    found = group_statistics(torch.full((7,), 0.7), torch.zeros(7, dtype=torch.int64))
    assert (found.zero_std_fraction, found.within_group_variance) == (1.0, 0.0)


def test_without_siblings_there_is_no_spread_to_report():
    found = group_statistics(double(1.0, 2.0), torch.tensor([0, 1]))
    assert found.within_group_variance is None
    assert found.zero_std_fraction is None
    assert found.singleton_fraction == 1.0


def test_rewards_that_are_not_finite_are_refused():
    with pytest.raises(UserError, match=r"rewards = nan"):
        group_statistics(double(1.0, math.nan), torch.tensor([0, 0]))


def test_an_empty_batch_is_refused():
    with pytest.raises(UserError, match="no sequence to measure"):
        group_statistics(double(), torch.zeros(0, dtype=torch.int64))


def test_the_group_mean_is_unbiased_in_sum_and_biased_in_size():
    # rewards 1, 0, 0.5: mean 0.5; siblings' means 0.25, 0.75, 0.5
    found = baseline_bias(double(0.5, 0.5, 0.5), double(1.0, 0.0, 0.5), torch.tensor([3, 3, 3]))
    assert found.signed == pytest.approx(0.0, abs=1e-15)
    assert found.absolute == pytest.approx((0.25 + 0.25 + 0.0) / 3)


def test_leave_one_out_has_no_bias():
    found = baseline_bias(double(0.25, 0.75, 0.5), double(1.0, 0.0, 0.5), torch.tensor([3, 3, 3]))
    assert found == BaselineBias(signed=0.0, absolute=0.0)


def test_bias_is_measured_on_samples_with_siblings_only():
    found = baseline_bias(double(2.0, 3.0, 99.0), double(1.0, 2.0, 0.0), torch.tensor([0, 0, 1]))
    assert found == BaselineBias(signed=1.0, absolute=1.0)
    alone = baseline_bias(double(2.0), double(1.0), torch.tensor([0]))
    assert alone == BaselineBias(signed=None, absolute=None)


def test_a_baseline_that_is_not_finite_is_refused():
    with pytest.raises(UserError, match=r"baselines = inf"):
        baseline_bias(double(math.inf, 0.0), double(1.0, 2.0), torch.tensor([0, 0]))


BATCH = [
    outcome_row(0, "x.xx", 1.0, baseline=0.5),
    outcome_row(0, "x", 0.0, baseline=0.25),
    outcome_row(0, "xx", 0.5, baseline=0.75),
    outcome_row(1, "x", 3.0, baseline=2.0),
]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("grpo", [0.5, 0.5, 0.5, 3.0]),
        ("gpg", [0.5, 0.5, 0.5, 3.0]),
        ("gdpo", [0.5, 0.5, 0.5, 3.0]),
        ("reinforce_plus_plus_baseline", [0.5, 0.5, 0.5, 3.0]),
        ("rloo", [0.25, 0.75, 0.5, 3.0]),
        ("opo", [4 / 6, 4 / 6, 4 / 6, 3.0]),
        ("remax", [0.5, 0.25, 0.75, 2.0]),
    ],
)
def test_the_baseline_each_estimator_subtracts(name: str, expected: list[float]):
    found = estimator_baselines(name, inputs_of(BATCH))
    assert found is not None
    assert found.tolist() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("name", ["rloo", "opo"])
def test_reward_minus_baseline_is_the_advantage(name: str):
    inputs = inputs_of(BATCH)
    baselines = estimator_baselines(name, inputs)
    assert baselines is not None
    expected = inputs.layout.spread(inputs.sequence_rewards() - baselines)
    torch.testing.assert_close(adv_estimators.get(name)(inputs).advantages, expected)


@pytest.mark.parametrize(
    "name",
    [
        *("gae", "grpo_passk", "reinforce", "reinforce_plus_plus"),
        *("optimal_token_baseline", "tir_optimal_token_baseline"),
        "turn_grpo",
    ],
)
def test_an_estimator_without_one_number_per_sequence_has_no_baseline(name: str):
    assert estimator_baselines(name, inputs_of(BATCH)) is None


def test_rloo_has_no_bias_and_grpo_has_some_on_the_same_batch():
    inputs = inputs_of(BATCH)
    rewards, groups = inputs.sequence_rewards(), inputs.layout.groups
    absolute: dict[str, float | None] = {}
    for name in ("rloo", "grpo"):
        baselines = estimator_baselines(name, inputs)
        assert baselines is not None
        absolute[name] = baseline_bias(baselines, rewards, groups).absolute
    assert absolute["rloo"] == pytest.approx(0.0, abs=1e-15)
    assert absolute["grpo"] == pytest.approx(0.5 / 3)


def test_an_unknown_estimator_is_refused_with_a_near_name():
    with pytest.raises(UserError, match=r"adv_estimator = 'grop'.*did you mean `grpo`"):
        estimator_baselines("grop", inputs_of(BATCH))


def test_remax_without_greedy_rewards_is_refused():
    with pytest.raises(UserError, match=r"baselines = None"):
        estimator_baselines("remax", replace(inputs_of(BATCH), baselines=None))


def test_drift_of_a_straight_line_is_its_slope():
    assert kl_drift([0.5, 1.0, 1.5, 2.0]) == KlDrift(last=2.0, slope=0.5)


def test_drift_is_a_least_squares_slope():
    # 0, 0, 3: deviations from the middle -1, 0, 1; slope = 3 / 2
    assert kl_drift([0.0, 0.0, 3.0]).slope == pytest.approx(1.5)


def test_drift_looks_at_the_window_only():
    assert kl_drift([100.0] * 30 + [1.0, 2.0, 3.0], window=3) == KlDrift(last=3.0, slope=1.0)
    assert kl_drift([50.0, *([1.0] * 20)]).slope == 0.0


def test_one_value_has_no_slope():
    assert kl_drift([0.25]) == KlDrift(last=0.25, slope=0.0)


@pytest.mark.parametrize("history", [[], [0.1, math.nan], [math.inf]])
def test_a_history_without_finite_values_is_refused(history: list[float]):
    with pytest.raises(UserError, match="history"):
        kl_drift(history)


def test_a_window_of_one_step_is_refused():
    with pytest.raises(UserError, match=r"window = 1"):
        kl_drift([0.1, 0.2], window=1)
