"""Turn-aware group credit, worked out by hand, and what of it holds for any conversation."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from luyen.algorithms import padded
from luyen.algorithms.advantages import Credit, adv_estimators
from luyen.base.errors import UserError
from tests.unit.algorithms.credit_batches import Row, batches, inputs_of, per_row, row

some = settings(max_examples=60, deadline=None)


def run(name: str, rows: list[Row], **hparams: float | bool) -> Credit:
    return adv_estimators.get(name)(inputs_of(rows), **hparams)


def shown(rows: list[Row], **hparams: float | bool) -> list[list[float]]:
    return per_row(run("turn_grpo", rows, **hparams).advantages, rows)


TALKS = [
    # turn 0, a tool result, turn 1, an answer of the user, turn 2
    row(0, "x.x.x", [1.0, 0.0, 0.0, 0.0, 1.0], turns=(0, 0, 1, 1, 2)),
    row(0, "x.x", [0.0, 0.0, 0.0], turns=(0, 0, 1)),
    row(0, "x", [0.5], turns=(0,)),
]


def test_a_turn_is_compared_with_the_siblings_that_reached_it():
    # R_0 = 2, 0, 0.5; R_1 = 1, 0 (mean 0.5); R_2 = 1 alone: the whole rollout's 2 - 2.5 / 3
    mean = 2.5 / 3
    assert shown(TALKS, norm_adv_by_std_in_grpo=False) == [
        pytest.approx([2 - mean, 0.0, 0.5, 0.0, 2 - mean]),
        pytest.approx([-mean, 0.0, -0.5]),
        pytest.approx([0.5 - mean]),
    ]


def test_gamma_discounts_by_turns_and_not_by_tokens():
    # R_0 = 1 + 0.25 · 1, R_1 = 0.5 · 1
    first, second, third = shown(TALKS, norm_adv_by_std_in_grpo=False, gamma=0.5)
    mean = 1.75 / 3
    assert first == pytest.approx([1.25 - mean, 0.0, 0.25, 0.0, 1.25 - mean])
    assert second == pytest.approx([-mean, 0.0, -0.25])
    assert third == pytest.approx([0.5 - mean])


def test_the_spread_is_that_of_the_turn():
    # turn 1: returns 1 and 0, sample std 1 / √2
    first, second, _ = shown(TALKS)
    assert first[2] == pytest.approx(0.5 / (0.5**0.5 + 1e-6))
    assert second[2] == pytest.approx(-0.5 / (0.5**0.5 + 1e-6))


def test_a_good_second_turn_is_credited_though_the_whole_failed():
    # The second sample lost more in its first turn than it won later; grpo punishes all of it.
    rows = [
        row(0, "xx", [0.0, 0.0], turns=(0, 1)),
        row(0, "xx", [-2.0, 1.0], turns=(0, 1)),
    ]
    credit = shown(rows, norm_adv_by_std_in_grpo=False)
    assert credit == [[0.5, -0.5], [-0.5, 0.5]]
    whole = per_row(run("grpo", rows, norm_adv_by_std_in_grpo=False).advantages, rows)
    assert whole == [[0.5, 0.5], [-0.5, -0.5]]


@given(rows=batches(), is_absent=st.booleans(), by_std=st.booleans())
@some
def test_with_one_turn_it_is_grpo_to_the_last_bit(rows: list[Row], is_absent: bool, by_std: bool):
    one = [replace(r, turns=() if is_absent else (0,) * len(r.mask)) for r in rows]
    for dtype in (torch.float32, torch.float64):
        inputs = inputs_of(one, dtype)
        mine = adv_estimators.get("turn_grpo")(inputs, gamma=0.3, norm_adv_by_std_in_grpo=by_std)
        grpo = adv_estimators.get("grpo")(inputs, norm_adv_by_std_in_grpo=by_std)
        assert torch.equal(mine.advantages, grpo.advantages)
        assert torch.equal(mine.returns, grpo.returns)


@given(rows=batches(live=True), shift=st.integers(-8, 8))
@some
def test_what_all_siblings_earn_in_a_last_turn_that_all_reach_changes_nothing(
    rows: list[Row], shift: int
):
    def with_last_turn(reward: float) -> list[Row]:
        return [
            replace(r, mask=(*r.mask, True), rewards=(*r.rewards, reward), turns=(*r.turns, 6))
            for r in (replace(r, is_weights=()) for r in rows)
        ]

    plain = run("turn_grpo", with_last_turn(0.0)).advantages
    moved = run("turn_grpo", with_last_turn(float(shift))).advantages
    torch.testing.assert_close(plain, moved, rtol=1e-9, atol=1e-9)


@given(rows=batches(live=True), reward=st.integers(1, 8))
@some
def test_an_earlier_reward_never_changes_a_later_turn(rows: list[Row], reward: int):
    # Every row twice, so that no turn is reached by one sample alone.
    late = [replace(r, turns=tuple(t + 1 for t in r.turns), is_weights=()) for r in (*rows, *rows)]
    first = [
        replace(r, mask=(True, *r.mask), rewards=(0.0, *r.rewards), turns=(0, *r.turns))
        for r in late
    ]
    paid = [replace(first[0], rewards=(float(reward), *first[0].rewards[1:])), *first[1:]]
    before, after = shown(first), shown(paid)
    assert before[0][0] != after[0][0]
    assert [row[1:] for row in before] == [row[1:] for row in after]


def test_a_sample_without_trainable_tokens_counts_in_the_first_turn_only():
    dead = row(0, "..", [0.0, 4.0], turns=(3, 3))
    rows = [*TALKS[:2], dead]
    first, second, third = shown(rows, norm_adv_by_std_in_grpo=False)
    assert first == pytest.approx([0.0, 0.0, 0.5, 0.0, 0.0])
    assert second == pytest.approx([-2.0, 0.0, -0.5])
    assert third == [0.0, 0.0]


def test_a_trainable_token_without_a_turn_is_refused():
    with pytest.raises(UserError, match=r"turns = -1.*belongs to an assistant turn"):
        run("turn_grpo", [row(0, "x.", [0.0, 0.0], turns=(-1, 0))])


@pytest.mark.parametrize("gamma", [-0.1, 1.5, float("nan")])
def test_a_discount_outside_its_range_is_refused(gamma: float):
    with pytest.raises(UserError, match="gamma"):
        run("turn_grpo", TALKS, gamma=gamma)


def test_padded_rows_take_turns():
    mask = torch.tensor([[0, 1, 0, 1, 0], [0, 1, 0, 1, 1]])
    rewards = torch.tensor([[0.0, 0, 0, 0, 0], [0.0, -2.0, 0, 0, 1.0]])
    turns = torch.tensor([[0, 0, 0, 1, 9], [0, 0, 0, 1, 1]])
    found, _ = padded.advantage(
        "turn_grpo", rewards, mask, ["a", "a"], turns=turns, norm_adv_by_std_in_grpo=False
    )
    assert found.tolist() == [[0.0, 0.5, 0.0, -0.5, 0.0], [0.0, -0.5, 0.0, 0.5, 0.5]]
    whole, _ = padded.advantage("turn_grpo", rewards, mask, ["a", "a"])
    assert torch.equal(whole, padded.advantage("grpo", rewards, mask, ["a", "a"])[0])


@pytest.mark.parametrize("turns", [torch.zeros(1, 3), torch.zeros(1, 2, dtype=torch.int64)])
def test_padded_turns_are_integers_beside_every_token(turns: torch.Tensor):
    with pytest.raises(UserError, match="turns"):
        padded.advantage("turn_grpo", torch.zeros(1, 3), torch.ones(1, 3), ["a"], turns=turns)
