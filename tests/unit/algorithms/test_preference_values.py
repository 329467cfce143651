"""Values and gradients of every preference loss against plain Python floats, and by hand."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import pytest
import torch

from luyen.algorithms.preference import PreferenceObjective, preference_losses
from luyen.algorithms.preference.inputs import PairInputs
from luyen.algorithms.preference.step import step_mean
from tests.architecture.registered import ours
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
from tests.unit.algorithms.scalar_preference import Answer, Pair, answer_step, pair_step

LOG2 = math.log(2.0)
STEP = 1e-6


def slope(value: Callable[[float], float]) -> float:
    """Central difference of a function of a small shift."""
    return (value(STEP) - value(-STEP)) / (2 * STEP)


Row = TypeVar("Row", Pair, Answer)


def moved(rows: list[Row], i: int, field: str, shift: float) -> list[Row]:
    """The rows with one number of one of them moved."""
    there = replace(rows[i], **{field: getattr(rows[i], field) + shift})
    return [*rows[:i], there, *rows[i + 1 :]]


def test_every_loss_has_a_case():
    assert {name for name, _ in [*SMALL, *MARKED]} == set(ours(preference_losses))


@pytest.mark.parametrize("case", SMALL, ids=label)
@pytest.mark.parametrize("seed", [0, 1])
def test_a_pairwise_loss_equals_its_twin_in_value_and_gradient(
    case: tuple[str, dict[str, Any]], seed: int
):
    name, hparams = case
    pairs = make_pairs(seed)
    inputs = pair_inputs(pairs)
    loss = step_mean(PreferenceObjective(losses=(name,), hparams=hparams)(inputs).loss)
    assert loss.item() == pytest.approx(pair_step(name, pairs, **hparams), rel=1e-12)
    found = torch.autograd.grad(
        loss, [inputs.chosen, inputs.rejected], materialize_grads=True, allow_unused=True
    )
    for side, gradient in zip(("chosen", "rejected"), found, strict=True):
        for i in range(len(pairs)):

            def value(x: float, i: int = i, side: str = side) -> float:
                return pair_step(name, moved(pairs, i, side, x), **hparams)

            assert gradient[i].item() == pytest.approx(slope(value), rel=1e-5, abs=1e-8)


@pytest.mark.parametrize("case", MARKED, ids=label)
@pytest.mark.parametrize("seed", [0, 1])
def test_an_unpaired_loss_equals_its_twin_in_value_and_gradient(
    case: tuple[str, dict[str, Any]], seed: int
):
    name, hparams = case
    answers, others = make_answers(seed), make_others(seed)
    inputs = answer_inputs(name, answers, others)
    loss = step_mean(PreferenceObjective(losses=(name,), hparams=hparams)(inputs).loss)
    assert loss.item() == pytest.approx(answer_step(name, answers, others, **hparams), rel=1e-12)
    (gradient,) = torch.autograd.grad(loss, [inputs.logp])
    for i in range(len(answers)):

        def value(x: float, i: int = i) -> float:
            there = moved(answers, i, "logp", x)
            return answer_step(name, there, others, frozen=answers, **hparams)

        assert gradient[i].item() == pytest.approx(slope(value), rel=1e-5, abs=1e-8)


@pytest.mark.parametrize("name", ["sigmoid", "sigmoid_norm", "hinge", "robust", "exo_pair"])
def test_a_margin_is_taken_from_the_logit(name: str):
    pairs = [replace(p, margin=0.3 * i) for i, p in enumerate(make_pairs(3))]
    loss = step_mean(PreferenceObjective(losses=(name,))(pair_inputs(pairs, margins=True)).loss)
    assert loss.item() == pytest.approx(pair_step(name, pairs), rel=1e-12)


def one_pair() -> PairInputs:
    """c = 2 log 2 in two tokens, r = -2 log 2 in one, so that βΔ = log 4 at β = ½."""
    return PairInputs(
        chosen=numbers([-2 * LOG2]),
        rejected=numbers([-4 * LOG2]),
        ref_chosen=numbers([-4 * LOG2]),
        ref_rejected=numbers([-2 * LOG2]),
        chosen_tokens=torch.tensor([2]),
        rejected_tokens=torch.tensor([1]),
    )


BY_HAND: list[tuple[str, dict[str, Any], float]] = [
    ("sigmoid", {}, math.log(5 / 4)),
    ("sigmoid", {"label_smoothing": 0.25}, 0.75 * math.log(5 / 4) + 0.25 * math.log(5)),
    ("sigmoid_norm", {}, math.log1p(2**-1.5)),
    ("hinge", {}, 0.0),
    ("hinge", {"beta": 0.25}, 1 - LOG2),
    ("ipo", {}, (3 * LOG2 - 1) ** 2),
    ("robust", {"label_smoothing": 0.25}, 2 * (0.75 * math.log(5 / 4) - 0.25 * math.log(5))),
    ("exo_pair", {"label_smoothing": 0.2}, 0.0),
    ("exo_pair", {"label_smoothing": 0.5}, 0.8 * math.log(1.6) + 0.2 * math.log(0.4)),
    ("discopop", {"discopop_tau": 1.0}, 0.2 * math.log(5 / 4) + 0.8 / 4),
    ("sft", {}, LOG2),
    ("nca_pair", {}, math.log(3 / 2) + 0.5 * math.log(3) + 0.5 * math.log(3 / 2)),
    ("bco_pair", {}, 2 * math.log(3 / 2)),
    ("sppo_hard", {}, 2 * (2 * LOG2 - 1) ** 2),
    ("apo_zero", {}, 2 / 3),
    ("apo_down", {}, 2 / 3 + 1 / 5),
    ("aot", {}, math.log(5 / 4)),
    ("aot_unpaired", {}, math.log(5 / 4)),
    ("orpo", {}, LOG2 + 0.5 * math.log(16 / 15)),
    ("cpo", {}, math.log(3 / 2) + LOG2),
    ("simpo", {"simpo_gamma": 0.0}, math.log1p(2**-1.5)),
    ("alphapo", {"alpha": 1.0, "simpo_gamma": 0.0}, math.log1p(math.exp(-7))),
]


@pytest.mark.parametrize(("name", "hparams", "expected"), BY_HAND)
def test_one_pair_by_hand(name: str, hparams: dict[str, Any], expected: float):
    beta = {} if name == "sft" else {"beta": 0.5}
    loss = PreferenceObjective(losses=(name,), hparams=beta | hparams)(one_pair()).loss
    assert loss.item() == pytest.approx(expected, abs=1e-14)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("reverse_kl", 4 * LOG2),
        ("forward_kl", (1 - 1 / 4) - (1 - 4)),
        ("js_divergence", math.log(8 / 5) - math.log(2 / 5)),
        ("alpha_divergence", -2 * (1 / 2 - 1) + 2 * (2 - 1)),
    ],
)
def test_divergences_by_hand(kind: str, expected: float):
    hparams = {"beta": 1.0, "f_divergence_type": kind}
    loss = PreferenceObjective(losses=("sigmoid",), hparams=hparams)(one_pair()).loss
    assert loss.item() == pytest.approx(math.log1p(math.exp(-expected)), abs=1e-14)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        # Rewards ½x are log 2 (good) and log 4 (bad); z is log 2, the shift of bco log √8.
        ("kto", (1 / 2 + 2 / 3) / 2),
        ("apo_zero_unpaired", (1 / 3 + 4 / 5) / 2),
        ("bco", math.log1p(math.sqrt(2))),
    ],
)
def test_two_answers_by_hand(name: str, expected: float):
    answers = make_answers(0, 2)
    answers = [
        replace(answers[1], logp=-LOG2, ref=-3 * LOG2, good=True, ratio=1.0),
        replace(answers[0], logp=-LOG2, ref=-5 * LOG2, good=False, ratio=1.0),
    ]
    inputs = answer_inputs(name, answers, [(-LOG2, -3 * LOG2)])
    loss = step_mean(PreferenceObjective(losses=(name,), hparams={"beta": 0.5})(inputs).loss)
    assert loss.item() == pytest.approx(expected, abs=1e-14)
