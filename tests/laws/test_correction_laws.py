"""Laws of the rollout correction over ragged batches with gaps and dead sequences."""

import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from luyen.algorithms.correction.correct import Correction, rollout_correction
from luyen.algorithms.correction.importance import keep_mask
from luyen.algorithms.layout import Layout
from luyen.config.catalog import REJECTION_CRITERIA
from tests.unit.algorithms.credit_batches import Row, batches, layout_of, per_row

few = settings(max_examples=25, deadline=None)
LEVELS = ("token", "sequence", "geometric")
THRESHOLDS = st.one_of(st.floats(1.0, 4.0), st.just("0.5_1.5"), st.just("0.9_3.0"))


def streams(rows: list[Row], *, spoil: float | None = None) -> tuple[Tensor, Tensor, Layout]:
    """Trainer's and sampler's log-probabilities from streams of the rows."""
    layout = layout_of(rows)
    old = torch.tensor([x for r in rows for x in r.old_logp], dtype=torch.float64)
    gap = torch.tensor([x for r in rows for x in r.values], dtype=torch.float64)
    if spoil is not None:
        old = torch.where(layout.mask, old, spoil)
    return old, old - 0.4 * gap, layout


def corrected(rows: list[Row], **hparams: object) -> Correction:
    return rollout_correction(*streams(rows), **hparams)


@given(rows=batches(), level=st.sampled_from(LEVELS), option=st.sampled_from(REJECTION_CRITERIA))
@few
def test_policies_that_agree_are_left_alone(rows: list[Row], level: str, option: str):
    old, _, layout = streams(rows)
    found = rollout_correction(
        old, old, layout, rollout_is=level, rollout_rs=option, rollout_rs_threshold=1.01
    )
    assert torch.equal(found.weights, layout.mask.double())
    assert torch.equal(found.keep, layout.mask)


@given(rows=batches(), level=st.sampled_from(LEVELS), cap=st.floats(1.0, 4.0))
@few
def test_weights_are_the_formula_in_plain_floats(rows: list[Row], level: str, cap: float):
    found = per_row(corrected(rows, rollout_is=level, rollout_is_threshold=cap).weights, rows)
    for got, row in zip(found, rows, strict=True):
        logs = [0.4 * v for v, m in zip(row.values, row.mask, strict=True) if m]
        for t, trains in enumerate(row.mask):
            log = 0.4 * row.values[t]
            if level == "sequence":
                log = sum(logs)
            elif level == "geometric" and logs:
                log = sum(logs) / len(logs)
            expected = min(math.exp(min(max(log, -20.0), 20.0)), cap) if trains else 0.0
            assert got[t] == pytest.approx(expected, rel=1e-9)


@given(rows=batches(), level=st.sampled_from(LEVELS), threshold=THRESHOLDS)
@few
def test_what_stands_on_masked_positions_changes_nothing(rows: list[Row], level: str, threshold):
    hparams = {
        "rollout_is": level,
        "rollout_is_threshold": threshold,
        "rollout_is_batch_normalize": True,
        "rollout_rs": ",".join(REJECTION_CRITERIA),
        "rollout_rs_threshold": 1.2,
    }
    a = rollout_correction(*streams(rows, spoil=0.0), **hparams)
    b = rollout_correction(*streams(rows, spoil=math.nan), **hparams)
    assert torch.equal(a.weights, b.weights)
    assert torch.equal(a.keep, b.keep)
    assert a.metrics == b.metrics
    assert all(math.isfinite(x) for x in a.metrics.values())


@given(rows=batches(), level=st.sampled_from(LEVELS), threshold=THRESHOLDS)
@few
def test_normalised_weights_average_to_one(rows: list[Row], level: str, threshold):
    found = corrected(
        rows, rollout_is=level, rollout_is_threshold=threshold, rollout_is_batch_normalize=True
    )
    layout = layout_of(rows)
    assume(bool((found.weights > 0).any()))
    alive = layout.lengths() > 0
    units = found.weights[layout.mask] if level == "token" else layout.mean(found.weights)[alive]
    assert float(units.mean()) == pytest.approx(1.0)


@given(rows=batches(), level=st.sampled_from(LEVELS), random=st.randoms(use_true_random=False))
@few
def test_the_order_of_sequences_does_not_matter(rows: list[Row], level: str, random):
    mixed = list(rows)
    random.shuffle(mixed)
    hparams = {
        "rollout_is": level,
        "rollout_rs": "seq_mean_k3,token_k1",
        "rollout_rs_threshold": 1.1,
    }
    a, b = corrected(rows, **hparams), corrected(mixed, **hparams)
    assert a.metrics == pytest.approx(b.metrics, rel=1e-9, abs=1e-9)
    for name in ("weights", "keep"):
        mine = {id(r): x for r, x in zip(rows, per_row(getattr(a, name), rows), strict=True)}
        for row, values in zip(mixed, per_row(getattr(b, name), mixed), strict=True):
            assert values == pytest.approx(mine[id(row)])


@pytest.mark.parametrize("option", REJECTION_CRITERIA)
@given(rows=batches(), low=st.floats(1.01, 2.0), more=st.floats(0.0, 2.0))
@few
def test_a_wider_bound_keeps_at_least_as_much(
    option: str, rows: list[Row], low: float, more: float
):
    old, rollout, layout = streams(rows)
    narrow, wide = (
        keep_mask(old - rollout, layout, rollout_rs=option, rollout_rs_threshold=t)
        for t in (low, low + more)
    )
    assert not (narrow & ~wide).any()
    assert not (wide & ~layout.mask).any()


@given(
    rows=batches(), options=st.lists(st.sampled_from(REJECTION_CRITERIA), min_size=1, unique=True)
)
@few
def test_a_list_of_rules_keeps_what_each_of_them_keeps(rows: list[Row], options: list[str]):
    old, rollout, layout = streams(rows)
    together = keep_mask(
        old - rollout, layout, rollout_rs=",".join(options), rollout_rs_threshold=1.3
    )
    each = layout.mask
    for option in options:
        each = each & keep_mask(old - rollout, layout, rollout_rs=option, rollout_rs_threshold=1.3)
    assert torch.equal(together, each)


@pytest.mark.parametrize("option", ["token_k1", "seq_sum_k1", "seq_mean_k1"])
@given(rows=batches(), low=st.floats(0.3, 0.97), high=st.floats(1.03, 3.0))
@few
def test_a_band_acts_on_the_inverse_of_the_ratio(
    option: str, rows: list[Row], low: float, high: float
):
    old, rollout, layout = streams(rows)
    here = keep_mask(
        old - rollout, layout, rollout_rs=option, rollout_rs_threshold=f"{low!r}_{high!r}"
    )
    mirror = keep_mask(
        rollout - old, layout, rollout_rs=option, rollout_rs_threshold=f"{1 / high!r}_{1 / low!r}"
    )
    assert torch.equal(here, mirror)


@given(rows=batches(live=True), level=st.sampled_from(LEVELS), threshold=THRESHOLDS)
@few
def test_the_effective_sample_is_a_fraction(rows: list[Row], level: str, threshold):
    metrics = corrected(rows, rollout_is=level, rollout_is_threshold=threshold).metrics
    assert 0.0 <= metrics["rollout_corr/rollout_is_eff_sample_size"] <= 1.0 + 1e-12
    assert metrics["rollout_corr/k3_kl"] >= 0.0
