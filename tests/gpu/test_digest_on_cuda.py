"""Digests on a GPU are those of a CPU, and nothing waits for the host until they are read."""

import pytest
import torch

from luyen.models import digest
from luyen.models.digest import describe, digest_sum

pytestmark = pytest.mark.gpu

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.bool)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_gpu_gives_the_digest_of_a_cpu(device: str, dtype: torch.dtype):
    torch.manual_seed(0)
    some = torch.randn(2 * digest._TABLE + 77).mul(100).to(dtype)
    tensors = {"large": some, "matrix": some[:77].view(7, 11), "turned": some[:77].view(7, 11).T}
    assert describe({n: t.to(device) for n, t in tensors.items()}) == describe(tensors)


def test_summing_does_not_wait_for_the_host(device: str):
    if device != "cuda":
        pytest.skip("needs CUDA")
    tensor = torch.randn(3 * digest._TABLE, device=device)
    digest_sum(tensor)
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = digest_sum(tensor, offset=5)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert int(found) == int(digest_sum(tensor.cpu(), offset=5))
