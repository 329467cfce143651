"""The gap between sampler and trainer is the sum of its parts, and each part is 0 where it must be.

Streams are drawn in float64, so that a sum that is off by more than rounding shows.
"""

import math

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from luyen.algorithms.parity import PARTS, GapInputs, part_metrics, split_gap

COUNT = st.integers(1, 12)
TINY = 1e-12


@st.composite
def steps(draw: st.DrawFn) -> GapInputs:
    """Any step: tokens old and new, drifted or not, with or without what may be unknown."""
    count = draw(COUNT)
    logps = st.floats(-30.0, 0.0)

    def stream(values: st.SearchStrategy[float]) -> Tensor:
        found = draw(st.lists(values, min_size=count, max_size=count))
        return torch.tensor(found, dtype=torch.float64)

    def flags() -> Tensor:
        return torch.tensor(draw(st.lists(st.booleans(), min_size=count, max_size=count)))

    return GapInputs(
        logp=stream(logps),
        rollout_logp=stream(logps),
        is_stale=flags(),
        is_drifted=flags() if draw(st.booleans()) else None,
        sampled_logp=stream(logps) if draw(st.booleans()) else None,
        log_kept=stream(st.floats(-5.0, 0.0)) if draw(st.booleans()) else None,
    )


@given(inputs=steps())
def test_the_parts_of_a_token_add_up_to_its_gap(inputs: GapInputs):
    parts = split_gap(inputs)
    drawn_with = inputs.rollout_logp - (0.0 if inputs.log_kept is None else inputs.log_kept)
    assert torch.allclose(parts.total, inputs.logp - drawn_with, atol=TINY, rtol=0.0)
    assert set(parts.values) == set(parts.measured) == set(PARTS)


@given(inputs=steps())
def test_a_part_is_zero_where_it_has_no_cause(inputs: GapInputs):
    parts = split_gap(inputs)
    drifted = torch.zeros_like(inputs.is_stale) if inputs.is_drifted is None else inputs.is_drifted
    assert not parts.values["staleness"][~inputs.is_stale].any()
    assert not parts.values["drift"][~drifted].any()
    assert not parts.values["engine"][drifted].any()
    if inputs.log_kept is None:
        assert not parts.values["transform"].any()
        assert not parts.measured["transform"].any()


@given(inputs=steps())
def test_where_sampling_weights_were_scored_again_the_split_is_exact(inputs: GapInputs):
    parts = split_gap(inputs)
    if inputs.sampled_logp is None:
        return
    stale = inputs.is_stale
    moved = (inputs.logp - inputs.sampled_logp)[stale]
    assert torch.allclose(parts.values["staleness"][stale], moved, atol=TINY, rtol=0.0)
    same = parts.values["engine"] + parts.values["drift"]
    coded = (inputs.sampled_logp - inputs.rollout_logp)[stale]
    assert torch.allclose(same[stale], coded, atol=TINY, rtol=0.0)


@given(inputs=steps())
def test_metrics_are_those_of_the_tokens_that_were_measured(inputs: GapInputs):
    parts = split_gap(inputs)
    found = part_metrics(parts)
    shares = [found.get(f"parity/{name}_share", 0.0) for name in PARTS]
    assert sum(shares) <= 1.0 + TINY
    for name in PARTS:
        tokens = parts.values[name][parts.measured[name]]
        assert (f"parity/{name}_max" in found) == (len(tokens) > 0)
        if len(tokens):
            assert found[f"parity/{name}_max"] == float(tokens.abs().max())
            assert math.isclose(found[f"parity/{name}_mean"], float(tokens.abs().mean()))
            assert found[f"parity/{name}_kl"] >= -TINY
            assert found[f"parity/{name}_exact_fraction"] == float((tokens == 0).double().mean())


def test_equal_streams_have_no_gap_and_no_division_by_it():
    same = torch.tensor([-0.5, -2.0], dtype=torch.float64)
    fresh = torch.zeros(2, dtype=torch.bool)
    found = part_metrics(split_gap(GapInputs(logp=same, rollout_logp=same, is_stale=fresh)))
    assert found == {
        "parity/engine_max": 0.0,
        "parity/engine_mean": 0.0,
        "parity/engine_exact_fraction": 1.0,
        "parity/engine_kl": 0.0,
        "parity/engine_share": 0.0,
    }


def test_the_mean_of_fresh_tokens_stands_for_the_engine_on_stale_ones():
    parts = split_gap(
        GapInputs(
            logp=torch.tensor([-1.0, -1.0, -1.0], dtype=torch.float64),
            rollout_logp=torch.tensor([-1.1, -1.3, -3.0], dtype=torch.float64),
            is_stale=torch.tensor([False, False, True]),
        )
    )
    assert torch.allclose(parts.values["engine"], torch.tensor([0.1, 0.3, 0.2]).double())
    assert torch.allclose(parts.values["staleness"], torch.tensor([0.0, 0.0, 1.8]).double())
    assert parts.measured["engine"].tolist() == [True, True, False]
