"""The fused head: scores and gradients of the plain head, whatever the chunks."""

import pytest
import torch
from torch import Tensor, nn

from luyen.models import head
from luyen.models.head import Head, fused_scores, score

FORMS = [
    {"scale": 1.0, "softcap": None, "temperature": 1.0},
    {"scale": 0.5, "softcap": None, "temperature": 0.7},
    {"scale": 2.0, "softcap": 3.0, "temperature": 1.3},
]
ROWS, WIDTH, KNOWN, STORED = 13, 8, 21, 24


def inputs(dtype: torch.dtype, *, bias: bool = False) -> tuple[Tensor, Tensor, Tensor | None]:
    random = torch.Generator().manual_seed(0)
    shapes = [(ROWS, WIDTH), (STORED, WIDTH), (STORED,)]
    drawn = [torch.randn(s, generator=random, dtype=dtype).requires_grad_() for s in shapes]
    return drawn[0], drawn[1], drawn[2] if bias else None


def targets() -> Tensor:
    return torch.arange(ROWS) * 7 % KNOWN


def loss(logp: Tensor, entropy: Tensor | None) -> Tensor:
    """A loss in which every row has gradients of its own."""
    factor = torch.linspace(-1, 2, ROWS, dtype=logp.dtype)
    total = (logp * factor).sum()
    return total if entropy is None else total + (entropy * factor.flip(0)).sum()


def by_definition(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    scale: float,
    softcap: float | None,
    temperature: float,
) -> tuple[Tensor, Tensor, Tensor]:
    logits = nn.functional.linear(hidden, weight, bias)[:, :KNOWN] * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logp = torch.log_softmax(logits / temperature, -1)
    chosen = logp.gather(-1, targets()[:, None])[:, 0]
    return chosen, -(logp.exp() * logp).sum(-1), (2 * logp).exp().sum(-1)


@pytest.fixture(params=[1, 5, 1000], ids=["rows of 1", "rows of 5", "all rows"])
def chunked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(head, "_NUMBERS_CPU", request.param * STORED)
    return request.param


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("bias", [False, True])
def test_values_and_gradients_are_those_of_plain_autograd(chunked: int, form: dict, bias: bool):
    given = inputs(torch.float64, bias=bias)
    found = fused_scores(
        *given, targets(), vocabulary=KNOWN, **form, entropy=True, sum_pi_squared=True
    )
    expected = by_definition(*given, **form)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=0)
    wanted = [x for x in given if x is not None]
    ours = torch.autograd.grad(loss(*found[:2]), wanted)
    theirs = torch.autograd.grad(loss(*expected[:2]), wanted)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, atol=1e-11, rtol=0)


@pytest.mark.parametrize("form", FORMS)
def test_float32_agrees_with_the_plain_head(chunked: int, form: dict):
    hidden, weight, _ = inputs(torch.float32)
    linear = nn.Linear(WIDTH, STORED, bias=False)
    linear.weight = nn.Parameter(weight.detach().clone())
    head = Head(linear=linear, vocabulary=KNOWN, softcap=form["softcap"], scale=form["scale"])
    options = {
        "temperature": form["temperature"],
        "entropy": True,
        "sum_pi_squared": True,
    }
    plain = score(head, hidden, targets(), **options)
    expected = torch.autograd.grad(loss(plain.logp, plain.entropy), (hidden, linear.weight))
    found = fused_scores(
        hidden,
        weight,
        None,
        targets(),
        vocabulary=KNOWN,
        scale=form["scale"],
        softcap=form["softcap"],
        **options,
    )
    gradients = torch.autograd.grad(loss(*found[:2]), (hidden, weight))
    scores = (plain.logp, plain.entropy, plain.sum_pi_squared)
    for ours, theirs in zip((*found, *gradients), (*scores, *expected), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_entropy_without_gradient_is_only_a_number():
    given = inputs(torch.float64)
    form = FORMS[2]
    logp, entropy, _ = fused_scores(
        *given, targets(), vocabulary=KNOWN, **form, entropy=True, entropy_gradient=False
    )
    assert entropy is not None
    assert not entropy.requires_grad
    expected = torch.autograd.grad(loss(by_definition(*given, **form)[0], None), given[:2])
    for ours, theirs in zip(
        torch.autograd.grad(loss(logp, None), given[:2]), expected, strict=True
    ):
        torch.testing.assert_close(ours, theirs, atol=1e-11, rtol=0)


def test_entropy_alone_has_a_gradient():
    given = inputs(torch.float64)
    _, entropy, _ = fused_scores(*given, targets(), vocabulary=KNOWN, **FORMS[1], entropy=True)
    assert entropy is not None
    ours = torch.autograd.grad(entropy.sum(), given[:2])
    theirs = torch.autograd.grad(by_definition(*given, **FORMS[1])[1].sum(), given[:2])
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, atol=1e-11, rtol=0)


