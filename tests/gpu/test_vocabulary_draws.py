"""Drawn tokens: right by float64, and with the very bits that scoring gives them."""

import pytest
import torch

from luyen.base.seeds import derive_key, uniform
from tests.gpu.vocabulary_rows import (
    FORMS,
    NAN,
    PLAIN,
    SIZES,
    draw,
    dtypes,
    keys_of,
    logits_of,
    logp_of,
    skip_if_long,
    values,
)

# The interpreter's numpy warns of infinities that the kernels expect.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::RuntimeWarning")]

INF = float("inf")


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("form", "temperature"), FORMS)
def test_a_drawn_token_has_the_same_bits_when_it_is_scored(device, size, form, temperature):
    skip_if_long(device, size)
    for dtype in dtypes(device):
        for rows in (1, 9) if device == "cpu" else (1, 9, 300):
            logits = logits_of(device, rows, size, extra=3, dtype=dtype)
            tokens, logps = draw(logits, size, form, temperature=temperature)
            again = logp_of(logits, tokens, size, form, temperature)
            assert torch.equal(logps, again)


@pytest.mark.parametrize("size", [256, 4097, 49152])
def test_a_row_keeps_its_bits_in_any_company_and_at_any_address(device, size):
    skip_if_long(device, size)
    form, temperature = FORMS[2]
    for dtype in dtypes(device):
        logits = logits_of(device, 8, size, dtype=dtype)
        keys = keys_of(device, 8)
        tokens, logps = draw(logits, size, form, temperature=temperature)
        elsewhere = torch.full((8, size + 5), NAN, device=device, dtype=dtype)
        elsewhere[:, 1 : size + 1] = logits
        moved = draw(elsewhere[:, 1:], size, form, temperature=temperature)
        assert torch.equal(tokens, moved[0])
        assert torch.equal(logps, moved[1])
        assert torch.equal(logps, logp_of(elsewhere[:, 1:], tokens, size, form, 1.3))
        for row in (0, 3, 7):
            one = logits[row : row + 1].clone()
            key = keys[row : row + 1]
            alone = draw(one, size, form, temperature=temperature, keys=key)
            assert torch.equal(tokens[row : row + 1], alone[0])
            assert torch.equal(logps[row : row + 1], alone[1])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("form", "temperature"), FORMS)
def test_a_draw_is_the_inverse_of_the_running_sum(device, size, form, temperature):
    skip_if_long(device, size)
    rows = 12 if device == "cpu" else 200
    keys = [derive_key(0, "draw", row) for row in range(rows)]
    u = torch.tensor([uniform(key, 5) for key in keys], dtype=torch.float64, device=device)
    near = 1e-6 if form["softcap"] is None else 1e-5
    for dtype in dtypes(device):
        logits = logits_of(device, rows, size, extra=3, dtype=dtype)
        tokens, _ = draw(logits, size, form, temperature=temperature)
        p = values(logits, size, form, temperature).softmax(-1)
        after = p.cumsum(-1).gather(-1, tokens[:, None])[:, 0]
        mass = p.gather(-1, tokens[:, None])[:, 0]
        assert (u < after + near).all()
        assert (u > after - mass - near).all()
        assert (mass > 0).all()


