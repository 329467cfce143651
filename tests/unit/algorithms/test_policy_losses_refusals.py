"""Knobs that no loss can mean are refused by name."""

import math
from typing import Any

import pytest

from luyen.algorithms.policy_losses import policy_losses
from luyen.base.errors import UserError
from tests.unit.algorithms.batches import one_token

BAD: list[tuple[str, str, float]] = [
    ("vanilla", "clip_ratio_c", 1.0),
    ("vanilla", "clip_ratio_c", math.nan),
    ("vanilla", "clip_ratio", -0.1),
    ("vanilla", "clip_ratio_low", -0.1),
    ("vanilla", "clip_ratio_high", math.nan),
    ("vanilla", "ratio_cap", 1.0),
    ("gspo", "clip_ratio", -1.0),
    ("gspo", "ratio_cap", 0.5),
    ("geo_mean", "clip_ratio_high", -0.1),
    ("cispo", "cispo_cap", 0.0),
    ("cispo", "clip_ratio_low", -1.0),
    ("sapo", "tau_pos", 0.0),
    ("sapo", "tau_neg", -1.0),
    ("dro", "dro_beta", 0.0),
    ("vespo", "vespo_lambda_pos", 0.0),
    ("vespo", "vespo_lambda_neg", -2.0),
    ("vespo", "vespo_k_pos", -1.0),
    ("vespo", "vespo_k_neg", -1.0),
    ("dppo_tv", "clip_ratio_c", 1.0),
    ("dppo_kl", "clip_ratio_c", 0.0),
    ("dppo_kl", "clip_ratio_low", -0.1),
    ("kl_cov", "ppo_kl_coef", -0.1),
    ("clip_cov", "clip_ratio", -0.1),
]


@pytest.mark.parametrize(("name", "hparam", "value"), BAD)
def test_an_impossible_knob_is_refused_by_name(name: str, hparam: str, value: float):
    with pytest.raises(UserError) as caught:
        policy_losses.get(name)(one_token(-1.0, -1.0, 1.0), **{hparam: value})
    assert caught.value.field == hparam
    assert caught.value.value is value
    assert f"set {hparam}" in caught.value.fix


def test_a_clip_range_wider_than_one_is_allowed():
    wide: dict[str, Any] = {"clip_ratio_low": 10.0, "clip_ratio_high": 10.0}
    loss = policy_losses.get("cispo")(one_token(-1.0, 1.0, 1.0), **wide)
    assert loss.per_token.item() == pytest.approx(math.exp(-2.0))


def test_dro_names_its_missing_strength():
    with pytest.raises(UserError, match="dro_beta = None: loss `dro` has no default strength"):
        policy_losses.get("dro")(one_token(-1.0, -1.0, 1.0))


def test_an_unknown_loss_is_refused_with_near_names():
    with pytest.raises(UserError, match="did you mean `gspo`"):
        policy_losses.get("gsppo")
