"""Scores and gradients of the vocabulary kernels, against float64."""

from collections.abc import Iterator

import pytest
import torch

from luyen.models.head import fused_scores
from tests.gpu.vocabulary_rows import (
    FORMS,
    SIZES,
    dtypes,
    logits_of,
    row_counts,
    skip_if_long,
    targets_of,
    values,
)

# The interpreter's numpy warns of infinities that the kernels expect.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::RuntimeWarning")]


@pytest.fixture
def poisoned() -> Iterator[None]:
    """Memory that nothing was written to holds NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("form", "temperature"), FORMS)
@pytest.mark.usefixtures("poisoned")
def test_scores_are_those_of_float64(device, size, form, temperature):
    from luyen.models.cuda.logprob_kernels import score_rows

    skip_if_long(device, size)
    for dtype in dtypes(device):
        for rows in row_counts(device, size):
            logits = logits_of(device, rows, size, extra=3, dtype=dtype)
            targets = targets_of(device, rows, size)
            more = {"temperature": temperature, "entropy": True, "sum_pi_squared": True}
            found = score_rows(logits, targets, vocabulary=size, **form, **more)
            x = values(logits, size, form, temperature)
            logp = x.log_softmax(-1)
            expected = (
                logp.gather(-1, targets[:, None])[:, 0],
                x.logsumexp(-1),
                -(logp.exp() * logp).sum(-1),
                (2 * logp).exp().sum(-1),
            )
            for ours, theirs in zip(found, expected, strict=True):
                assert ours.dtype == torch.float32
                torch.testing.assert_close(ours.double(), theirs, atol=1e-5, rtol=2e-6)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("form", "temperature"), FORMS)
@pytest.mark.parametrize("with_entropy", [False, True])
def test_gradients_are_those_of_float64(device, size, form, temperature, with_entropy):
    from luyen.models.cuda.logprob_kernels import score_rows, score_rows_backward

    skip_if_long(device, size)
    for dtype in dtypes(device):
        logits = logits_of(device, 5, size, extra=3, dtype=dtype)
        targets = targets_of(device, 5, size)
        grads = torch.randn(2, 5, generator=torch.Generator().manual_seed(1)).to(device)
        common = {"vocabulary": size, **form, "temperature": temperature}
        _, lse, entropy, _ = score_rows(
            logits, targets, **common, entropy=with_entropy, sum_pi_squared=False
        )
        exact = logits[:, :size].double().requires_grad_()
        logp = values(exact, size, form, temperature).log_softmax(-1)
        loss = (logp.gather(-1, targets[:, None])[:, 0] * grads[0]).sum()
        if with_entropy:
            loss = loss - ((logp.exp() * logp).sum(-1) * grads[1]).sum()
        (expected,) = torch.autograd.grad(loss, exact)
        of_entropy = grads[1] if with_entropy else None
        score_rows_backward(logits, targets, lse, entropy, grads[0], of_entropy, **common)
        rounding = 1e-6 if dtype == torch.float32 else 1e-2
        torch.testing.assert_close(logits[:, :size].double(), expected, atol=2e-6, rtol=rounding)
        assert not logits[:, size:].any()


@pytest.mark.parametrize(("form", "temperature"), FORMS)
def test_the_fused_head_on_cuda_agrees_with_float64(device, form, temperature, monkeypatch):
    if device != "cuda":
        pytest.skip("the head takes the kernels on CUDA only")
    monkeypatch.setattr("luyen.models.head._NUMBERS_CUDA", 50 * 5000)
    torch.manual_seed(0)
    hidden = torch.randn(133, 64, device=device).bfloat16().requires_grad_()
    weight = torch.randn(5000, 64, device=device).mul(0.3).bfloat16().requires_grad_()
    targets = targets_of(device, 133, 4990)
    factor = torch.linspace(-1, 1, 133, device=device)
    common = {"vocabulary": 4990, **form, "temperature": temperature, "entropy": True}
    for exact in (False, True):
        dtype = torch.float32 if exact else torch.bfloat16
        given = [x.detach().to(dtype).requires_grad_() for x in (hidden, weight)]
        logp, entropy, _ = fused_scores(*given, None, targets, **common)
        found = torch.autograd.grad((logp * factor + entropy * factor.flip(0)).sum(), given)
        doubles = [x.detach().double().cpu().requires_grad_() for x in given]
        theirs = fused_scores(*doubles, None, targets.cpu(), **common)
        scores = theirs[0] * factor.cpu() + theirs[1] * factor.flip(0).cpu()
        expected = torch.autograd.grad(scores.sum(), doubles)
        near = 2e-4 if exact else 0.1
        assert (logp.cpu() - theirs[0]).abs().max() < near
        for ours, other in zip(found, expected, strict=True):
            error = (ours.cpu().double() - other).norm() / other.norm()
            assert error < (1e-3 if exact else 2e-2)
