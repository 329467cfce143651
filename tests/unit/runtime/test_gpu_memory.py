"""Weights that are read where they are, with memory of this process in place of a GPU's."""

import ctypes
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from luyen.models.weights import tensor_digests
from luyen.runtime.gpu_memory import (
    MemoryNotShared,
    can_map,
    can_read,
    describe,
    make_probe,
    opened,
)


class HostMemory:
    """Storages of tensors as allocations; counts those that are open."""

    def __init__(self, tensors: Mapping[str, Tensor] | None = None, *, gpu: str = "GPU-1") -> None:
        whole = [tensor.untyped_storage() for tensor in (tensors or {}).values()]
        self.known = {one.data_ptr(): one.nbytes() for one in whole}
        self.name = gpu
        self.refuses: set[int] = set()
        self.opened: list[int] = []
        self.log: list[str] = []

    def gpu(self) -> str:
        return self.name

    def allocation(self, address: int) -> tuple[int, int]:
        known = ((start, size) for start, size in self.known.items())
        return next(((s, n) for s, n in known if s <= address < s + n), (address, 16))

    def handle(self, start: int) -> bytes:
        if start in self.refuses:
            raise MemoryNotShared("cuIpcGetMemHandle answered CUDA_ERROR_INVALID_VALUE")
        return start.to_bytes(8, "little")

    def open(self, handle: bytes) -> int:
        start = int.from_bytes(handle, "little")
        if start in self.refuses:
            raise MemoryNotShared("cuIpcOpenMemHandle_v2 answered CUDA_ERROR_INVALID_CONTEXT")
        self.opened.append(start)
        return start

    def close(self, start: int) -> None:
        self.log.append("close")
        self.opened.remove(start)

    def view(self, start: int, size: int) -> Tensor:
        return torch.frombuffer((ctypes.c_uint8 * size).from_address(start), dtype=torch.uint8)

    def wait(self) -> None:
        self.log.append("wait")


def weights() -> dict[str, Tensor]:
    """Tensors of several types; some share a storage, as fused layers do."""
    fused = torch.randn(6, 4).bfloat16()
    return {
        "q": fused[:2],
        "k": fused[2:3],
        "v": fused[3:],
        "scale": torch.tensor(0.1),
        "none": torch.empty(0, 3),
        "counts": torch.arange(5),
    }


def test_weights_are_the_same_to_the_bit_where_they_are():
    own = weights()
    memory = HostMemory(own)
    part = describe(own, memory)
    assert part.bytes == sum(t.numel() * t.element_size() for t in own.values())
    assert len(part.allocations) == 3, "fused weights are one allocation, empty ones none"
    with opened(part, memory) as found:
        assert len(memory.opened) == 3
        assert list(found) == list(own)
        assert tensor_digests(found) == tensor_digests(own)
        for name, tensor in own.items():
            assert not tensor.numel() or found[name].data_ptr() == tensor.data_ptr()
    assert memory.opened == []


def test_memory_is_given_back_after_everything_was_read_whatever_happens():
    own = weights()
    memory = HostMemory(own)
    part = describe(own, memory)
    memory.log.clear()
    with pytest.raises(ZeroDivisionError), opened(part, memory):
        raise ZeroDivisionError
    assert memory.log == ["wait", "close", "close", "close"]
    memory.refuses = {own["counts"].data_ptr()}
    with pytest.raises(MemoryNotShared, match="cuIpcOpenMemHandle_v2"), opened(part, memory):
        pass
    assert memory.opened == []


def test_another_gpu_is_not_read():
    own = weights()
    part = describe(own, HostMemory(own))
    other = HostMemory(own, gpu="GPU-2")
    with pytest.raises(MemoryNotShared, match="on GPU-1, and this process is on GPU-2"):
        opened(part, other).__enter__()
    assert other.opened == []


def test_a_process_finds_out_whether_it_reads_the_memory_of_another():
    memory = HostMemory()
    probe, kept = make_probe(memory, torch.device("cpu"))
    assert can_read(probe, memory)
    assert not can_read(probe, HostMemory(gpu="GPU-2"))
    assert torch.cuda.is_available() or not can_read(probe)
    kept[0] ^= 1
    assert not can_read(probe, memory), "what it opened is not the owner's memory"
    kept[0] ^= 1
    memory.refuses = {kept.data_ptr()}
    assert not can_read(probe, memory)
    with pytest.raises(MemoryNotShared, match="cuIpcGetMemHandle"):
        describe({"probe": kept}, memory)


def test_only_whole_tensors_of_a_gpu_are_read_in_place():
    assert not can_map({"w": torch.zeros(2)})
    if torch.cuda.is_available():
        here = torch.zeros(4, 4, device="cuda")
        assert can_map({"w": here, "row": here[1:3]})
        assert not can_map({"w": here, "column": here[:, 1]})
