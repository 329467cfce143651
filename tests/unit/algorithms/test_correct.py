"""The whole correction: what it returns, what it never touches, and the presets."""

import math

import pytest
import torch
from torch import Tensor

from luyen.algorithms.advantages import CreditInputs, adv_estimators
from luyen.algorithms.correction.correct import PRESETS, correction_preset, rollout_correction
from luyen.base.errors import UserError
from tests.unit.algorithms.credit_batches import NAN, layout_of, row

LAYOUT = layout_of([row(0, "x.x", [0.0] * 3), row(0, "x", [0.0]), row(2, ".", [0.0])])
# ratios 4 and 1 in the first sequence, 0.25 in the second
OLD = torch.tensor([-1.0, NAN, -2.0, -3.0, NAN], dtype=torch.float64)
ROLLOUT = OLD - torch.tensor([4.0, 1.0, 1.0, 0.25, 1.0], dtype=torch.float64).log()


def test_without_options_weights_are_one_and_everything_is_kept():
    found = rollout_correction(OLD, ROLLOUT, LAYOUT)
    assert found.weights.tolist() == [1.0, 0.0, 1.0, 1.0, 0.0]
    assert torch.equal(found.keep, LAYOUT.mask)
    assert "rollout_corr/kl" in found.metrics
    assert not any("rollout_is" in name or "rollout_rs" in name for name in found.metrics)


