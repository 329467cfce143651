"""Drawing: the counter numbers, the inverse CDF and truncation against plain references."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from luyen.base.seeds import uniform
from luyen.rollout.native.sampler import (
    TruncationLimits,
    inverse_cdf,
    likeliest,
    mask_barred,
    sample_tokens,
    truncate,
    uniforms,
)


def signed(key: int) -> int:
    return key - (1 << 64) if key >= 1 << 63 else key


@given(
    keys=st.lists(st.integers(0, (1 << 64) - 1), min_size=1, max_size=20),
    position=st.integers(0, 1 << 40),
)
def test_tensors_draw_the_numbers_of_plain_python(keys: list[int], position: int):
    rows = torch.tensor([signed(key) for key in keys])
    found = uniforms(rows, torch.full((len(keys),), position))
    assert found.tolist() == [uniform(key, position) for key in keys]
    assert found.dtype == torch.float64


@given(seed=st.integers(0, 10_000), size=st.integers(1, 1100), share=st.floats(0.0, 1.0))
@settings(max_examples=150, deadline=None)
def test_the_inverse_cdf_is_that_of_numpy_and_never_of_weight_zero(seed, size, share):
    generator = np.random.default_rng(seed)
    weights = generator.random((6, size)).astype(np.float32) ** 8
    weights[generator.random((6, size)) < share] = 0.0
    weights[:, generator.integers(size)] = 1e-3
    numbers = np.array([0.0, 1 - 2.0**-32, *generator.random(4)])
    found = inverse_cdf(torch.from_numpy(weights), torch.from_numpy(numbers)).numpy()
    for row in range(6):
        running = weights[row].astype(np.float64).cumsum()
        expected = np.searchsorted(running, numbers[row] * running[-1], side="right")
        last = np.flatnonzero(weights[row])[-1]
        assert found[row] == min(expected, last)
        assert weights[row, found[row]] > 0


def test_a_number_at_a_boundary_takes_the_next_token():
    weights = torch.tensor([[0.25, 0.0, 0.25, 0.5, 0.0]]).repeat(4, 1)
    numbers = torch.tensor([0.0, 0.25, 0.5, 0.75], dtype=torch.float64)
    assert inverse_cdf(weights, numbers).tolist() == [0, 2, 3, 3]


def test_draws_have_the_frequencies_of_the_weights():
    weights = torch.arange(600.0)[None].repeat(20_000, 1)
    keys = torch.arange(20_000)
    tokens = inverse_cdf(weights, uniforms(keys, torch.zeros(20_000, dtype=torch.int64)))
    counts = torch.bincount(tokens // 60, minlength=10).double()
    expected = weights[0].view(10, 60).sum(-1).double() / weights[0].sum() * 20_000
    assert float(((counts - expected) ** 2 / expected).sum()) < 9 + 4 * 18**0.5


def reference(row: list[float], top_k: int, top_p: float, min_p: float) -> list[float]:
    """Which weights stay, one token at a time in plain Python."""
    order = sorted(range(len(row)), key=lambda i: (-row[i], i))
    order = [i for i in order if row[i] >= min_p * max(row)][:top_k]
    total = sum(row[i] for i in order)
    kept, mass = [0.0] * len(row), 0.0
    for rank, i in enumerate(order):
        is_in = top_p == 1.0 or mass < top_p * total
        kept[i] = row[i] if rank == 0 or is_in else 0.0
        mass += row[i]
    return kept


@given(
    seed=st.integers(0, 10_000),
    top_k=st.sampled_from([1, 2, 5, 30]),
    top_p=st.sampled_from([1e-6, 0.3, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.1, 1.0]),
)
@settings(max_examples=120, deadline=None)
def test_truncation_is_that_of_a_plain_loop(seed, top_k, top_p, min_p):
    generator = torch.Generator().manual_seed(seed)
    rows = torch.softmax(3 * torch.randn(2, 30, generator=generator), -1)
    # Numbers of few bits: sums are exact, ties are common, and both sides round alike.
    rows = (rows * 64).round() / 64 + 2**-10
    limits = TruncationLimits(
        top_k=torch.tensor([[top_k], [30]]),
        top_p=torch.tensor([[top_p], [1.0]], dtype=torch.float32),
        min_p=torch.tensor([[min_p], [0.0]]),
    )
    found = truncate(rows, limits)
    exact_p, exact_min = float(limits.top_p[0]), float(limits.min_p[0])
    assert found[0].tolist() == reference(rows[0].tolist(), top_k, exact_p, exact_min)
    assert torch.equal(found[1], rows[1])


def test_a_draw_reports_the_full_softmax_and_the_mass_that_was_left():
    logits = torch.log(torch.tensor([[0.5, 0.25, 0.125, 0.125]]))
    limits = TruncationLimits(
        top_k=torch.tensor([[2]]), top_p=torch.ones(1, 1), min_p=torch.zeros(1, 1)
    )
    drawn = sample_tokens(logits, torch.tensor([0.9], dtype=torch.float64), limits=limits)
    assert drawn.tokens.tolist() == [1]
    assert drawn.logps.exp().tolist() == pytest.approx([0.25])
    assert drawn.kept.tolist() == pytest.approx([0.75])


def everything(rows: int, size: int, barred: torch.Tensor | None = None) -> TruncationLimits:
    whole = torch.ones(rows, 1)
    sizes = torch.full((rows, 1), size)
    return TruncationLimits(top_k=sizes, top_p=whole, min_p=0 * whole, barred=barred)


@given(seed=st.integers(0, 10_000), barred=st.lists(st.integers(-1, 45), min_size=1, max_size=12))
@settings(max_examples=100, deadline=None)
def test_barred_tokens_are_never_drawn_and_the_rest_keeps_its_proportions(seed, barred):
    generator = torch.Generator().manual_seed(seed)
    logits = 4 * torch.randn(50, 40, generator=generator)
    ids = torch.tensor(barred).repeat(50, 1)
    drawn = sample_tokens(
        logits, torch.rand(50, generator=generator).double(), None, everything(50, 40, ids)
    )
    exact = torch.softmax(logits.double(), -1)
    gone = [i for i in {*barred} if 0 <= i < 40]
    left = exact.clone()
    left[:, gone] = 0.0
    assert not set(gone) & set(drawn.tokens.tolist())
    assert torch.allclose(drawn.kept.double(), left.sum(-1), atol=1e-6)
    said = exact.log().gather(-1, drawn.tokens[:, None])[:, 0]
    assert torch.allclose(drawn.logps.double(), said, atol=1e-4)
    renormalised = torch.softmax(mask_barred(logits, ids).double(), -1)
    assert torch.allclose(renormalised, left / left.sum(-1, keepdim=True), atol=1e-9)


def test_a_row_that_bars_nothing_draws_to_the_bit_as_without_limits():
    generator = torch.Generator().manual_seed(3)
    logits, numbers = 5 * torch.randn(64, 1000, generator=generator), torch.rand(64).double()
    nobody = torch.full((64, 3), -1)
    free, limited = (
        sample_tokens(logits, numbers),
        sample_tokens(logits, numbers, None, everything(64, 1000, nobody)),
    )
    assert torch.equal(free.tokens, limited.tokens)
    assert torch.equal(free.logps, limited.logps)


def test_a_barred_token_may_have_all_of_the_mass():
    logits = torch.tensor([[500.0, 1.0, 1.0, -900.0]]).repeat(2, 1)
    ids = torch.tensor([[0], [0]])
    numbers, greedy = torch.tensor([0.6, 0.6]).double(), torch.tensor([False, True])
    drawn = sample_tokens(logits, numbers, greedy, everything(2, 4, ids))
    assert drawn.tokens.tolist() == [2, 1]
    assert drawn.kept.tolist() == [0.0, 0.0]
    assert drawn.logps.tolist() == [-499.0, -499.0]


def test_min_p_comes_before_top_p():
    # Of 0.5, 0.2, 0.2, 0.1: min-p 0.4 leaves 0.9, of which top-p 0.75 needs 0.675: two tokens.
    # The other way round top-p would need 0.75 of 1.0: three.
    rows = torch.tensor([[0.5, 0.2, 0.2, 0.1]])
    limits = TruncationLimits(
        top_k=torch.tensor([[4]]), top_p=torch.tensor([[0.75]]), min_p=torch.tensor([[0.4]])
    )
    assert (truncate(rows, limits) > 0).tolist() == [[True, True, False, False]]


def test_greedy_rows_take_the_likeliest_and_the_others_are_drawn():
    logits = torch.tensor([[0.0, 1.0, 0.5], [0.0, 1.0, 0.5]])
    numbers = torch.tensor([0.99, 0.99], dtype=torch.float64)
    drawn = sample_tokens(logits, numbers, greedy=torch.tensor([True, False]))
    assert drawn.tokens.tolist() == [1, 2]
    assert drawn.kept is None


@pytest.mark.parametrize("count", [1, 4, 20, 70])
def test_the_likeliest_tokens_are_in_one_order(count: int):
    logp = torch.log_softmax(torch.randn(5, 61).mul(2).round(), -1)
    logp[2] = 0.0
    logp[3, 7] = float("-inf")
    found = likeliest(logp, count)
    for row, ids, logps in zip(
        logp.tolist(), found.ids.tolist(), found.logps.tolist(), strict=True
    ):
        assert ids == sorted(range(61), key=lambda i: (-row[i], i))[:count]
        assert logps == [row[i] for i in ids]


def test_what_is_not_allowed_has_no_probability():
    logits = torch.tensor([[0.0, 9.0, 1.0, 0.5]]).expand(400, -1)
    allowed = torch.tensor([[True, False, False, True]]).expand(400, -1)
    numbers = torch.arange(400, dtype=torch.float64) / 400
    found = sample_tokens(logits, numbers, allowed=allowed)
    full = torch.softmax(logits[0], -1)
    assert set(found.tokens.tolist()) == {0, 3}
    share = (found.tokens == 3).double().mean()
    assert float(share) == pytest.approx(float(full[3] / (full[0] + full[3])), abs=0.01)
    assert found.kept is not None
    assert torch.allclose(found.kept, full[0] + full[3])
    assert torch.allclose(found.logps.exp(), full[found.tokens])


def test_an_allowed_token_without_probability_can_be_sampled():
    logits = torch.tensor([[300.0, 0.0, -1.0]])
    allowed = torch.tensor([[False, True, True]])
    found = sample_tokens(logits, torch.tensor([0.1], dtype=torch.float64), allowed=allowed)
    assert found.kept is not None
    assert (found.tokens.tolist(), found.logps.tolist()) == ([1], [-300.0])
    assert found.kept.tolist() == [0.0]
