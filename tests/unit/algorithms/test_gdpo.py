"""GDPO: parts of the reward normalised one by one, against numbers worked out by hand."""

import math
from dataclasses import replace

import pytest
import torch

from luyen.algorithms.advantages import CreditInputs
from luyen.algorithms.advantages.group import gdpo
from luyen.base.errors import UserError
from tests.unit.algorithms.credit_batches import NAN, Row, advantages, inputs_of, outcome_row

RIGHT = [1.0, 0.0, 1.0, 0.0, 5.0]
SHORT = [0.0, 10.0, 30.0, 30.0, 5.0]
MASKS = ["x.x", "x", "xx", "x", "xx"]
GROUPS = [0, 0, 1, 1, 2]


def batch() -> list[Row]:
    return [
        outcome_row(g, m, 0.0, parts={"right": a, "short": b})
        for g, m, a, b in zip(GROUPS, MASKS, RIGHT, SHORT, strict=True)
    ]


def expected(first: float, second: float) -> list[float]:
    """Whitened sum of two normalised parts; both groups have two samples, the last row is alone."""
    root, eps = math.sqrt(2.0), 1e-6
    unit = 0.5 / (root / 2 + eps)
    tens = 5.0 / (5.0 * root + eps)
    raw = [first * unit - second * tens, -first * unit + second * tens, first * unit, -first * unit]
    pool = [raw[0]] * 2 + [raw[1]] + [raw[2]] * 2 + [raw[3]]
    mean = sum(pool) / 6
    scale = 1.0 / math.sqrt(sum((x - mean) ** 2 for x in pool) / 5 + 1e-8)
    return [(x - mean) * scale for x in raw] + [0.0]


def heads(rows: list[Row], inputs: CreditInputs, **hparams: object) -> list[float]:
    return [values[0] for values in advantages(gdpo(inputs, **hparams), rows)]


def test_parts_are_normalised_in_the_group_then_added_and_whitened():
    rows = batch()
    assert heads(rows, inputs_of(rows)) == pytest.approx(expected(1.0, 1.0), rel=1e-9, abs=1e-12)


def test_weights_multiply_the_normalised_parts():
    rows = batch()
    result = heads(rows, inputs_of(rows), gdpo_reward_weights=[3.0, 0.5])
    assert result == pytest.approx(expected(3.0, 0.5), rel=1e-9)


def test_keys_choose_parts_and_give_the_order_of_weights():
    rows = batch()
    one = heads(rows, inputs_of(rows), gdpo_reward_keys=["right"])
    assert one == pytest.approx(expected(1.0, 0.0), rel=1e-9)
    both = heads(
        rows,
        inputs_of(rows),
        gdpo_reward_keys=["short", "right"],
        gdpo_reward_weights=[0.5, 3.0],
    )
    assert both == pytest.approx(expected(3.0, 0.5), rel=1e-9)


def test_a_part_ten_times_larger_weighs_the_same():
    rows = batch()
    larger = [replace(r, parts={**r.parts, "short": 10 * r.parts["short"]}) for r in rows]
    assert heads(larger, inputs_of(larger)) == pytest.approx(expected(1.0, 1.0), rel=1e-6)


def test_missing_components_are_refused_with_the_way_to_get_them():
    rows = [outcome_row(0, "x", 1.0), outcome_row(0, "x", 0.0)]
    with pytest.raises(UserError, match=r"components = None.*Fix: return the parts"):
        gdpo(inputs_of(rows))


def test_an_unknown_key_is_refused_with_a_near_name():
    with pytest.raises(UserError, match=r"no component 'rigth'.*did you mean `right`"):
        gdpo(inputs_of(batch()), gdpo_reward_keys=["rigth"])


@pytest.mark.parametrize("keys", [[], ["right", "right"]])
def test_no_key_or_a_key_named_twice_is_refused(keys: list[str]):
    with pytest.raises(UserError, match="at least one component, and none twice"):
        gdpo(inputs_of(batch()), gdpo_reward_keys=keys)


@pytest.mark.parametrize("weights", [[1.0], [1.0, 2.0, 3.0], [1.0, NAN], [math.inf, 1.0]])
def test_weights_that_do_not_fit_the_parts_are_refused(weights: list[float]):
    with pytest.raises(UserError, match=r"gdpo_reward_weights.*right, short"):
        gdpo(inputs_of(batch()), gdpo_reward_weights=weights)


def test_a_part_that_is_not_finite_is_refused_by_name():
    rows = batch()
    rows[1] = replace(rows[1], parts={"right": 0.0, "short": NAN})
    with pytest.raises(UserError, match=r"components\['short'\] = nan"):
        gdpo(inputs_of(rows))


def test_a_part_of_another_shape_is_refused_with_both_shapes():
    inputs = replace(inputs_of(batch()), baselines=None, components={"right": torch.zeros(3)})
    with pytest.raises(UserError, match=r"components\['right'\] = \(3,\).*groups \(5,\)"):
        gdpo(inputs)


def test_a_part_of_integers_is_refused():
    layout = inputs_of(batch()).layout
    rewards = torch.zeros(9)
    with pytest.raises((UserError, TypeError), match=r"components"):
        gdpo(CreditInputs(rewards=rewards, layout=layout, components={"right": torch.arange(5)}))
