"""Facts about single losses, with numbers worked out by hand."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from luyen.algorithms.aggregation import aggregation_weights
from luyen.algorithms.policy_losses import PolicyInputs, policy_losses
from tests.unit.algorithms.batches import f64, layout_of, metrics_of, one_token

LOG2 = math.log(2.0)


def token_loss(name: str, inputs: PolicyInputs, **hparams: Any) -> float:
    return policy_losses.get(name)(inputs, **hparams).per_token.item()


@pytest.mark.parametrize(
    ("advantage", "ratio", "expected"),
    [
        (1.0, 1.1, -1.1),
        (1.0, 2.0, -1.2),
        (1.0, 0.5, -0.5),
        (-1.0, 0.5, 0.8),
        (-1.0, 2.0, 2.0),
        (-1.0, 5.0, 3.0),
        (0.0, 5.0, 0.0),
    ],
)
def test_vanilla_by_hand(advantage: float, ratio: float, expected: float):
    inputs = one_token(-1.0, -1.0 - math.log(ratio), advantage)
    assert token_loss("vanilla", inputs) == pytest.approx(expected, rel=1e-12)


def test_ratio_cap_bounds_the_push_of_a_negative_advantage():
    inputs = one_token(-1.0, -1.0 - math.log(2.5), -1.0)
    assert token_loss("vanilla", inputs) == pytest.approx(2.5)
    assert token_loss("vanilla", inputs, ratio_cap=2.0) == pytest.approx(2.0)
    assert token_loss("gspo", inputs, ratio_cap=2.0) == pytest.approx(2.0)


def test_log_ratios_are_clamped_to_20_and_sequence_ratios_to_10():
    inputs = one_token(-1.0, -41.0, -1.0)
    assert token_loss("sapo", inputs) == pytest.approx(4 / 1.05)
    assert token_loss("vanilla", inputs, clip_ratio_c=1e12) == pytest.approx(math.exp(20))
    assert token_loss("gspo", inputs) == pytest.approx(math.exp(10))
    assert token_loss("kl_cov", with_choice(inputs, False)) == pytest.approx(math.exp(40))


def with_choice(inputs: PolicyInputs, *chosen: bool) -> PolicyInputs:
    return replace(inputs, statistics={"selected": torch.tensor(chosen)})


def test_one_side_of_the_clip_range_falls_back_to_clip_ratio():
    inputs = one_token(-1.0, -1.0 - LOG2, 1.0)
    assert token_loss("vanilla", inputs, clip_ratio=0.3, clip_ratio_low=0.1) == pytest.approx(-1.3)
    assert token_loss("vanilla", inputs, clip_ratio=0.3, clip_ratio_high=0.5) == pytest.approx(-1.5)


def test_gspo_equals_the_paper_in_value_and_gradient_when_the_advantage_is_constant():
    layout = layout_of(3)
    logp = f64(-0.5, -1.0, -2.0).requires_grad_()
    old = f64(-0.6, -0.9, -2.1)
    inputs = PolicyInputs(logp=logp, old_logp=old, advantages=f64(0.7, 0.7, 0.7), layout=layout)
    weights = aggregation_weights("seq-mean-token-mean", layout, dtype=torch.float64)
    ours = (weights * policy_losses.get("gspo")(inputs).per_token).sum()
    paper = -0.7 * (logp - old).mean().exp()
    (g1,) = torch.autograd.grad(ours, [logp])
    (g2,) = torch.autograd.grad(paper, [logp])
    assert ours.item() == pytest.approx(paper.item(), rel=1e-14)
    torch.testing.assert_close(g1, g2, rtol=1e-13, atol=0.0)


def test_gspo_and_gspo_token_are_one_function():
    assert policy_losses.get("gspo") is policy_losses.get("gspo_token")


def test_geo_mean_with_its_own_aggregation_is_the_mean_over_sequences():
    layout = layout_of(2, 3)
    inputs = PolicyInputs(
        logp=f64(0.1, -0.1, 0.0, 0.9, 0.0),
        old_logp=torch.zeros(5, dtype=torch.float64),
        advantages=f64(1.0, 1.0, -2.0, -2.0, -2.0),
        layout=layout,
    )
    per_token = policy_losses.get("geo_mean")(inputs).per_token
    weights = aggregation_weights("seq-mean-token-mean", layout, dtype=torch.float64)
    # first: -1·e^0; second: 2·e^(0.9/3), unclipped since A < 0 is clipped from below only
    assert (weights * per_token).sum().item() == pytest.approx((-1.0 + 2.0 * math.exp(0.3)) / 2)


def test_cispo_keeps_a_gradient_on_clipped_tokens():
    logp = f64(-1.0).requires_grad_()
    inputs = replace(one_token(-1.0, -1.0 - LOG2, 1.0), logp=logp)
    (grad,) = torch.autograd.grad(policy_losses.get("cispo")(inputs).per_token.sum(), [logp])
    assert grad.item() == pytest.approx(-1.2)
    assert token_loss("cispo", inputs, cispo_cap=5.0) == pytest.approx(2.0)
    assert token_loss("cispo", inputs, cispo_cap=0.5) == pytest.approx(0.5)


def test_sapo_has_the_gradient_of_reinforce_on_policy():
    logp = f64(-1.0).requires_grad_()
    for advantage in (2.0, -2.0):
        inputs = replace(one_token(-1.0, -1.0, advantage), logp=logp)
        (grad,) = torch.autograd.grad(policy_losses.get("sapo")(inputs).per_token.sum(), [logp])
        assert grad.item() == pytest.approx(-advantage)


def test_vespo_weighs_an_on_policy_sequence_by_one_and_drops_runaway_ones():
    assert token_loss("vespo", one_token(-1.0, -1.0, 1.0)) == pytest.approx(1.0)
    # w = 2: 2^2·e^(3 - 6) for A >= 0, 2^3·e^(2 - 4) for A < 0
    assert token_loss("vespo", one_token(-1.0, -1.0 - LOG2, 1.0)) == pytest.approx(4 * math.exp(-3))
    assert token_loss("vespo", one_token(-1.0, -1.0 - LOG2, -1.0)) == pytest.approx(
        -8 * math.exp(-2)
    )
    assert token_loss("vespo", one_token(-1.0, -500.0, 1.0)) == 0.0


def test_vespo_takes_correction_weights_into_its_exponent_and_survives_a_zero():
    inputs = replace(one_token(-1.0, -1.0, 1.0), is_weights=f64(2.0))
    assert token_loss("vespo", inputs) == pytest.approx(4 * math.exp(-3))
    zero = replace(inputs, is_weights=f64(0.0))
    assert token_loss("vespo", zero) == pytest.approx(1e-16 * math.exp(3 - 3e-8))


def test_dppo_tv_stops_a_token_that_moved_too_far_and_lets_it_come_back():
    up = one_token(math.log(0.8), math.log(0.5), 1.0)
    assert token_loss("dppo_tv", up, clip_ratio=0.2) == 0.0
    assert token_loss("dppo_tv", up, clip_ratio=0.4) == pytest.approx(-1.6 * math.log(0.8))
    assert token_loss("dppo_tv", replace(up, advantages=f64(-1.0))) == pytest.approx(
        1.6 * math.log(0.8)
    )


def test_dppo_truncates_the_ratio_at_20_by_default():
    rare = one_token(math.log(0.1), math.log(0.001), 1.0)
    assert token_loss("dppo_tv", rare) == pytest.approx(-20.0 * math.log(0.1))
    assert token_loss("dppo_tv", rare, clip_ratio_c=3.0) == pytest.approx(-3.0 * math.log(0.1))


def test_dppo_kl_by_hand():
    up = one_token(math.log(0.8), math.log(0.5), 1.0)
    divergence = 0.5 * math.log(0.5 / 0.8) + 0.5 * math.log(0.5 / 0.2)  # 0.2231
    assert token_loss("dppo_kl", up, clip_ratio=divergence - 0.01) == 0.0
    assert token_loss("dppo_kl", up, clip_ratio=divergence + 0.01) == pytest.approx(
        -1.6 * math.log(0.8)
    )


def test_a_log_probability_rounded_above_zero_does_not_break_dppo_kl():
    assert math.isfinite(token_loss("dppo_kl", one_token(1e-6, 1e-7, 1.0)))


def test_metrics_by_hand():
    inputs = PolicyInputs(
        logp=f64(-1.0, -1.0, -1.0, 9.0),
        old_logp=f64(-1.0, -1.0 - LOG2, -1.0 - math.log(4.0), 0.0),
        advantages=f64(1.0, 1.0, -1.0, 5.0),
        layout=layout_of(2, 2, mask=[True, True, True, False]),
    )
    got = metrics_of(policy_losses.get("vanilla")(inputs))
    assert got["actor/ppo_kl"] == pytest.approx(-LOG2)
    assert got["actor/pg_clipfrac"] == pytest.approx(1 / 3)
    assert got["actor/pg_clipfrac_lower"] == pytest.approx(1 / 3)
    cispo = metrics_of(policy_losses.get("cispo")(inputs))
    assert cispo["actor/cispo_clipfrac"] == pytest.approx(2 / 3)
    geo = metrics_of(policy_losses.get("geo_mean")(inputs))
    assert geo["actor/pg_clipfrac"] == pytest.approx(1 / 3)
    assert geo["actor/pg_clipfrac_lower"] == 0.0
    dro = metrics_of(policy_losses.get("dro")(inputs, dro_beta=2.0))
    assert dro["actor/dro_penalty"] == pytest.approx((LOG2**2 + math.log(4.0) ** 2) / 3)
    assert metrics_of(policy_losses.get("reinforce")(inputs)) == {
        "actor/ppo_kl": pytest.approx(-LOG2)
    }
    assert metrics_of(policy_losses.get("gpg")(inputs)) == {}
    assert metrics_of(policy_losses.get("gspo")(inputs))["actor/pg_clipfrac"] == pytest.approx(
        2 / 3
    )


def test_loss_specific_metrics_by_hand():
    inputs = PolicyInputs(
        logp=f64(math.log(0.8), math.log(0.1)),
        old_logp=f64(math.log(0.5), math.log(0.001)),
        advantages=f64(1.0, 1.0),
        layout=layout_of(1, 1),
    )
    got = metrics_of(policy_losses.get("dppo_tv")(inputs))
    assert got["actor/dppo_masked_fraction"] == pytest.approx(0.5)
    assert got["actor/dppo_truncated_fraction"] == pytest.approx(0.5)
    twins = replace(inputs, old_logp=inputs.logp - f64(0.0, LOG2))
    phi = metrics_of(policy_losses.get("vespo")(twins))["actor/vespo_phi_mean"]
    assert phi == pytest.approx((1 + 4 * math.exp(-3)) / 2)
    chosen = with_choice(inputs, True, False)
    for name in ("clip_cov", "kl_cov"):
        share = metrics_of(policy_losses.get(name)(chosen))[f"actor/{name}_selected_fraction"]
        assert share == pytest.approx(0.5)


def test_metrics_of_parts_merge_to_the_metrics_of_the_whole():
    inputs = PolicyInputs(
        logp=f64(-1.0, -2.0, -0.5),
        old_logp=f64(-1.5, -1.0, -0.4),
        advantages=f64(1.0, -1.0, 2.0),
        layout=layout_of(1, 2),
    )
    parts = [
        PolicyInputs(
            logp=inputs.logp[s],
            old_logp=inputs.old_logp[s],
            advantages=inputs.advantages[s],
            layout=layout_of(s.stop - s.start),
        )
        for s in (slice(0, 1), slice(1, 3))
    ]
    first, second = (policy_losses.get("vanilla")(part).metrics for part in parts)
    merged = {name: first[name].merge(second[name]).value() for name in first}
    assert merged == pytest.approx(metrics_of(policy_losses.get("vanilla")(inputs)))


@pytest.mark.parametrize("name", sorted(policy_losses))
def test_a_part_without_sequences_has_an_empty_loss(name: str):
    nothing = PolicyInputs(
        logp=f64(),
        old_logp=f64(),
        advantages=f64(),
        rollout_logp=f64(),
        layout=layout_of(),
        statistics={"selected": torch.zeros(0, dtype=torch.bool)},
    )
    hparams = {"dro_beta": 1.0} if name == "dro" else {}
    assert policy_losses.get(name)(nothing, **hparams).per_token.tolist() == []
