"""Each rejection rule with a case that passes and one that does not."""

import math

import pytest
import torch

from luyen.algorithms.correction.importance import keep_mask, rule_statistic
from luyen.base.errors import UserError
from luyen.config.catalog import REJECTION_CRITERIA, rejection_rules
from tests.unit.algorithms.credit_batches import NAN, layout_of, row

ROWS = [row(0, "x.x", [0.0] * 3), row(1, "xx", [0.0] * 2), row(2, ".", [0.0])]
LAYOUT = layout_of(ROWS)
# two tokens at 0.1 and -0.3; two at 1 and -1; a masked sequence
LOG = torch.tensor([0.1, NAN, -0.3, 1.0, -1.0, NAN], dtype=torch.float64)


def k3(x: float) -> float:
    return math.exp(x) - 1.0 - x


STATISTICS = {
    "token_k1": [-0.1, 0.3, -1.0, 1.0],
    "token_k2": [0.005, 0.045, 0.5, 0.5],
    "token_k3": [k3(0.1), k3(-0.3), k3(1.0), k3(-1.0)],
    "seq_sum_k1": [0.2, 0.0],
    "seq_sum_k2": [0.05, 1.0],
    "seq_sum_k3": [k3(0.1) + k3(-0.3), k3(1.0) + k3(-1.0)],
    "seq_mean_k1": [0.1, 0.0],
    "seq_mean_k2": [0.025, 0.5],
    "seq_mean_k3": [(k3(0.1) + k3(-0.3)) / 2, (k3(1.0) + k3(-1.0)) / 2],
    "seq_max_k2": [0.045, 0.5],
    "seq_max_k3": [k3(-0.3), k3(1.0)],
}


def kept(rollout_rs: str, threshold: object) -> str:
    """The kept tokens as text, masked ones as dots."""
    keep = keep_mask(LOG, LAYOUT, rollout_rs=rollout_rs, rollout_rs_threshold=threshold)
    return "".join("x" if k else "." for k in keep.tolist())


def test_every_option_of_the_catalogue_is_covered_here():
    assert set(STATISTICS) == set(REJECTION_CRITERIA)


@pytest.mark.parametrize("option", REJECTION_CRITERIA)
def test_the_statistic_of_a_rule(option: str):
    (rule,) = rejection_rules(option, 2.0)
    found = rule_statistic(rule, LOG, LAYOUT)
    shown = found[LAYOUT.mask] if rule.per_token else found[LAYOUT.lengths() > 0]
    assert shown.tolist() == pytest.approx(STATISTICS[option], rel=1e-12, abs=1e-15)


@pytest.mark.parametrize("option", [o for o in REJECTION_CRITERIA if not o.endswith("k1")])
def test_an_upper_bound_passes_what_reaches_it_and_rejects_what_exceeds_it(option: str):
    values = STATISTICS[option]
    everything, nothing = 1.001 * max(values), 0.999 * min(values)
    assert kept(option, everything) == "x.xxx."
    assert kept(option, nothing) == "......"


@pytest.mark.parametrize(
    ("option", "between", "expected"),
    [
        ("token_k2", 0.1, "x.x..."),
        ("token_k3", 0.4, "x.x.x."),
        ("seq_sum_k2", 0.5, "x.x..."),
        ("seq_sum_k3", 0.5, "x.x..."),
        ("seq_mean_k2", 0.1, "x.x..."),
        ("seq_mean_k3", 0.1, "x.x..."),
        ("seq_max_k2", 0.1, "x.x..."),
        ("seq_max_k3", 0.1, "x.x..."),
    ],
)
def test_a_bound_between_two_statistics_separates_them(option: str, between: float, expected: str):
    assert kept(option, between) == expected


@pytest.mark.parametrize(
    ("option", "band", "expected"),
    [
        ("token_k1", "0.8_2.0", "x.x..."),
        ("token_k1", "0.95_2.0", "..x..."),
        ("token_k1", "0.2_3.0", "x.xxx."),
        ("seq_sum_k1", "0.9_1.1", "...xx."),
        ("seq_sum_k1", "0.9_1.3", "x.xxx."),
        ("seq_mean_k1", "0.95_1.05", "...xx."),
        ("seq_mean_k1", "0.95_1.2", "x.xxx."),
        ("seq_mean_k1", "1.05_1.2", "x.x..."),
    ],
)
def test_a_band_bounds_the_sampler_over_the_trainer(option: str, band: str, expected: str):
    assert kept(option, band) == expected


