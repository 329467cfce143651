"""Optimal token baselines against numbers worked out by hand."""

import math
from dataclasses import replace

import pytest
import torch

from luyen.algorithms.advantages import Credit, adv_estimators
from luyen.base.errors import UserError
from tests.unit.algorithms.credit_batches import NAN, Row, advantages, inputs_of, per_row, row
from tests.unit.algorithms.plain_estimators import token_baseline

HALF = math.log(0.5)
BOTH = ["optimal_token_baseline", "tir_optimal_token_baseline"]


def path(group: int, mask: str, rewards: list[float], squares: list[float], **more: object) -> Row:
    """A row whose tokens all have π = 1/2, so that each adds Σπ² to the path weight."""
    logp = (HALF,) * len(mask)
    return row(group, mask, rewards, old_logp=logp, sum_pi_squared=tuple(squares), **more)


def run(name: str, rows: list[Row], **hparams: bool) -> Credit:
    return adv_estimators.get(name)(inputs_of(rows), **hparams)


# Path weights: 0.5, 1 and 1.5, 2. Returns: 1, 1 and 0, 0.
PAIR = [path(0, "xx", [0.0, 1.0], [0.5, 0.5]), path(0, "xx", [0.0, 0.0], [1.5, 0.5])]


@pytest.mark.parametrize("name", BOTH)
def test_the_baseline_weights_returns_by_what_the_path_has_gathered(name: str):
    first, second = 0.5 / (2.0 + 1e-8), 1.0 / (3.0 + 1e-8)
    result = advantages(run(name, PAIR), PAIR)
    assert result[0] == pytest.approx([1 - first, 1 - second], rel=1e-12)
    assert result[1] == pytest.approx([-first, -second], rel=1e-12)


@pytest.mark.parametrize("name", BOTH)
def test_returns_are_the_rewards_still_to_come(name: str):
    assert per_row(run(name, PAIR).returns, PAIR) == [[1.0, 1.0], [0.0, 0.0]]


@pytest.mark.parametrize("name", BOTH)
def test_importance_weights_enter_squared(name: str):
    rows = [replace(PAIR[0], is_weights=(2.0, 1.0)), replace(PAIR[1], is_weights=(1.0, 1.0))]
    # path weights of the first row: 4·0.5 = 2, then 2.5
    first, second = 2.0 / (3.5 + 1e-8), 2.5 / (4.5 + 1e-8)
    assert advantages(run(name, rows), rows)[0] == pytest.approx([1 - first, 1 - second], rel=1e-12)


@pytest.mark.parametrize("name", BOTH)
def test_the_tail_of_the_longest_sequence_has_no_baseline(name: str):
    rows = [path(0, "xxx", [0.0, 0.0, 1.0], [0.5] * 3), path(0, "x", [0.0], [0.5])]
    assert advantages(run(name, rows), rows)[0] == pytest.approx([0.5, 1.0, 1.0], rel=1e-7)
    kept = advantages(run(name, rows, handle_zero_tail=False), rows)[0]
    assert kept == pytest.approx([0.5, 0.0, 0.0], abs=1e-7)


@pytest.mark.parametrize("name", BOTH)
def test_two_sequences_of_equal_length_have_no_tail(name: str):
    on, off = run(name, PAIR), run(name, PAIR, handle_zero_tail=False)
    assert torch.equal(on.advantages, off.advantages)


def test_positions_align_by_place_or_by_rank():
    # the second row has a tool result between its two tokens
    rows = [path(0, "xxx", [0.0, 0.0, 1.0], [1.0] * 3), path(0, "x.x", [0.0, 0.0, 0.0], [1.0] * 3)]
    by_place = advantages(run("optimal_token_baseline", rows), rows)
    # place 1: only the first row is there, so B = G; place 2: weights 3 and 2
    assert by_place[0] == pytest.approx([0.5, 0.0, 1 - 3 / 5], abs=1e-7)
    assert by_place[1] == pytest.approx([-0.5, 0.0, -3 / 5], abs=1e-7)
    by_rank = advantages(run("tir_optimal_token_baseline", rows), rows)
    # rank 1: weights 2 and 2; rank 2: the tail of the first row
    assert by_rank[0] == pytest.approx([0.5, 0.5, 1.0], abs=1e-7)
    assert by_rank[1] == pytest.approx([-0.5, 0.0, -0.5], abs=1e-7)


def test_given_positions_replace_the_counted_ones():
    inputs = replace(inputs_of(PAIR), positions=torch.tensor([0, 1, 5, 6]))
    result = adv_estimators.get("optimal_token_baseline")(inputs, handle_zero_tail=False)
    assert result.advantages.tolist() == pytest.approx([0.0] * 4, abs=1e-7)


@pytest.mark.parametrize("name", BOTH)
def test_a_sequence_without_trainable_tokens_is_no_peer(name: str):
    rows = [PAIR[0], path(0, "..", [0.0, 5.0], [0.5, 0.5])]
    assert run(name, rows).advantages.tolist() == [0.0] * 4
    three = [*PAIR, rows[1]]
    assert run(name, three).advantages[:4].tolist() == run(name, PAIR).advantages.tolist()


@pytest.mark.parametrize("name", BOTH)
def test_certain_tokens_leave_no_weight_and_no_division_by_zero(name: str):
    sure = [
        row(0, "x", [1.0], old_logp=(0.0,), sum_pi_squared=(1.0 - 1e-9,)),
        row(0, "x", [0.0], old_logp=(0.0,), sum_pi_squared=(1.0,)),
    ]
    assert run(name, sure).advantages.tolist() == [1.0, 0.0]


@pytest.mark.parametrize("by_rank", [False, True])
def test_without_the_tail_rule_it_equals_the_plain_formula(by_rank: bool):
    rows = [
        path(0, "x.xx", [0.0, 1.0, 0.5, 2.0], [0.3, 0.1, 0.9, 0.4]),
        path(1, "xx", [1.0, 0.0], [0.2, 0.6]),
        path(0, ".xxx", [0.0, 0.0, -1.0, 1.0], [0.5, 0.7, 0.2, 0.1]),
        path(0, "xxxx", [0.0, 0.0, 0.0, 3.0], [0.1, 0.8, 0.3, 0.3]),
    ]
    result = advantages(run(BOTH[by_rank], rows, handle_zero_tail=False), rows)
    expected = token_baseline(rows, by_rank=by_rank, zero_tail=False)
    for got, want in zip(result, expected, strict=True):
        assert got == pytest.approx(want, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize(
    ("stream", "fix"),
    [("sum_pi_squared", "calculate_sum_pi_squared"), ("old_logp", "log-probabilities")],
)
def test_a_missing_stream_is_refused_with_the_way_to_get_it(name: str, stream: str, fix: str):
    inputs = replace(inputs_of(PAIR), **{stream: None})
    with pytest.raises(UserError, match=rf"{stream} = None.*{fix}"):
        adv_estimators.get(name)(inputs)


@pytest.mark.parametrize("stream", ["old_logp", "sum_pi_squared", "is_weights"])
def test_a_stream_that_is_not_finite_is_refused_by_name(stream: str):
    bad = replace(PAIR[0], is_weights=(1.0, 1.0))
    rows = [replace(bad, **{stream: (0.0, NAN)}), replace(PAIR[1], is_weights=(1.0, 1.0))]
    with pytest.raises(UserError, match=rf"^{stream} = nan"):
        run("tir_optimal_token_baseline", rows)