@pytest.mark.parametrize("trained", [0, 1])
def test_what_is_frozen_gets_no_gradient(chunked: int, trained: int):
    given = inputs(torch.float64)
    frozen = [x if i == trained else x.detach() for i, x in enumerate(given[:2])]
    logp, *_ = fused_scores(frozen[0], frozen[1], None, targets(), vocabulary=KNOWN)
    loss(logp, None).backward()
    expected = by_definition(*given, **FORMS[0])[0]
    (theirs,) = torch.autograd.grad(loss(expected, None), given[trained])
    gradient = given[trained].grad
    assert gradient is not None
    torch.testing.assert_close(gradient, theirs, atol=1e-11, rtol=0)
    assert frozen[1 - trained].grad is None


def test_rows_beyond_the_vocabulary_take_no_gradient():
    given = inputs(torch.float32, bias=True)
    logp, *_ = fused_scores(*given, targets(), vocabulary=KNOWN)
    loss(logp, None).backward()
    _, weight, bias = given
    assert weight.grad is not None
    assert bias is not None
    assert bias.grad is not None
    assert not weight.grad[KNOWN:].any()
    assert not bias.grad[KNOWN:].any()
    assert weight.grad[:KNOWN].any()


def test_half_precision_weights_sum_their_gradient_in_float32(chunked: int):
    hidden, weight, _ = (x if x is None else x.detach().bfloat16() for x in inputs(torch.float64))
    assert hidden is not None
    assert weight is not None
    weight.requires_grad_()
    logp, *_ = fused_scores(hidden, weight, None, targets(), vocabulary=KNOWN)
    assert logp.dtype == torch.float32
    (found,) = torch.autograd.grad(loss(logp, None), weight)
    exact = weight.detach().double().requires_grad_()
    expected = by_definition(hidden.double(), exact, None, **FORMS[0])[0]
    (theirs,) = torch.autograd.grad(loss(expected, None), exact)
    assert found.dtype == torch.bfloat16
    # Logits and their gradient are rounded to bfloat16 once; a sum in it would be far worse.
    torch.testing.assert_close(found.double(), theirs, atol=0.05, rtol=0.02)


def test_no_row_gives_no_score_and_a_gradient_of_zeros():
    hidden, weight, _ = inputs(torch.float32)
    none = torch.zeros(0, dtype=torch.int64)
    logp, entropy, _ = fused_scores(hidden[:0], weight, None, none, vocabulary=KNOWN, entropy=True)
    assert logp.tolist() == []
    assert entropy is not None
    (gradient,) = torch.autograd.grad(logp.sum() + entropy.sum(), weight)
    assert gradient.shape == weight.shape
    assert not gradient.any()


def test_what_is_not_asked_for_is_none():
    hidden, weight, _ = inputs(torch.float32)
    assert fused_scores(hidden, weight, None, targets(), vocabulary=KNOWN)[1:] == (None, None)