def test_a_single_number_for_k1_means_its_inverse_to_itself():
    assert kept("token_k1", 1.2) == kept("token_k1", f"{1 / 1.2}_1.2") == "x....."
    assert kept("token_k1", "2.0") == "x.x..."


def test_every_rule_of_a_list_must_pass():
    assert kept("token_k2", 0.01) == "x....."
    assert kept("token_k1", "0.95_2.0") == "..x..."
    assert kept("token_k1,token_k2", "0.95_2.0,0.01") == "......"
    assert kept("token_k1, seq_sum_k2", "0.95_2.0, 2.0") == "..x..."


def test_one_threshold_serves_every_rule_of_a_list():
    assert kept("token_k2,seq_max_k3", 0.03) == "......"
    assert kept("token_k2,seq_max_k3", "0.045") == "x.x..."


def test_log_ratios_are_cut_at_twenty_before_they_are_measured():
    layout = layout_of([row(0, "x", [0.0])])
    far = torch.tensor([-1e6], dtype=torch.float64)
    (rule,) = rejection_rules("token_k2", 1.0)
    assert rule_statistic(rule, far, layout).tolist() == [200.0]


def test_equal_policies_reject_nothing_under_any_rule():
    for option in REJECTION_CRITERIA:
        keep = keep_mask(torch.zeros(6), LAYOUT, rollout_rs=option, rollout_rs_threshold=1.0 + 1e-6)
        assert torch.equal(keep, LAYOUT.mask)


def test_the_mask_of_the_layout_stays_as_it_was():
    before = LAYOUT.mask.clone()
    assert kept("token_k2", 1e-9) == "......"
    assert torch.equal(LAYOUT.mask, before)


def test_small_k3_keeps_its_digits_in_float32():
    layout = layout_of([row(0, "x", [0.0])])
    (rule,) = rejection_rules("token_k3", 1.0)
    found = float(rule_statistic(rule, torch.tensor([1e-3]), layout))
    assert found == pytest.approx(k3(1e-3), rel=1e-3)


@pytest.mark.parametrize("value", ["", " , "])
def test_an_empty_list_is_refused(value: str):
    with pytest.raises(UserError, match=r"rollout_rs = .*names no option"):
        kept(value, 1.0)


def test_an_unknown_option_is_refused_with_a_near_name():
    with pytest.raises(UserError, match=r"'token_k4'.*`token_k1`"):
        kept("token_k4", 1.0)


def test_an_option_named_twice_is_refused():
    with pytest.raises(UserError, match="named twice"):
        kept("token_k2,token_k2", 1.0)


def test_a_missing_threshold_is_refused():
    with pytest.raises(UserError, match=r"rollout_rs_threshold = None"):
        kept("token_k2", None)


def test_a_list_of_thresholds_of_another_length_is_refused():
    with pytest.raises(UserError, match="lists 2 thresholds for 3 options"):
        kept("token_k2,token_k3,seq_sum_k2", "1.0,2.0")


@pytest.mark.parametrize("value", [True, 0.0, -1.0, NAN, "x", "1_2_3", "2.0_0.5"])
def test_a_threshold_that_is_no_threshold_is_refused(value: object):
    with pytest.raises(UserError, match="rollout_rs_threshold"):
        kept("token_k1", value)


def test_a_band_for_a_rule_that_is_never_negative_is_refused():
    with pytest.raises(UserError, match="seq_mean_k3 is never negative"):
        kept("seq_mean_k3", "0.5_2.0")


def test_a_single_number_below_one_for_k1_is_refused():
    with pytest.raises(UserError, match=r"lower bound 2\.0 is above its upper bound 0\.5"):
        kept("token_k1", 0.5)


def test_a_log_ratio_of_another_shape_is_refused_with_both_shapes():
    with pytest.raises(UserError, match=r"log_ratio = \(2,\).*mask \(6,\)"):
        keep_mask(torch.zeros(2), LAYOUT, rollout_rs="token_k2", rollout_rs_threshold=1.0)
