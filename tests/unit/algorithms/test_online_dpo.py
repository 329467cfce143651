"""Sampled pairs: the advantages are the derivative of the preference loss, to the last digits."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from luyen.algorithms.advantages.online_dpo import credit_of_pairs, online_dpo
from luyen.algorithms.preference.inputs import PairInputs
from luyen.algorithms.preference.step import PreferenceObjective, sequence_sums
from luyen.base.errors import UserError
from tests.unit.algorithms.credit_batches import Row, batches, inputs_of, outcome_row, per_row

OBJECTIVES: dict[str, PreferenceObjective] = {
    "sigmoid": PreferenceObjective(losses=("sigmoid",)),
    "strong": PreferenceObjective(losses=("sigmoid",), hparams={"beta": 2.0}),
    "ipo": PreferenceObjective(losses=("ipo",)),
    "whole step": PreferenceObjective(losses=("aot_unpaired",)),
    "no reference": PreferenceObjective(losses=("simpo",)),
    "mixture": PreferenceObjective(losses=("sigmoid", "sft"), loss_weights=(0.8, 0.3)),
    "light tail": PreferenceObjective(losses=("sigmoid",), ld_alpha=0.25),
}


def sides(rows: list[Row]) -> tuple[list[int], list[int]]:
    """Places of the best and of the worst row of each group, found by looking at every row."""
    best: list[int] = []
    worst: list[int] = []
    for group in sorted({r.group for r in rows}):
        mine = [(i, sum(r.rewards)) for i, r in enumerate(rows) if r.group == group and any(r.mask)]
        values = [value for _, value in mine]
        if mine and max(values) > min(values):
            best.append(next(i for i, value in mine if value == max(values)))
            worst.append(next(i for i, value in mine if value == min(values)))
    return best, worst


def autograd(rows: list[Row], objective: PreferenceObjective) -> Tensor:
    """The gradient of the preference loss by the log-probability of every token."""
    inputs = inputs_of(rows)
    best, worst = sides(rows)
    assert inputs.old_logp is not None
    assert inputs.ref_logp is not None
    logp = inputs.old_logp.clone().requires_grad_()
    if not best:
        return torch.zeros_like(logp)
    lengths = inputs.layout.lengths()
    shared = lengths.clone()
    shared[best] = shared[worst] = torch.minimum(lengths[best], lengths[worst])
    weights = objective.token_weights(inputs.layout, shared)
    sums = sequence_sums(logp, inputs.layout, weights)
    ref = sequence_sums(inputs.ref_logp, inputs.layout, weights)
    loss = objective(
        PairInputs(
            chosen=sums[best],
            rejected=sums[worst],
            chosen_tokens=lengths[best],
            rejected_tokens=lengths[worst],
            ref_chosen=ref[best] if objective.needs_reference else None,
            ref_rejected=ref[worst] if objective.needs_reference else None,
        )
    ).loss.mean()
    return torch.autograd.grad(loss, logp)[0]


@pytest.mark.parametrize("name", OBJECTIVES)
@given(rows=batches())
@settings(max_examples=40, deadline=None)
def test_one_plain_step_has_the_gradient_of_the_preference_loss(name: str, rows: list[Row]):
    objective = OBJECTIVES[name]
    found = credit_of_pairs(inputs_of(rows), objective)
    # The loss -A·log π, summed over tokens, has the derivative -A by each log π.
    torch.testing.assert_close(-found.advantages, autograd(rows, objective), rtol=0, atol=1e-12)


def pair(**changes: Any) -> list[Row]:
    """Two groups: one with a best and a worst, one in which all are alike."""
    rows = [
        outcome_row(0, ".x", 1.0, old_logp=(0.0, -1.0), ref_logp=(0.0, -2.0)),
        outcome_row(0, ".xx", 0.0, old_logp=(0.0, -2.0, -1.0), ref_logp=(0.0, -1.0, -1.0)),
        outcome_row(0, ".x", 0.5, old_logp=(0.0, -1.0), ref_logp=(0.0, -1.0)),
        outcome_row(1, ".x", 1.0, old_logp=(0.0, -1.0), ref_logp=(0.0, -1.0)),
        outcome_row(1, ".x", 1.0, old_logp=(0.0, -3.0), ref_logp=(0.0, -1.0)),
    ]
    return [replace(row, **changes) for row in rows]


def test_the_numbers_of_a_pair_by_hand():
    # log-ratios: 1 for the best, -1 for the worst; z = 0.1 * 2.
    push = 0.1 / (1 + math.exp(0.2))
    credit = online_dpo(inputs_of(pair()))
    found = per_row(credit.advantages, pair())
    assert found == [
        [0.0, pytest.approx(push, abs=1e-15)],
        [0.0, pytest.approx(-push, abs=1e-15), pytest.approx(-push, abs=1e-15)],
        [0.0, 0.0],
        [0.0, 0.0],
        [0.0, 0.0],
    ]
    assert credit.metrics["preference/loss"].value() == pytest.approx(math.log1p(math.exp(-0.2)))


def test_a_group_that_is_alike_teaches_nothing_and_is_counted():
    assert online_dpo(inputs_of(pair())).metrics["preference/tied_fraction"].value() == 0.5
    alike = [row for row in pair() if row.group == 1]
    credit = online_dpo(inputs_of(alike))
    assert not credit.advantages.any()
    assert {name: a.value() for name, a in credit.metrics.items()} == {
        "preference/tied_fraction": 1.0
    }


def test_the_first_of_equals_stands_for_them():
    rows = [
        outcome_row(0, ".x", reward, old_logp=(0.0, -1.0), ref_logp=(0.0, -1.0))
        for reward in (0.0, 1.0, 0.0, 1.0)
    ]
    signs = [row[1] for row in per_row(online_dpo(inputs_of(rows)).advantages, rows)]
    assert [(x > 0) - (x < 0) for x in signs] == [-1, 1, 0, 0]


def test_an_answer_without_trainable_tokens_is_no_side_of_a_pair():
    rows = [*pair(), outcome_row(0, "..", 9.0, old_logp=(0.0, 0.0), ref_logp=(0.0, 0.0))]
    found = per_row(online_dpo(inputs_of(rows)).advantages, rows)
    assert found[0][1] > 0
    assert found[-1] == [0.0, 0.0]


def test_a_reference_is_asked_for_where_a_loss_reads_one():
    with pytest.raises(UserError, match="ref_logp"):
        online_dpo(inputs_of(pair(ref_logp=())))
    assert online_dpo(inputs_of(pair(ref_logp=())), loss_type=("simpo",)).advantages.any()


@given(scale=st.integers(1, 9), shift=st.integers(-20, 20))
@settings(max_examples=10, deadline=None)
def test_only_the_order_of_rewards_counts(scale: int, shift: int):
    rows = pair()
    moved = [replace(r, rewards=(*r.rewards[:-1], scale * r.rewards[-1] + shift / 4)) for r in rows]
    one, other = (online_dpo(inputs_of(some)).advantages for some in (rows, moved))
    assert one.any()
    assert torch.equal(one, other)