def test_weights_and_rejection_are_computed_from_the_same_log_ratio():
    found = rollout_correction(
        OLD, ROLLOUT, LAYOUT, rollout_is="token", rollout_rs="token_k1", rollout_rs_threshold=2.0
    )
    assert found.weights.tolist() == pytest.approx([2.0, 0.0, 1.0, 0.25, 0.0])
    assert found.keep.tolist() == [False, False, True, False, False]
    assert found.metrics["rollout_corr/rollout_is_mean"] == pytest.approx(3.25 / 3)
    assert found.metrics["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(2 / 3)


def test_batch_normalisation_makes_the_mean_weight_one():
    hparams = {"rollout_is": "token", "rollout_is_batch_normalize": True}
    found = rollout_correction(OLD, ROLLOUT, LAYOUT, **hparams)
    factor = 3.25 / 3
    expected = [2.0 / factor, 0.0, 1.0 / factor, 0.25 / factor, 0.0]
    assert found.weights.tolist() == pytest.approx(expected)
    assert found.metrics["rollout_corr/rollout_is_batch_norm_factor"] == pytest.approx(factor)
    # metrics of the weights are those before normalisation
    assert found.metrics["rollout_corr/rollout_is_max"] == pytest.approx(2.0)


def test_batch_normalisation_per_sequence_counts_each_live_sequence_once():
    found = rollout_correction(
        OLD, ROLLOUT, LAYOUT, rollout_is="sequence", rollout_is_batch_normalize=True
    )
    assert found.metrics["rollout_corr/rollout_is_batch_norm_factor"] == pytest.approx(1.125)


def test_batch_normalisation_of_weights_that_are_all_zero_leaves_them():
    found = rollout_correction(
        OLD,
        ROLLOUT,
        LAYOUT,
        rollout_is="token",
        rollout_is_threshold="0.4_0.5",
        rollout_is_batch_normalize=True,
    )
    assert found.weights.tolist() == [0.0] * 5
    assert found.metrics["rollout_corr/rollout_is_batch_norm_factor"] == 1.0


def test_the_floor_reaches_the_weights():
    found = rollout_correction(OLD, ROLLOUT, LAYOUT, rollout_is="token", rollout_is_floor=0.5)
    assert found.weights.tolist() == pytest.approx([2.0, 0.0, 1.0, 0.5, 0.0])


def test_rejection_leaves_the_mask_and_so_every_outcome_and_denominator():
    before = LAYOUT.mask.clone()
    found = rollout_correction(
        OLD, ROLLOUT, LAYOUT, rollout_rs="seq_sum_k1", rollout_rs_threshold="0.9_1.1"
    )
    assert not found.keep.any()
    assert torch.equal(LAYOUT.mask, before)
    rewards = torch.tensor([0.0, 0.0, 1.0, 0.0, 0.0])
    credit = adv_estimators.get("rloo")(CreditInputs(rewards=rewards, layout=LAYOUT))
    assert credit.advantages.tolist() == [1.0, 0.0, 1.0, -1.0, 0.0]


def test_nothing_trainable_gives_nothing():
    layout = layout_of([row(0, "..", [0.0] * 2)])
    x = torch.tensor([NAN, NAN])
    found = rollout_correction(
        x,
        x,
        layout,
        rollout_is="sequence",
        rollout_is_batch_normalize=True,
        rollout_rs="token_k2",
        rollout_rs_threshold=1.0,
    )
    assert found.weights.tolist() == [0.0, 0.0]
    assert found.keep.tolist() == [False, False]


def test_nothing_carries_a_gradient():
    old = torch.tensor([-1.0, -2.0], requires_grad=True)
    layout = layout_of([row(0, "xx", [0.0] * 2)])
    found = rollout_correction(old, torch.tensor([-1.5, -1.5]), layout, rollout_is="token")
    assert not found.weights.requires_grad


@pytest.mark.parametrize("bad", [NAN, -math.inf])
def test_log_probabilities_that_are_not_finite_are_refused_by_name(bad: float):
    spoilt = OLD.clone()
    spoilt[2] = bad
    with pytest.raises(UserError, match=r"^old_logp = .*position \[2\]"):
        rollout_correction(spoilt, ROLLOUT, LAYOUT)
    with pytest.raises(UserError, match=r"^rollout_logp = "):
        rollout_correction(OLD, spoilt, LAYOUT)


def test_log_probabilities_of_another_shape_are_refused_with_both_shapes():
    with pytest.raises(UserError, match=r"old_logp = \(2,\).*mask \(5,\)"):
        rollout_correction(torch.zeros(2), torch.zeros(2), LAYOUT)


PRESET_EFFECT: dict[str, tuple[list[float], str]] = {
    "disabled": ([1.0, 1.0, 1.0], "xxx"),
    "decoupled_token_is": ([2.0, 1.0, 0.25], "xxx"),
    "decoupled_seq_is": ([2.0, 2.0, 0.25], "xxx"),
    "decoupled_token_icepop": ([4.0, 1.0, 0.0], "xxx"),
    "decoupled_seq_is_rs": ([2.0, 2.0, 0.25], "..."),
    "decoupled_geo_rs": ([1.0, 1.0, 1.0], "..."),
    "decoupled_geo_rs_seq_tis": ([2.0, 2.0, 0.25], "..."),
    "decoupled_geo_rs_token_tis": ([2.0, 1.0, 0.25], "..."),
    "decoupled_k3_rs": ([1.0, 1.0, 1.0], "..."),
    "decoupled_k3_rs_seq_tis": ([2.0, 2.0, 0.25], "..."),
    "decoupled_k3_rs_token_tis": ([2.0, 1.0, 0.25], "..."),
    "bypass_ppo_clip": ([1.0, 1.0, 1.0], "xxx"),
    "bypass_ppo_clip_geo_rs": ([1.0, 1.0, 1.0], "..."),
    "bypass_ppo_clip_k3_rs": ([1.0, 1.0, 1.0], "..."),
    "bypass_pg_is": ([2.0, 2.0, 0.25], "xxx"),
    "bypass_pg_token_icepop": ([4.0, 1.0, 0.0], "xxx"),
    "bypass_pg_geo_rs": ([1.0, 1.0, 1.0], "..."),
    "bypass_pg_geo_rs_seq_tis": ([2.0, 2.0, 0.25], "..."),
    "bypass_pg_geo_rs_token_tis": ([2.0, 1.0, 0.25], "..."),
}


def test_every_preset_is_in_the_table_below():
    assert set(PRESET_EFFECT) == set(PRESETS)


def settings(name: str) -> dict[str, object]:
    """The part of a preset that the correction reads."""
    preset = correction_preset(name)
    return {key: value for key, value in preset.items() if key.startswith("rollout_")}


def live(x: Tensor) -> list[float]:
    return x[LAYOUT.mask].tolist()


@pytest.mark.parametrize("name", sorted(PRESET_EFFECT))
def test_a_preset_does_what_its_name_says(name: str):
    weights, kept = PRESET_EFFECT[name]
    found = rollout_correction(OLD, ROLLOUT, LAYOUT, **settings(name))
    assert live(found.weights) == pytest.approx(weights)
    assert "".join("x" if k else "." for k in live(found.keep)) == kept


@pytest.mark.parametrize("name", sorted(PRESET_EFFECT))
def test_a_preset_keeps_two_policies_that_agree(name: str):
    found = rollout_correction(OLD, OLD, LAYOUT, **settings(name))
    assert live(found.weights) == [1.0, 1.0, 1.0]
    assert torch.equal(found.keep, LAYOUT.mask)


@pytest.mark.parametrize("name", sorted(PRESET_EFFECT))
def test_a_bypass_preset_says_which_loss_it_uses(name: str):
    preset = correction_preset(name)
    assert preset["bypass_mode"] is name.startswith("bypass")
    loss = {"bypass_ppo": "ppo_clip", "bypass_pg_": "reinforce"}.get(name[:10])
    assert preset.get("loss_type") == loss


def test_a_preset_cannot_be_changed():
    with pytest.raises(TypeError):
        correction_preset("disabled")["rollout_is"] = "token"  # type: ignore[index]


def test_an_unknown_preset_is_refused_with_a_near_name():
    with pytest.raises(UserError, match=r"decoupled_token_tis.*`decoupled_token_is`"):
        correction_preset("decoupled_token_tis")
