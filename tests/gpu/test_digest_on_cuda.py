"""Digests on a GPU are those of a CPU, and nothing waits for the host until they are read."""

import pytest
import torch

from luyen.models import weights
from luyen.models.weights import digest_sum, tensor_digests

pytestmark = pytest.mark.gpu

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.bool)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_gpu_gives_the_digest_of_a_cpu(device: str, dtype: torch.dtype):
    torch.manual_seed(0)
    some = torch.randn(2 * weights._TABLE + 77).mul(100).to(dtype)
    tensors = {"large": some, "matrix": some[:77].view(7, 11), "turned": some[:77].view(7, 11).T}
    assert tensor_digests({n: t.to(device) for n, t in tensors.items()}) == tensor_digests(tensors)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64, torch.uint8], ids=str)
def test_one_launch_gives_the_sum_of_every_tensor(device: str, dtype: torch.dtype):
    from luyen.models.cuda.digest_kernels import digest_sums

    generator = torch.Generator().manual_seed(1)
    # In the interpreter a row of constants is made short; on a GPU the last tensor has three.
    table = weights._TABLE if device == "cuda" else 1 << 13
    sizes = [1, 0, 7, 4096, 4097, 2 * table + 5]
    parts = [_noise(size, dtype, generator).to(device) for size in sizes]
    constants = {"table": table, "golden": weights._GOLDEN, "mix": weights._MIX}
    found = digest_sums(parts, weights._WORDS[dtype.itemsize], **constants)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weights, "_TABLE", table)
        wanted = [int(digest_sum(part.cpu())) for part in parts]
    assert found.tolist() == wanted


def test_tensors_of_all_types_are_told_in_their_order(device: str):
    generator = torch.Generator().manual_seed(2)
    tensors = {
        f"{dtype} {size}": _noise(size, dtype, generator) for size in (3, 300) for dtype in DTYPES
    }
    found = tensor_digests({name: tensor.to(device) for name, tensor in tensors.items()})
    assert [*found.items()] == [*tensor_digests(tensors).items()]


@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
def test_summing_does_not_wait_for_the_host(device: str):
    if device != "cuda":
        pytest.skip("needs CUDA")
    tensor = torch.randn(3 * weights._TABLE, device=device)
    digest_sum(tensor)
    try:
        torch.cuda.set_sync_debug_mode("error")
        found = digest_sum(tensor, offset=5)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert int(found) == int(digest_sum(tensor.cpu(), offset=5))


def _noise(size: int, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Random bits; those that are no number among them."""
    if dtype == torch.bool:
        return torch.rand(size, generator=generator) < 0.5
    shape = (size * dtype.itemsize,)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator).view(dtype)
