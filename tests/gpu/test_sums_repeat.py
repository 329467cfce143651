"""On a GPU, sums by index are the same every time, to the last bit, and so are their gradients."""

import pytest
import torch

from luyen.algorithms.layout import sum_by_index

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("count", [1, 7, 3000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("is_sorted", [True, False])
def test_sums_repeat(device: str, count: int, dtype: torch.dtype, is_sorted: bool):
    generator = torch.Generator().manual_seed(0)
    index = torch.randint(0, count, (50_000,), generator=generator)
    index = (index.sort().values if is_sorted else index).to(device)
    x = torch.randn(50_000, generator=generator, dtype=dtype).to(device).requires_grad_()
    first = sum_by_index(x, index, count)
    for _ in range(20):
        assert torch.equal(sum_by_index(x, index, count), first)
    there = torch.zeros(count, dtype=torch.float64).index_add(
        0, index.cpu(), x.detach().cpu().double()
    )
    torch.testing.assert_close(first.detach().cpu().double(), there, rtol=1e-4, atol=1e-3)
    first.square().sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, (2 * first)[index].detach())
