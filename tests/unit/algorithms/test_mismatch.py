"""Metrics of the gap between trainer and sampler, worked out by hand."""

import math
import statistics

import pytest
import torch
from torch import Tensor

from luyen.algorithms.correction.importance import importance_weights, kept_by_all, read_limits
from luyen.algorithms.correction.metrics import (
    importance_metrics,
    mismatch_metrics,
    rejection_metrics,
)
from luyen.config.catalog import rejection_rules
from tests.unit.algorithms.credit_batches import NAN, layout_of, row

LAYOUT = layout_of([row(0, "x.x", [0.0] * 3), row(1, "x", [0.0]), row(2, ".", [0.0])])
# trainer: probabilities 1/2, 1/4 | 1/2; sampler: 1/4, 1/4 | 1; the last sequence is masked
TRAINER = torch.tensor([0.5, NAN, 0.25, 0.5, NAN], dtype=torch.float64).log()
SAMPLER = torch.tensor([0.25, 7.0, 0.25, 1.0, 7.0], dtype=torch.float64).log()
LN2 = math.log(2.0)


def gap(**expected: float) -> None:
    found = mismatch_metrics(TRAINER, SAMPLER, LAYOUT)
    for name, value in expected.items():
        assert found[f"rollout_corr/{name}"] == pytest.approx(value, rel=1e-12, abs=1e-15), name


def test_perplexities_are_means_over_live_sequences():
    # sequence log-perplexities: trainer 1.5 ln2 and ln2, sampler 2 ln2 and 0
    gap(
        training_log_ppl=1.25 * LN2,
        training_ppl=(2**1.5 + 2.0) / 2,
        rollout_log_ppl=LN2,
        rollout_ppl=(4.0 + 1.0) / 2,
    )


def test_differences_of_perplexity_are_trainer_minus_sampler():
    # -ln2 / 2 and +ln2
    gap(
        log_ppl_diff=0.25 * LN2,
        log_ppl_abs_diff=0.75 * LN2,
        log_ppl_diff_max=LN2,
        log_ppl_diff_min=-0.5 * LN2,
        ppl_ratio=(2**-0.5 + 2.0) / 2,
    )


def test_divergences_come_from_the_log_ratios():
    # token log-ratios ln2, 0, -ln2; sequence log-ratios ln2 and -ln2
    gap(
        kl=0.0,
        k3_kl=((2 - 1 - LN2) + 0.0 + (0.5 - 1 + LN2)) / 3,
        chi2_token=(4 + 1 + 0.25) / 3 - 1,
        chi2_seq=(4 + 0.25) / 2 - 1,
    )


def test_kl_is_positive_when_the_sampler_is_the_surer_one():
    found = mismatch_metrics(TRAINER - 0.5, TRAINER, LAYOUT)
    assert found["rollout_corr/kl"] == pytest.approx(0.5)


def test_probability_differences_and_their_correlation():
    found = mismatch_metrics(TRAINER, SAMPLER, LAYOUT)
    diffs = [0.25, 0.0, 0.5]
    assert found["training/rollout_probs_diff_mean"] == pytest.approx(0.25)
    assert found["training/rollout_probs_diff_max"] == pytest.approx(0.5)
    assert found["training/rollout_probs_diff_std"] == pytest.approx(statistics.stdev(diffs))
    expected = statistics.correlation([0.5, 0.25, 0.5], [0.25, 0.25, 1.0])
    assert found["training/rollout_actor_probs_pearson_corr"] == pytest.approx(expected)


def test_every_metric_is_zero_or_one_when_the_policies_agree():
    found = mismatch_metrics(TRAINER, TRAINER, LAYOUT)
    assert found["rollout_corr/ppl_ratio"] == 1.0
    assert found["training/rollout_actor_probs_pearson_corr"] == pytest.approx(1.0)
    for name in ("kl", "k3_kl", "chi2_token", "chi2_seq", "log_ppl_abs_diff"):
        assert found[f"rollout_corr/{name}"] == 0.0


def test_one_token_has_no_spread_and_a_correlation_that_says_equal_or_not():
    layout = layout_of([row(0, "x", [0.0])])
    one, other = torch.tensor([-1.0]), torch.tensor([-2.0])
    same, apart = mismatch_metrics(one, one, layout), mismatch_metrics(one, other, layout)
    assert same["training/rollout_probs_diff_std"] == 0.0
    assert same["training/rollout_actor_probs_pearson_corr"] == 1.0
    assert apart["training/rollout_actor_probs_pearson_corr"] == 0.0
    assert all(math.isfinite(x) for x in apart.values())


def test_far_apart_policies_give_finite_metrics():
    layout = layout_of([row(0, "xx", [0.0] * 2)])
    found = mismatch_metrics(torch.tensor([-90.0, -1.0]), torch.tensor([-1.0, -90.0]), layout)
    assert all(math.isfinite(x) for x in found.values())
    assert found["rollout_corr/chi2_token"] == pytest.approx((math.exp(40) + math.exp(-40)) / 2 - 1)


def test_nothing_trainable_reports_nothing():
    layout = layout_of([row(0, "..", [0.0] * 2)])
    x = torch.tensor([NAN, NAN])
    assert mismatch_metrics(x, x, layout) == {}
    assert weight_metrics(x, layout, "token", 2.0) == {}
    rules = rejection_rules("token_k2", 1.0)
    assert rejection_metrics(rules, layout.mask, x, layout) == {}