def key_of(bits: int) -> int:
    """The key whose uniform number at position 0 is bits / 2**32: the mixing, backwards."""
    ones = (1 << 64) - 1
    z = bits << 32
    for shift, factor in ((31, 0x94D049BB133111EB), (27, 0xBF58476D1CE4E5B9), (30, None)):
        mixed = z
        for _ in range(64 // shift + 1):
            z = mixed ^ (z >> shift)
        z = z if factor is None else z * pow(factor, -1, 1 << 64) & ones
    z = (z - 0x9E3779B97F4A7C15) & ones
    return z - (1 << 64) if z >> 63 else z


def test_the_mixing_backwards_is_right():
    for bits in (0, 1, 12345, (1 << 32) - 1):
        assert uniform(key_of(bits) % (1 << 64), 0) == bits / 2**32


def test_equal_shares_are_split_at_their_very_ends(device):
    """256 equal tokens: a uniform number of k/256 is token k, the one before it token k-1."""
    picked = range(0, 256, 1 if device == "cuda" else 32)
    at = [k << 24 for k in picked]
    before = [b - 1 for b in at if b > 0]
    keys = torch.tensor([key_of(b) for b in at + before], device=device)
    logits = torch.full((len(keys), 256), 2.5, device=device)
    tokens, _ = draw(logits, 256, PLAIN, keys=keys, position=0)
    expected = list(picked) + [k - 1 for k in picked if k > 0]
    assert tokens.tolist() == expected


@pytest.mark.parametrize("size", [7, 4096, 9001])
@pytest.mark.parametrize("bits", [0, 1, (1 << 32) - 1])
def test_a_token_without_probability_is_never_drawn(device, size, bits):
    logits = logits_of(device, 3, size)
    likely = [[3], [size - 2], [2, size - 2]]
    for row, columns in enumerate(likely):
        kept = logits[row, columns].clone()
        logits[row] = -INF if row != 1 else -200.0
        logits[row, columns] = kept
    keys = torch.tensor([key_of(bits)] * 3, device=device)
    tokens, logps = draw(logits, size, PLAIN, keys=keys, position=0)
    for row, columns in enumerate(likely):
        assert tokens[row].item() in columns
    assert torch.isfinite(logps).all()


def test_a_row_that_holds_no_numbers_gives_an_id_and_nan(device):
    size = 4100
    logits = logits_of(device, 6, size, extra=3)
    logits[0, 4098] = NAN
    logits[1, 0] = NAN
    logits[2] = NAN
    logits[3, 7] = INF
    logits[4] = -INF
    for greedy in (False, True):
        tokens, logps = draw(logits, size, PLAIN, greedy=greedy)
        assert ((tokens >= 0) & (tokens < size)).all()
        assert logps.isnan().tolist() == [True] * 5 + [False]
        assert logp_of(logits, tokens, size, PLAIN, 1.0).isnan().tolist()[:5] == [True] * 5


@pytest.mark.parametrize("size", [7, 4097, 49152])
def test_a_greedy_row_takes_the_first_of_the_likeliest_at_temperature_1(device, size):
    skip_if_long(device, size)
    logits = logits_of(device, 6, size, extra=3)
    logits[1, [2, size - 1]] = 50.0
    logits[2, [size - 1, size - 3]] = 50.0
    greedy = torch.tensor([True, True, True, False, True, False], device=device)
    temperature = torch.tensor([0.0, 0.5, 1.0, 0.5, 2.0, 1.0], device=device)
    given = {"temperature": temperature, "greedy": greedy}
    tokens, logps = draw(logits, size, PLAIN, **given)
    best = logits[:, :size].argmax(-1)
    assert tokens[greedy].tolist() == best[greedy].tolist()
    assert tokens[1].item() == 2
    assert tokens[2].item() == size - 3
    plain = logp_of(logits, tokens, size, PLAIN, 1.0)
    assert torch.equal(logps[greedy], plain[greedy])


def test_draws_follow_the_distribution(device):
    draws = 20_000 if device == "cuda" else 300
    one = logits_of(device, 1, 7)
    logits = one.expand(draws, 7).contiguous() / 3
    tokens, _ = draw(logits, 7, PLAIN, temperature=1.5)
    expected = values(logits[:1], 7, PLAIN, 1.5).softmax(-1)[0].cpu() * draws
    counts = torch.bincount(tokens.cpu(), minlength=7).double()
    # The 99.99th percentile of chi-square with 6 degrees of freedom.
    assert ((counts - expected) ** 2 / expected).sum() < 27.9


def test_no_row_is_no_work(device):
    logits = logits_of(device, 0, 9)
    assert draw(logits, 9, PLAIN)[0].tolist() == []
    none = torch.zeros(0, dtype=torch.int64, device=device)
    assert logp_of(logits, none, 9, PLAIN, 1.0).tolist() == []


def test_drawing_can_be_captured(device):
    from luyen.models.cuda.sampling_kernels import sample_rows

    if device != "cuda":
        pytest.skip("graphs need CUDA")
    size, rows = 49152, 32
    logits = logits_of(device, rows, size, dtype=torch.bfloat16)
    keys, positions = keys_of(device, rows), torch.zeros(rows, dtype=torch.int64, device=device)
    temperature = torch.ones(rows, device=device)
    greedy = torch.zeros(rows, dtype=torch.bool, device=device)
    out = {"out_tokens": positions.clone(), "out_logps": temperature.clone()}

    def run() -> None:
        given = (logits, keys, positions, temperature, greedy)
        sample_rows(*given, vocabulary=size, **PLAIN, **out)

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for position in (1, 2):
        positions.fill_(position)
        temperature.fill_(1.0 / position)
        graph.replay()
        expected = draw(logits, size, PLAIN, temperature=temperature, position=position)
        assert torch.equal(out["out_tokens"], expected[0])
        assert torch.equal(out["out_logps"], expected[1])
