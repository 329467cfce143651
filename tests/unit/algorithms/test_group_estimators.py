"""Group-relative estimators against numbers worked out by hand."""

import math

import pytest
import torch

from luyen.algorithms.advantages import CreditInputs, adv_estimators
from luyen.algorithms.advantages.grouping import Grouping, runner_up
from luyen.base.errors import UserError
from tests.unit.algorithms.credit_batches import (
    NAN,
    Row,
    advantages,
    inputs_of,
    layout_of,
    outcome_row,
    row,
)

# Group 5: rewards 1, 0, 0.5 (mean 0.5, sample std 0.5); group 9: 2 and 4 (mean 3, std √2);
# group 1 has one sample. Trainable lengths 3, 1, 2, 1, 2, 2.
BATCH = [
    outcome_row(5, ".x.xx", 1.0),
    outcome_row(9, "x", 2.0),
    outcome_row(5, "x", 0.0),
    outcome_row(1, "xx", 3.0),
    outcome_row(5, "xx", 0.5),
    outcome_row(9, "x.x", 4.0),
]
GROUPED = ["grpo", "grpo_passk", "rloo", "opo", "gpg", "reinforce_plus_plus_baseline"]


def numbers(name: str, rows: list[Row], **hparams: object) -> list[float]:
    """The one number of each row, after checking that it stands on every trainable token."""
    result: list[float] = []
    for values, r in zip(
        advantages(adv_estimators.get(name)(inputs_of(rows), **hparams), rows), rows, strict=True
    ):
        seen = {v for v, m in zip(values, r.mask, strict=True) if m} or {0.0}
        assert len(seen) == 1
        assert all(v == 0.0 for v, m in zip(values, r.mask, strict=True) if not m)
        result.append(seen.pop())
    return result


def test_grpo_subtracts_the_group_mean_and_divides_by_the_sample_std():
    half, one = 0.5 / 0.500001, 1.0 / (math.sqrt(2.0) + 1e-6)
    assert numbers("grpo", BATCH) == pytest.approx([half, -one, -half, 0, 0, one], rel=1e-12)


def test_grpo_without_std_is_the_centred_reward():
    result = numbers("grpo", BATCH, norm_adv_by_std_in_grpo=False)
    assert result == pytest.approx([0.5, -1.0, -0.5, 0.0, 0.0, 1.0], rel=1e-12)


def test_std_epsilon_is_added_outside_the_root():
    assert numbers("grpo", BATCH, std_epsilon=1e-4)[0] == pytest.approx(0.5 / 0.5001, rel=1e-12)


def test_grpo_passk_credits_the_lead_of_the_best_only():
    result = numbers("grpo_passk", BATCH, norm_adv_by_std_in_grpo=False)
    assert result == [0.5, 0.0, 0.0, 0.0, 0.0, 2.0]
    scaled = numbers("grpo_passk", BATCH)
    assert scaled[0] == pytest.approx(0.5 / 0.500001, rel=1e-12)
    assert scaled[5] == pytest.approx(2.0 / (math.sqrt(2.0) + 1e-6), rel=1e-12)


def test_a_shared_best_leads_by_nothing():
    rows = [outcome_row(0, "x", r) for r in (1.0, 1.0, 0.0)]
    assert numbers("grpo_passk", rows) == [0.0, 0.0, 0.0]


def test_rloo_subtracts_the_mean_of_the_siblings():
    assert numbers("rloo", BATCH) == pytest.approx([0.75, -2.0, -0.75, 0.0, 0.0, 2.0], rel=1e-12)


def test_opo_weights_the_baseline_by_trainable_length():
    # group 5: (3·1 + 1·0 + 2·0.5) / 6 = 2/3; group 9: (1·2 + 2·4) / 3 = 10/3
    expected = [1 / 3, -4 / 3, -2 / 3, 0.0, -1 / 6, 2 / 3]
    assert numbers("opo", BATCH) == pytest.approx(expected, rel=1e-12)


def test_gpg_scales_by_sequences_over_nonzero_rewards():
    # six sequences, five of them with a reward that is not 0
    expected = [0.6, -1.2, -0.6, 0.0, 0.0, 1.2]
    assert numbers("gpg", BATCH) == pytest.approx(expected, rel=1e-12)


def test_gpg_counts_sequences_with_trainable_tokens_only():
    rows = [outcome_row(0, m, r) for m, r in (("x", 2.0), ("x", 0.0), (".", 1.0), (".", 0.0))]
    # two live sequences, one of them rewarded: α = 2; the mean 0.75 is over all four
    assert numbers("gpg", rows) == pytest.approx([2.5, -1.5, 0.0, 0.0], rel=1e-12)


def test_gpg_without_any_reward_is_zero_and_not_nan():
    assert numbers("gpg", [outcome_row(0, "x", 0.0)] * 3) == [0.0, 0.0, 0.0]