def weight_metrics(
    log_ratio: Tensor, layout, level: str, threshold: float | str, floor: float | None = None
) -> dict[str, float]:
    weights = importance_weights(
        log_ratio,
        layout,
        rollout_is=level,
        rollout_is_threshold=threshold,
        rollout_is_floor=floor,
    )
    limits = read_limits(threshold, floor)
    return importance_metrics(weights, log_ratio, layout, rollout_is=level, limits=limits)


# ratios 4 and 1 in the first sequence, 0.25 in the second
RATIOS = torch.tensor([4.0, NAN, 1.0, 0.25, NAN], dtype=torch.float64).log()


def expect(found: dict[str, float], prefix: str, **expected: float) -> None:
    for name, value in expected.items():
        assert found[f"{prefix}_{name}"] == pytest.approx(value, rel=1e-12, abs=1e-15), name


def test_token_weights_are_summarised_as_applied():
    # applied 2, 1, 0.25; sequences 1.5 and 0.25; raw sequence means 2.5 and 0.25
    found = weight_metrics(RATIOS, LAYOUT, "token", 2.0)
    expect(
        found,
        "rollout_corr/rollout_is",
        mean=3.25 / 3,
        max=2.0,
        min=0.25,
        std=statistics.pstdev([2.0, 1.0, 0.25]),
        eff_sample_size=(3.25 / 3) ** 2 / (5.0625 / 3),
        ratio_fraction_high=1 / 3,
        ratio_fraction_low=1 / 3,
        seq_mean=0.875,
        seq_std=statistics.stdev([1.5, 0.25]),
        seq_max=1.5,
        seq_min=0.25,
        seq_max_deviation=0.75,
        seq_fraction_high=0.5,
        seq_fraction_low=0.5,
    )
    assert "rollout_corr/rollout_is_oob_ratio" not in found


def test_sequence_weights_show_their_raw_extremes():
    found = weight_metrics(RATIOS, LAYOUT, "sequence", 2.0)
    expect(
        found,
        "rollout_corr/rollout_is",
        mean=(2 + 2 + 0.25) / 3,
        max=4.0,
        min=0.25,
        ratio_fraction_high=0.5,
        ratio_fraction_low=0.5,
        seq_mean=1.125,
    )


def test_a_band_reports_the_share_outside_it():
    found = weight_metrics(RATIOS, LAYOUT, "token", "0.5_2.0")
    expect(found, "rollout_corr/rollout_is", oob_ratio=2 / 3, mean=1 / 3, eff_sample_size=1 / 3)


def test_no_weight_left_is_an_effective_sample_of_nothing():
    found = weight_metrics(RATIOS, LAYOUT, "token", "0.4_0.5")
    expect(found, "rollout_corr/rollout_is", oob_ratio=1.0, mean=0.0, eff_sample_size=0.0)


def test_a_floor_moves_the_bound_of_what_counts_as_low():
    found = weight_metrics(RATIOS, LAYOUT, "token", 5.0, 0.25)
    expect(found, "rollout_corr/rollout_is", ratio_fraction_low=0.0, ratio_fraction_high=0.0)


def test_one_token_has_a_std_of_zero():
    layout = layout_of([row(0, "x", [0.0])])
    found = weight_metrics(torch.tensor([0.5]), layout, "token", 2.0)
    expect(found, "rollout_corr/rollout_is", std=0.0, seq_std=0.0, eff_sample_size=1.0)


def rejected(rollout_rs: str, threshold: float | str) -> dict[str, float]:
    rules = rejection_rules(rollout_rs, threshold)
    return rejection_metrics(rules, kept_by_all(rules, RATIOS, LAYOUT), RATIOS, LAYOUT)


def test_a_token_rule_is_summarised_over_tokens():
    # k1: -ln4, 0, ln4; bounds ±ln2
    found = rejected("token_k1", 2.0)
    expect(
        found,
        "rollout_corr/rollout_rs_token_k1",
        mean=0.0,
        max=2 * LN2,
        min=-2 * LN2,
        std=statistics.pstdev([-LN2, 0.0, LN2]),
        fraction_high=1 / 3,
        fraction_low=1 / 3,
        seq_mean=(-LN2 + 2 * LN2) / 2,
        seq_std=statistics.stdev([-LN2, 2 * LN2]),
        seq_max=2 * LN2,
        seq_min=-LN2,
        seq_max_deviation=2 * LN2,
        seq_fraction_high=0.5,
        seq_fraction_low=0.0,
        masked_fraction=2 / 3,
        seq_masked_fraction=1.0,
    )


def test_a_sequence_rule_is_summarised_over_sequences():
    # k2 of each token: 2 ln2², 0, 2 ln2²; sums equal, means differ
    square = 2 * LN2 * LN2
    found = rejected("seq_mean_k2", 0.6)
    expect(
        found,
        "rollout_corr/rollout_rs_seq_mean_k2",
        mean=(square / 2 + square / 2 + square) / 3,
        max=square,
        min=square / 2,
        std=statistics.pstdev([square / 2, square / 2, 0.6]),
        fraction_high=0.5,
        fraction_low=0.0,
        seq_mean=0.75 * square,
        seq_fraction_high=0.5,
        seq_fraction_low=0.0,
        masked_fraction=1 / 3,
        seq_masked_fraction=0.5,
    )


def test_the_whole_list_reports_what_all_rules_took_together():
    found = rejected("token_k1,seq_mean_k2", "2.0,10.0")
    expect(found, "rollout_corr/rollout_rs", masked_fraction=2 / 3, seq_masked_fraction=1.0)
    expect(found, "rollout_corr/rollout_rs_seq_mean_k2", masked_fraction=0.0)
