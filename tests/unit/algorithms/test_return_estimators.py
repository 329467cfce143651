"""Estimators that follow rewards through time, against numbers worked out by hand."""

import math
from dataclasses import replace

import pytest
import torch

from luyen.algorithms.advantages import Credit, CreditInputs, adv_estimators
from luyen.algorithms.advantages.inputs import token_stream
from luyen.algorithms.advantages.returns import (
    credited_rewards,
    discounted_to_go,
    next_value,
    ranks,
    response_positions,
    running_total,
)
from luyen.base.errors import UserError
from tests.unit.algorithms.credit_batches import (
    NAN,
    Row,
    advantages,
    inputs_of,
    layout_of,
    per_row,
    row,
)
from tests.unit.algorithms.plain_estimators import raw_gae


def run(name: str, rows: list[Row], **hparams: object) -> Credit:
    return adv_estimators.get(name)(inputs_of(rows), **hparams)


TOOL_CALL = row(0, "x..x", [0.0, 0.0, 0.0, 1.0], values=(0.5, NAN, 9.0, 0.25))


def test_gae_skips_masked_tokens():
    # δ_last = 1 - 0.25 = 0.75; δ_first = 0 + 0.9·0.25 - 0.5 = -0.275; A_first = δ + 0.9·0.8·0.75
    credit = run("gae", [TOOL_CALL], gamma=0.9, lam=0.8, whiten_advantages=False)
    assert advantages(credit, [TOOL_CALL])[0] == pytest.approx([0.265, 0.0, 0.0, 0.75], rel=1e-12)
    returns = per_row(credit.returns, [TOOL_CALL])[0]
    assert returns == pytest.approx([0.765, 0.0, 0.0, 1.0], rel=1e-12)


def test_gae_with_gamma_and_lambda_one_is_the_return_minus_the_value():
    credit = run("gae", [TOOL_CALL], whiten_advantages=False)
    assert advantages(credit, [TOOL_CALL])[0] == pytest.approx([0.5, 0.0, 0.0, 0.75])
    assert per_row(credit.returns, [TOOL_CALL])[0] == pytest.approx([1.0, 0.0, 0.0, 1.0])


def test_gae_whitens_advantages_and_leaves_returns():
    plain = run("gae", [TOOL_CALL], gamma=0.9, lam=0.8, whiten_advantages=False)
    white = run("gae", [TOOL_CALL], gamma=0.9, lam=0.8)
    assert torch.equal(plain.returns, white.returns)
    half = 1.0 / math.sqrt(2.0)
    assert advantages(white, [TOOL_CALL])[0] == pytest.approx([-half, 0, 0, half], rel=1e-6)


def test_gae_over_a_thousand_tokens_equals_the_recursion():
    mask = "".join("." if t % 7 == 3 else "x" for t in range(1000))
    values = tuple(math.sin(t) for t in range(1000))
    rewards = [math.cos(3 * t) for t in range(1000)]
    rows = [row(0, mask, rewards, values=values), replace(TOOL_CALL, group=1)]
    credit = run("gae", rows, gamma=0.99, lam=0.95, whiten_advantages=False)
    expected = raw_gae(rows, 0.99, 0.95)
    for got, want in zip(advantages(credit, rows), expected, strict=True):
        assert got == pytest.approx(want, rel=1e-10, abs=1e-10)


def test_reinforce_is_the_discounted_return_to_go():
    rows = [row(0, "x.xx", [1.0, 0.0, 2.0, 4.0])]
    credit = run("reinforce", rows, gamma=0.5)
    assert advantages(credit, rows)[0] == [3.0, 0.0, 4.0, 4.0]
    assert torch.equal(credit.advantages, credit.returns)


def test_reinforce_without_discount_sums_what_is_left():
    rows = [row(0, "xxx", [1.0, 2.0, 4.0]), row(1, "xx", [8.0, 16.0])]
    assert advantages(run("reinforce", rows), rows) == [[7.0, 6.0, 4.0], [24.0, 16.0]]


def test_reinforce_with_gamma_zero_credits_only_the_reward_at_hand():
    rows = [row(0, "xxx", [1.0, 2.0, 4.0])]
    assert advantages(run("reinforce", rows, gamma=0.0), rows) == [[1.0, 2.0, 4.0]]


def test_reinforce_plus_plus_whitens_returns_over_the_batch():
    rows = [row(0, "x.x", [0.0, 0.0, 1.0]), row(1, "x", [4.0])]
    credit = run("reinforce_plus_plus", rows)
    # returns 1, 1, 4: mean 2, sample variance 3
    scale = 1.0 / math.sqrt(3.0 + 1e-8)
    expected = [[-scale, 0.0, -scale], [2 * scale]]
    for got, want in zip(advantages(credit, rows), expected, strict=True):
        assert got == pytest.approx(want, rel=1e-12)
    assert per_row(credit.returns, rows) == [[1.0, 0.0, 1.0], [4.0]]


def test_remax_subtracts_the_greedy_reward_on_trainable_tokens_only():
    rows = [row(0, "x.x", [1.0, 0.0, 2.0], baseline=0.5), row(0, ".x", [0.0, 1.0], baseline=4.0)]
    credit = run("remax", rows)
    assert advantages(credit, rows) == [[2.5, 0.0, 1.5], [0.0, -3.0]]
    assert per_row(credit.returns, rows) == [[3.0, 0.0, 2.0], [0.0, 1.0]]


