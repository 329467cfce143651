"""Coefficients that follow a measurement."""

import json

import pytest

from luyen.algorithms.controllers import (
    AdaptiveEntropyController,
    AdaptiveKLController,
    FixedKLController,
)
from luyen.base.errors import UserError


@pytest.mark.parametrize(
    ("kl", "expected"),
    [(0.1, 0.5), (0.11, 0.5 * 1.05), (9.0, 0.5 * 1.1), (0.0, 0.5 * 0.9), (0.09, 0.5 * 0.95)],
)
def test_adaptive_kl_moves_by_the_clipped_error(kl: float, expected: float):
    control = AdaptiveKLController(kl_coef=0.5, target_kl=0.1, horizon=100)
    assert control.update(kl=kl, n_steps=50).kl_coef == pytest.approx(expected)
    assert control.kl_coef == 0.5


def test_adaptive_kl_never_turns_negative():
    control = AdaptiveKLController(kl_coef=0.5, target_kl=0.1, horizon=1)
    assert control.update(kl=0.0, n_steps=64).kl_coef == 0.0


def test_adaptive_kl_holds_still_over_the_horizon_at_its_target():
    control = AdaptiveKLController()
    for _ in range(10):
        control = control.update(kl=control.target_kl, n_steps=512)
    assert control == AdaptiveKLController()


def test_fixed_kl_stays():
    control = FixedKLController(kl_coef=0.2)
    assert control.update(kl=100.0, n_steps=8) is control
    assert control.restore({"kl_coef": 0.7}).kl_coef == 0.2


def test_adaptive_entropy_climbs_below_the_target_and_is_silent_above_it():
    control = AdaptiveEntropyController(coefficient=0.01, target=0.3, delta=0.004, max=0.016)
    assert control.applied == 0.01
    low = control.update(entropy=0.3)
    assert (low.coefficient, low.applied) == (pytest.approx(0.014), pytest.approx(0.014))
    assert low.update(entropy=0.1).coefficient == 0.016
    high = low.update(entropy=0.31)
    assert (high.coefficient, high.applied) == (pytest.approx(0.01), 0.0)
    assert high.update(entropy=0.2).applied == pytest.approx(0.014)


def test_adaptive_entropy_never_leaves_its_bounds():
    control = AdaptiveEntropyController(coefficient=0.002, target=0.3, delta=0.004, min=0.001)
    assert control.update(entropy=9.0).coefficient == 0.001


@pytest.mark.parametrize(
    "moved",
    [
        AdaptiveKLController(kl_coef=0.5, horizon=10).update(kl=9.0, n_steps=5),
        AdaptiveEntropyController(target=0.3).update(entropy=0.1),
        AdaptiveEntropyController(target=0.3),
        FixedKLController(kl_coef=0.3),
    ],
)
def test_state_survives_json_and_restores_the_controller(moved):
    fresh = {
        AdaptiveKLController: AdaptiveKLController(kl_coef=0.5, horizon=10),
        AdaptiveEntropyController: AdaptiveEntropyController(target=0.3),
        FixedKLController: FixedKLController(kl_coef=0.3),
    }[type(moved)]
    assert fresh.restore(json.loads(json.dumps(moved.state()))) == moved


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: AdaptiveKLController(horizon=0), "horizon"),
        (lambda: AdaptiveKLController(target_kl=0.0), "target_kl"),
        (lambda: AdaptiveKLController(kl_coef=-0.1), "kl_coef"),
        (lambda: FixedKLController(kl_coef=-0.1), "kl_coef"),
        (lambda: AdaptiveEntropyController(delta=-0.1), "adaptive_entropy.delta"),
        (lambda: AdaptiveEntropyController(min=2.0), "adaptive_entropy.min"),
        (lambda: AdaptiveKLController().update(kl=float("nan"), n_steps=1), "kl"),
        (lambda: AdaptiveEntropyController().update(entropy=float("inf")), "entropy"),
    ],
)
def test_what_a_controller_cannot_follow_is_refused_by_name(make, field: str):
    with pytest.raises(UserError) as caught:
        make()
    assert caught.value.field == field
