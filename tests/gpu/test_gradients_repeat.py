"""On a GPU, the same pass has the same gradients every time, to the last bit."""

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from luyen.config.schema.model import ModelConfig
from luyen.models.batch_invariant import gather_rows
from luyen.models.load import load_policy
from luyen.models.policy import Policy

pytestmark = pytest.mark.gpu

TIMES = 4
SAMPLES = 8


@pytest.fixture
def cuda(device: str) -> str:
    """CUDA, or no test."""
    if device != "cuda":
        pytest.skip("needs CUDA")
    return device


def batch(prompts: list[int], answer: int) -> tuple[Tensor, list[int], Tensor]:
    """Tokens, lengths and mask of some samples of each prompt."""
    generator = torch.Generator().manual_seed(0)
    tokens, lengths, mask = list[Tensor](), list[int](), list[Tensor]()
    for prompt in prompts:
        shared = torch.randint(3, 100, (prompt,), generator=generator)
        for _ in range(SAMPLES):
            own = torch.randint(3, 100, (answer,), generator=generator)
            tokens += [shared, own]
            lengths.append(prompt + answer)
            mask += [torch.zeros(prompt), torch.ones(answer)]
    return torch.cat(tokens), lengths, torch.cat(mask).bool()


def gradients(
    policy: Policy, tokens: Tensor, lengths: list[int], mask: Tensor
) -> dict[str, Tensor]:
    """Of every parameter, after one pass."""
    policy.zero_grad()
    logp = policy(tokens, lengths, mask).logp
    (logp * torch.linspace(-1, 2, logp.numel(), device=logp.device)).sum().backward()
    return {name: p.grad for name, p in policy.named_parameters() if p.grad is not None}


def first_difference(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> str | None:
    """Name of a parameter whose gradients are not the same."""
    return next((name for name, one in left.items() if not torch.equal(one, right[name])), None)


@pytest.mark.parametrize("is_exact", [True, False])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("lengths", [([9, 30], 5), ([300, 700], 260)])
def test_gradients_repeat(cuda, dtype, lengths, is_exact):
    policy = load_policy(
        ModelConfig(init="random", dtype=dtype), device=cuda, vocabulary=100
    ).train()
    policy.is_exact = is_exact
    tokens, sizes, mask = batch(*lengths)
    tokens, mask = tokens.to(cuda), mask.to(cuda)
    first = gradients(policy, tokens, sizes, mask)
    for _ in range(TIMES):
        assert first_difference(first, gradients(policy, tokens, sizes, mask)) is None


@pytest.mark.parametrize("count", [400, 3500, 20000])
def test_the_gradient_of_rows_that_are_picked_often_is_their_sum_in_fp32(cuda, count):
    x = torch.randn(50, 8, device=cuda, dtype=torch.bfloat16).requires_grad_()
    rows = torch.randint(0, 40, (count,), device=cuda)
    factor = torch.randn(count, 8, device=cuda, dtype=torch.bfloat16)
    (gather_rows(x, rows) * factor).sum().backward()
    truth = torch.zeros(50, 8, device=cuda, dtype=torch.float64).index_add_(
        0, rows, factor.double()
    )
    assert x.grad is not None
    torch.testing.assert_close(x.grad.double(), truth, rtol=2**-8, atol=1e-4)