def test_a_reward_on_a_masked_token_moves_to_the_nearest_earlier_trainable_one():
    rows = [row(0, ".x..x.", [1.0, 2.0, 4.0, 8.0, 16.0, 32.0])]
    moved = per_row(credited_rewards(inputs_of(rows)), rows)
    assert moved == [[0.0, 15.0, 0.0, 0.0, 48.0, 0.0]]


def test_moved_rewards_stay_in_their_sequence():
    rows = [row(0, "x.", [1.0, 2.0]), row(0, "..", [4.0, 8.0]), row(0, ".x", [16.0, 32.0])]
    moved = per_row(credited_rewards(inputs_of(rows)), rows)
    assert moved == [[3.0, 0.0], [0.0, 0.0], [0.0, 48.0]]


def test_to_go_and_running_totals_stop_at_the_ends_of_sequences():
    rows = [row(0, "xx.x", [1.0, 2.0, 99.0, 4.0]), row(0, "x", [8.0]), row(0, "xx", [16.0, 32.0])]
    layout, x = layout_of(rows), inputs_of(rows).rewards
    assert per_row(discounted_to_go(x, layout, discount=1.0), rows) == [
        [7.0, 6.0, 0.0, 4.0],
        [8.0],
        [48.0, 32.0],
    ]
    assert per_row(running_total(x, layout), rows) == [[1.0, 3.0, 0.0, 7.0], [8.0], [16.0, 48.0]]
    assert per_row(next_value(x, layout), rows) == [[2.0, 4.0, 0.0, 0.0], [0.0], [32.0, 0.0]]


def test_ranks_count_trainable_tokens_and_positions_count_all():
    rows = [row(0, ".x.xx", [0.0] * 5), row(0, "..", [0.0] * 2), row(0, "x.x", [0.0] * 3)]
    layout = layout_of(rows)
    shown = layout.mask.tolist()
    assert [r for r, m in zip(ranks(layout).tolist(), shown, strict=True) if m] == [0, 1, 2, 0, 1]
    places = response_positions(layout).tolist()
    assert [p for p, m in zip(places, shown, strict=True) if m] == [0, 2, 3, 0, 2]


@pytest.mark.parametrize("name", ["gae", "reinforce", "reinforce_plus_plus", "remax"])
def test_a_batch_with_nothing_trainable_is_zero(name: str):
    rows = [row(0, "..", [1.0, 2.0], values=(0.0, 0.0))]
    credit = run(name, rows)
    assert credit.advantages.tolist() == credit.returns.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("name", ["gae", "reinforce", "reinforce_plus_plus"])
@pytest.mark.parametrize("gamma", [-0.1, 1.5, NAN])
def test_a_gamma_that_is_no_discount_is_refused(name: str, gamma: float):
    with pytest.raises(UserError, match=r"gamma = .*between 0 and 1"):
        run(name, [TOOL_CALL], gamma=gamma)


def test_a_lambda_that_is_no_discount_is_refused():
    with pytest.raises(UserError, match=r"lam = 2\.0"):
        run("gae", [TOOL_CALL], lam=2.0)


def test_gae_without_values_is_refused_with_the_way_to_get_them():
    with pytest.raises(UserError, match=r"values = None.*critic\.enable"):
        run("gae", [row(0, "x", [1.0])])


def test_remax_without_baselines_is_refused_with_the_way_to_get_them():
    inputs = replace(inputs_of([TOOL_CALL]), baselines=None)
    with pytest.raises(UserError, match=r"baselines = None.*greedy rollout"):
        adv_estimators.get("remax")(inputs)


def test_a_value_that_is_not_finite_on_a_trainable_token_is_refused():
    with pytest.raises(UserError, match=r"values = nan.*position \[0\]"):
        run("gae", [replace(TOOL_CALL, values=(NAN, 0.0, 0.0, 0.0))])


def test_a_baseline_that_is_not_finite_is_refused_unless_the_sequence_is_masked():
    dead = row(0, "..", [0.0, 0.0], baseline=NAN)
    assert run("remax", [replace(TOOL_CALL, baseline=1.0), dead]).advantages[4:].tolist() == [0, 0]
    with pytest.raises(UserError, match=r"baselines = inf"):
        run("remax", [replace(TOOL_CALL, baseline=math.inf)])


@pytest.mark.parametrize("name", ["gae", "reinforce", "reinforce_plus_plus", "remax"])
@pytest.mark.parametrize(("place", "bad"), [(0, NAN), (1, math.inf)])
def test_a_reward_that_is_not_finite_is_refused(name: str, place: int, bad: float):
    rewards = tuple(bad if t == place else 0.0 for t in range(4))
    with pytest.raises(UserError, match=r"^rewards = "):
        run(name, [replace(TOOL_CALL, rewards=rewards)])


def test_a_stream_of_another_shape_is_refused_with_both_shapes():
    inputs = inputs_of([TOOL_CALL])
    with pytest.raises(UserError, match=r"values = \(3,\).*mask \(4,\)"):
        token_stream(inputs, "values", torch.zeros(3))


def test_baselines_of_another_shape_are_refused_with_both_shapes():
    inputs = replace(inputs_of([TOOL_CALL]), baselines=torch.zeros(3))
    with pytest.raises(UserError, match=r"baselines = \(3,\).*groups \(1,\)"):
        adv_estimators.get("remax")(inputs)


def test_values_carry_no_gradient_into_the_credit():
    values = torch.tensor([0.5, 0.25], requires_grad=True)
    layout = layout_of([row(0, "xx", [0.0, 1.0])])
    inputs = CreditInputs(rewards=torch.tensor([0.0, 1.0]), layout=layout, values=values)
    credit = adv_estimators.get("gae")(inputs)
    assert not credit.advantages.requires_grad
    assert not credit.returns.requires_grad
