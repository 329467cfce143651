"""What every preference loss promises: direction, finite extremes, batch terms, refusals."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from luyen.algorithms.aggregation import Average
from luyen.algorithms.layout import Layout
from luyen.algorithms.preference import (
    PairInputs,
    PreferenceObjective,
    UnpairedInputs,
    preference_losses,
    step_coefficients,
)
from luyen.algorithms.preference.inputs import accuracy
from luyen.algorithms.preference.pointwise import step_rewards
from luyen.algorithms.preference.step import (
    preference_facts,
    sequence_sums,
    step_mean,
    token_weights,
)
from luyen.config.catalog import PREFERENCE_LOSSES
from tests.architecture.registered import knobs_of, ours
from tests.unit.algorithms.preference_steps import (
    MARKED,
    SMALL,
    answer_inputs,
    label,
    make_answers,
    make_others,
    make_pairs,
    numbers,
    pair_inputs,
)

NAMES = sorted({name for name, _ in SMALL})
UPHILL = {"discopop", "apo_down", "sft"}
"""Losses that do not push both answers apart at every point; their own tests say where."""


def pair(c: float, r: float, *, logp: float = -6.0, dtype: torch.dtype = torch.float64):
    """One pair with log-ratios c and r."""
    x = torch.tensor([logp], dtype=dtype)
    return PairInputs(
        chosen=x.clone().requires_grad_(),
        rejected=x.clone().requires_grad_(),
        ref_chosen=x - c,
        ref_rejected=x - r,
        chosen_tokens=torch.tensor([3]),
        rejected_tokens=torch.tensor([4]),
    )


def pulls(name: str, inputs: PairInputs, **hparams: Any) -> tuple[float, float]:
    by = step_coefficients(name, inputs, hparams).by
    return by["chosen"].item(), by["rejected"].item()


def test_the_catalog_lists_every_preference_loss_with_its_knobs():
    registered = {
        name: set(knobs_of(preference_losses.get(name))) for name in ours(preference_losses)
    }
    assert registered == {name: set(facts.hparams) for name, facts in PREFERENCE_LOSSES.items()}


@pytest.mark.parametrize("name", [n for n in NAMES if n not in UPHILL])
@pytest.mark.parametrize("ratios", [(0.0, 0.0), (-1.0, 1.0), (0.5, -0.5)])
def test_the_gradient_raises_the_chosen_answer_and_lowers_the_other(
    name: str, ratios: tuple[float, float]
):
    chosen, rejected = pulls(name, pair(*ratios))
    assert chosen < 0 < rejected


def test_losses_that_pull_otherwise_do_so_where_they_say():
    assert pulls("sft", pair(0.0, 0.0)) == (pytest.approx(-1 / 3), 0.0)
    down = pulls("apo_down", pair(0.0, 0.0))
    assert down[0] == 0.0 < down[1]
    assert pulls("apo_down", pair(0.0, -5.0))[0] > 0
    assert pulls("discopop", pair(-5.0, 5.0))[0] < 0 < pulls("discopop", pair(0.0, 0.0))[0]
    assert pulls("discopop", pair(5.0, -5.0))[0] < 0


@pytest.mark.parametrize("case", MARKED, ids=label)
def test_good_answers_go_up_and_bad_ones_down(case: tuple[str, dict[str, Any]]):
    name, hparams = case
    inputs = answer_inputs(name, make_answers(4), make_others(4))
    by = step_coefficients(name, inputs, hparams).by["logp"]
    assert ((by < 0) == inputs.desirable).all()
    assert by.all()


FAR = [(1e4, -1e4), (-1e4, 1e4), (1e4, 1e4), (-1e4, -1e4), (1e4, 0.0), (-1e4, 0.0), (0.0, 1e4)]


@pytest.mark.parametrize("case", SMALL, ids=label)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_far_pairs_have_finite_losses_and_gradients(
    case: tuple[str, dict[str, Any]], dtype: torch.dtype
):
    name, hparams = case
    free = not preference_facts(name).reference
    for c, r in FAR:
        inputs = pair(c, r, dtype=dtype)
        if free:
            inputs = replace(inputs, chosen=far(c, dtype), rejected=far(r, dtype))
        loss = PreferenceObjective(losses=(name,), hparams=hparams)(inputs).loss.sum()
        gradients = torch.autograd.grad(
            loss, [inputs.chosen, inputs.rejected], allow_unused=True, materialize_grads=True
        )
        assert all(x.isfinite().all() for x in (loss, *gradients)), (c, r)


def far(x: float, dtype: torch.dtype) -> torch.Tensor:
    """A log-probability as far down as x says; what is above 0 becomes certainty."""
    return torch.tensor([min(x, 0.0)], dtype=dtype, requires_grad=True)


@pytest.mark.parametrize("case", MARKED, ids=label)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_far_answers_have_finite_losses_and_gradients(
    case: tuple[str, dict[str, Any]], dtype: torch.dtype
):
    name, hparams = case
    logp = torch.tensor([0.0, 0.0, -1e4, -1e4], dtype=dtype, requires_grad=True)
    other = torch.tensor([0.0, -1e4], dtype=dtype)
    inputs = UnpairedInputs(
        logp=logp,
        ref_logp=torch.tensor([-1e4, -1e4, 0.0, 0.0], dtype=dtype),
        desirable=torch.tensor([True, False, True, False]),
        mismatched=other if name == "kto" else None,
        ref_mismatched=other.flip(0) - 1e4 if name == "kto" else None,
    )
    loss = PreferenceObjective(losses=(name,), hparams=hparams)(inputs).loss.sum()
    (gradient,) = torch.autograd.grad(loss, [logp])
    assert loss.isfinite()
    assert gradient.isfinite().all()


def test_metrics_of_a_policy_that_equals_its_reference():
    metrics = PreferenceObjective(losses=("sigmoid",))(pair(0.0, 0.0)).metrics
    values = {name: average.value() for name, average in metrics.items()}
    assert values == {
        "preference/loss": pytest.approx(0.6931471805599453),
        "preference/accuracy": 0.5,
        "preference/margin": 0.0,
        "preference/chosen_reward": 0.0,
        "preference/rejected_reward": 0.0,
        "preference/chosen_logp": -6.0,
        "preference/rejected_logp": -6.0,
    }
    ordered = accuracy(numbers([2.0, 1.0, 1.0]), numbers([1.0, 2.0, 1.0]))
    assert ordered.tolist() == [1.0, 0.0, 0.5]


def test_a_mixture_is_the_weighted_sum_and_reports_its_parts():
    inputs = pair_inputs(make_pairs(5))
    mixed = PreferenceObjective(
        losses=("sigmoid", "bco_pair", "sft"), loss_weights=(0.8, 0.2, 1.0), hparams={"beta": 0.3}
    )
    alone = [
        PreferenceObjective(losses=(n,), hparams=k)(inputs)
        for n, k in (("sigmoid", {"beta": 0.3}), ("bco_pair", {"beta": 0.3}), ("sft", {}))
    ]
    expected = 0.8 * alone[0].loss + 0.2 * alone[1].loss + alone[2].loss
    result = mixed(inputs)
    torch.testing.assert_close(result.loss, expected)
    assert result.metrics["preference/loss"].value() == pytest.approx(expected.mean().item())
    assert result.metrics["preference/sft_loss"].value() == pytest.approx(
        alone[2].loss.mean().item()
    )
    assert torch.equal(result.rewards["chosen"], alone[0].rewards["chosen"])


def test_the_loss_of_a_pair_under_aot_is_the_one_of_its_rank():
    inputs = pair_inputs(make_pairs(6, 4))
    order = torch.tensor([2, 0, 3, 1])
    there = replace(
        inputs,
        chosen=inputs.chosen[order],
        rejected=inputs.rejected[order],
        chosen_tokens=inputs.chosen_tokens[order],
        rejected_tokens=inputs.rejected_tokens[order],
    )
    for name in ("aot", "aot_unpaired"):
        objective = PreferenceObjective(losses=(name,))
        if name == "aot":
            torch.testing.assert_close(objective(there).loss, objective(inputs).loss[order])
        assert objective(inputs).loss.std() > 0


def test_the_shift_of_bco_remembers_the_steps_before():
    answers = make_answers(1)
    first = answer_inputs("bco", answers, [])
    second = replace(first, logp=first.logp + 1.0, history=step_rewards(first, 0.1))
    shift = PreferenceObjective(losses=("bco",))(second).metrics["preference/reward_shift"]
    rewards = torch.cat([0.1 * first.ratio, 0.1 * second.ratio]).detach()
    assert shift.value() == pytest.approx(rewards.mean().item())
    assert isinstance(step_rewards(second, 0.1), Average)
    assert step_rewards(second, 0.1).count.item() == 12


def test_the_reference_point_of_kto_is_never_negative_and_has_no_gradient():
    inputs = answer_inputs("kto", make_answers(2), [(-9.0, -1.0)])
    low = PreferenceObjective(losses=("kto",))(inputs)
    assert low.metrics["preference/kl"].value() == 0.0
    zero = replace(inputs, mismatched=None, ref_mismatched=None)
    unpaired = PreferenceObjective(losses=("apo_zero_unpaired",))(zero)
    torch.testing.assert_close(low.loss, unpaired.loss)


def test_a_lighter_tail_weighs_tokens_beyond_the_shorter_answer():
    layout = Layout(
        mask=torch.tensor([False, True, True, True, True, False, True]),
        offsets=torch.tensor([0, 4, 7]),
        groups=torch.tensor([0, 0]),
    )
    weights = token_weights(layout, torch.tensor([2, 2]), ld_alpha=0.25)
    assert weights.tolist() == [0.0, 1.0, 1.0, 0.25, 1.0, 0.0, 1.0]
    logp = torch.tensor([torch.nan, -1.0, -2.0, -4.0, -1.0, torch.nan, -1.0])
    assert sequence_sums(logp, layout, weights).tolist() == [-4.0, -2.0]
    assert sequence_sums(logp, layout).tolist() == [-7.0, -2.0]


def test_an_empty_step_has_no_loss():
    nothing = pair_inputs(make_pairs(0)).take(torch.tensor([], dtype=torch.int64))
    objective = PreferenceObjective(losses=("sigmoid",))
    assert step_mean(objective(nothing).loss).item() == 0.0


@pytest.mark.parametrize("coef", [0.5, 1.0])
def test_a_mixture_of_a_divergence_and_a_likelihood_is_allowed(coef: float):
    hparams = {"f_divergence_type": "alpha_divergence", "f_alpha_divergence_coef": coef}
    objective = PreferenceObjective(losses=("sigmoid", "sft"), hparams=hparams)
    assert objective(pair_inputs(make_pairs(0))).loss.isfinite().all()