def test_reinforce_plus_plus_baseline_whitens_over_tokens_that_have_siblings():
    # centred: 0.5 on 3 tokens, -1 on 1, -0.5 on 1, 0 on 2, 1 on 2; the lone sample stays out
    pool = [0.5] * 3 + [-1.0] + [-0.5] + [0.0] * 2 + [1.0] * 2
    mean = sum(pool) / 9
    scale = 1.0 / math.sqrt(sum((x - mean) ** 2 for x in pool) / 8 + 1e-8)
    expected = [(x - mean) * scale for x in (0.5, -1.0, -0.5, 0.0, 0.0, 1.0)]
    expected[3] = 0.0
    result = numbers("reinforce_plus_plus_baseline", BATCH)
    assert result == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("name", GROUPED)
def test_equal_rewards_give_exactly_zero_even_in_float32(name: str):
    rows = [outcome_row(0, "xx", 0.7) for _ in range(7)]
    credit = adv_estimators.get(name)(inputs_of(rows, torch.float32))
    assert credit.advantages.tolist() == [0.0] * 14


@pytest.mark.parametrize("name", ["grpo", "rloo", "gpg"])
def test_a_fully_masked_sequence_still_counts_as_a_sibling(name: str):
    rows = [outcome_row(0, "xx", 1.0), outcome_row(0, "..", 0.0), outcome_row(0, "x", 0.0)]
    alone = [rows[0], rows[2]]
    with_dead, without = numbers(name, rows), numbers(name, alone)
    assert with_dead[1] == 0.0
    assert [with_dead[0], with_dead[2]] != pytest.approx(without)
    if name == "rloo":
        assert with_dead == [1.0, 0.0, -0.5]


def test_a_sample_whose_only_sibling_is_masked_is_still_compared():
    rows = [outcome_row(0, "x", 1.0), outcome_row(0, ".", 0.0), outcome_row(1, "x", 0.0)]
    rows.append(outcome_row(1, "x", 3.0))
    # centred 0.5, -1.5, 1.5 over three tokens: mean 1/6, sample variance 2.3333
    pool = [0.5, -1.5, 1.5]
    scale = 1.0 / math.sqrt(sum((x - 1 / 6) ** 2 for x in pool) / 2 + 1e-8)
    result = numbers("reinforce_plus_plus_baseline", rows)
    expected = [(0.5 - 1 / 6) * scale, 0.0, (-1.5 - 1 / 6) * scale, (1.5 - 1 / 6) * scale]
    assert result == pytest.approx(expected, rel=1e-12)


def test_opo_gives_no_say_to_a_sequence_without_trainable_tokens():
    rows = [outcome_row(0, "xx", 1.0), outcome_row(0, "..", 9.0), outcome_row(0, "x", 0.0)]
    assert numbers("opo", rows) == pytest.approx([1 / 3, 0.0, -2 / 3], rel=1e-12)


def test_a_group_without_any_trainable_token_is_zero_and_not_nan():
    rows = [outcome_row(0, "..", 1.0), outcome_row(0, ".", 0.0)]
    for name in GROUPED:
        assert numbers(name, rows) == [0.0, 0.0]


def test_a_reward_on_a_masked_token_counts_and_nan_there_counts_as_none():
    rows = [row(0, "x.", [0.0, 1.0]), row(0, ".x", [NAN, 0.0])]
    assert numbers("rloo", rows) == [1.0, -1.0]


def test_a_batch_of_no_sequences_is_empty():
    for name in GROUPED:
        assert adv_estimators.get(name)(inputs_of([])).advantages.tolist() == []


def test_rewards_carry_no_gradient_into_advantages():
    rewards = torch.tensor([1.0, 2.0], requires_grad=True)
    layout = layout_of([outcome_row(0, "x", 0.0), outcome_row(0, "x", 0.0)])
    credit = adv_estimators.get("grpo")(CreditInputs(rewards=rewards, layout=layout))
    assert not credit.advantages.requires_grad


@pytest.mark.parametrize(("bad", "mask"), [(NAN, "x"), (math.inf, "x"), (-math.inf, ".")])
@pytest.mark.parametrize("name", GROUPED)
def test_a_reward_that_is_not_finite_is_refused_by_name(name: str, bad: float, mask: str):
    with pytest.raises(UserError, match=r"^rewards = .*not finite at position \[1\]"):
        adv_estimators.get(name)(inputs_of([outcome_row(0, "x", 1.0), outcome_row(0, mask, bad)]))


def test_rewards_of_another_shape_are_refused_with_both_shapes():
    inputs = CreditInputs(rewards=torch.zeros(4), layout=layout_of(BATCH))
    with pytest.raises(UserError, match=r"rewards = \(4,\).*mask \(14,\)"):
        adv_estimators.get("grpo")(inputs)


@pytest.mark.parametrize("name", ["grpo", "grpo_passk", "gdpo"])
@pytest.mark.parametrize("value", [0.0, -1e-6, NAN])
def test_a_std_epsilon_that_is_not_positive_is_refused(name: str, value: float):
    with pytest.raises(UserError, match="std_epsilon"):
        adv_estimators.get(name)(inputs_of(BATCH), std_epsilon=value)


def test_the_runner_up_is_the_second_largest_value_of_the_group():
    grouping = Grouping.of(torch.tensor([3, 3, 3, 8, 8, 1]))
    x = torch.tensor([1.0, 5.0, 4.0, 2.0, 2.0, 7.0])
    assert runner_up(x, grouping).tolist() == [4.0, 4.0, 4.0, 2.0, 2.0, -math.inf]
