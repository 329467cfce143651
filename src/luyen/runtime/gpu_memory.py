"""Weights that another process on the same GPU copies from where they are (CUDA IPC).

The owner describes its tensors as allocations of the driver and places in them; nothing is copied.
A reader opens the allocations, copies, and closes them before it says so. The driver is called, and
not PyTorch's sharing of storages: that wraps a storage once more for each time it is shared, and
counts readers in files, although here the order of calls says who reads.
"""

import ctypes
import functools
import secrets
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol, TypeAlias, final

import torch
from torch import Tensor

PlacedTensor: TypeAlias = tuple[str, str, tuple[int, ...], int, int]
"""Name, type and shape of a tensor, the index of its allocation, and its first byte in that."""


@final
class MemoryNotShared(Exception):
    """The driver cannot share this memory between processes."""


NOT_SHARED = (MemoryNotShared, AttributeError, OSError, RuntimeError)
"""What the driver, its library and PyTorch raise where memory cannot be shared."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class MappedWeights:
    """Parameters in the memory of another process, which must stay as it is while they are read.

    Example:
        >>> MappedWeights(gpu="GPU-1", allocations=(), tensors=(), bytes=0).bytes
        0
    """

    gpu: str
    """The GPU itself, whatever number a process gives it."""
    allocations: tuple[tuple[bytes, int], ...]
    """Handle and size of each allocation."""
    tensors: tuple[PlacedTensor, ...]
    """Where each tensor is."""
    bytes: int
    """Size of the tensors."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryProbe:
    """A few bytes that only a process that can read the owner's memory knows.

    Example:
        >>> nothing = MappedWeights(gpu="GPU-1", allocations=(), tensors=(), bytes=0)
        >>> MemoryProbe(weights=nothing, secret="00").secret
        '00'
    """

    weights: MappedWeights
    """Where they are."""
    secret: str
    """What they are."""


class SharedMemory(Protocol):
    """Memory of a device, and how processes share it."""

    def gpu(self) -> str:
        """The device itself."""
        ...

    def allocation(self, address: int) -> tuple[int, int]:
        """Start and size of the allocation that an address is in."""
        ...

    def handle(self, start: int) -> bytes:
        """What another process opens an allocation with; `MemoryNotShared` if there is none."""
        ...

    def open(self, handle: bytes) -> int:
        """The address of another process's allocation here."""
        ...

    def close(self, start: int) -> None:
        """Give an opened allocation back."""
        ...

    def view(self, start: int, size: int) -> Tensor:
        """The bytes at an address, not copied."""
        ...

    def wait(self) -> None:
        """Return when the device has done all that it was given."""
        ...


# The driver.

_HANDLE_BYTES = 64
_PEER_ACCESS = 1
"""The only flag that the driver defines for opening; it wants it."""


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * _HANDLE_BYTES),)


@final
class CudaMemory:
    """Memory of this process's GPU.

    A thread that calls it must have used the GPU before, so that the driver has a context.
    """

    def __init__(self) -> None:
        """Load the driver's library, which PyTorch has loaded already."""
        self._driver: Any = ctypes.CDLL("libcuda.so.1")
        self._device = torch.device("cuda", torch.cuda.current_device())

    def gpu(self) -> str:
        """The device itself."""
        return str(torch.cuda.get_device_properties(self._device).uuid)

    def allocation(self, address: int) -> tuple[int, int]:
        """Start and size of the allocation that an address is in."""
        start, size = ctypes.c_uint64(), ctypes.c_size_t()
        self._call(
            "cuMemGetAddressRange_v2",
            ctypes.byref(start),
            ctypes.byref(size),
            ctypes.c_uint64(address),
        )
        return start.value, size.value

    def handle(self, start: int) -> bytes:
        """What another process opens an allocation with; not for expandable segments."""
        handle = _Handle()
        self._call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(start))
        return bytes(handle)

    def open(self, handle: bytes) -> int:
        """The address of another process's allocation here."""
        start = ctypes.c_uint64()
        own = _Handle.from_buffer_copy(handle)
        self._call("cuIpcOpenMemHandle_v2", ctypes.byref(start), own, ctypes.c_uint(_PEER_ACCESS))
        return start.value

    def close(self, start: int) -> None:
        """Give an opened allocation back."""
        self._call("cuIpcCloseMemHandle", ctypes.c_uint64(start))

    def view(self, start: int, size: int) -> Tensor:
        """The bytes at an address, not copied."""
        return torch.as_tensor(_Bytes(start, size), device=self._device)

    def wait(self) -> None:
        """Return when the device has done all that it was given."""
        torch.cuda.synchronize(self._device)

    def _call(self, name: str, *arguments: Any) -> None:
        code: int = getattr(self._driver, name)(*arguments)
        if code:
            text = ctypes.c_char_p()
            self._driver.cuGetErrorName(code, ctypes.byref(text))
            reason = text.value.decode() if text.value else str(code)
            raise MemoryNotShared(f"{name} answered {reason}")


@final
class _Bytes:
    """An address as an array of bytes, as PyTorch takes it from other libraries."""

    def __init__(self, start: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (start, False),
            "version": 3,
        }


@functools.cache
def cuda_memory() -> SharedMemory:
    """That of this process's GPU."""
    return CudaMemory()


# The owner.


def can_map(weights: Mapping[str, Tensor]) -> bool:
    """Whether every tensor is whole, on a GPU and without gaps, so that it can be read in place."""
    return all(
        type(tensor) is Tensor and tensor.is_cuda and tensor.is_contiguous()  # a shard is not plain
        for tensor in weights.values()
    )


def describe(weights: Mapping[str, Tensor], memory: SharedMemory) -> MappedWeights:
    """Where tensors are, for a process on the same GPU; all that was launched is waited for.

    `MemoryNotShared` if the driver cannot share one of their allocations. They must live, and must
    not change, until no process reads them.
    """
    memory.wait()
    found: dict[int, int] = {}
    allocations: list[tuple[bytes, int]] = []
    places: list[PlacedTensor] = []
    total = 0
    for name, tensor in weights.items():
        form = (name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        size = tensor.numel() * tensor.element_size()
        if not size:
            places.append((*form, -1, 0))
            continue
        start, length = memory.allocation(tensor.data_ptr())
        if start not in found:
            found[start] = len(allocations)
            allocations.append((memory.handle(start), length))
        places.append((*form, found[start], tensor.data_ptr() - start))
        total += size
    return MappedWeights(
        gpu=memory.gpu(), allocations=tuple(allocations), tensors=tuple(places), bytes=total
    )


def make_probe(memory: SharedMemory, device: torch.device) -> tuple[MemoryProbe, Tensor]:
    """A probe of this process's memory, and the tensor that must live as long as it is used."""
    secret = secrets.token_bytes(16)
    kept = torch.tensor(list(secret), dtype=torch.uint8).to(device)
    return MemoryProbe(weights=describe({"probe": kept}, memory), secret=secret.hex()), kept


# The reader.


@contextmanager
def opened(part: MappedWeights, memory: SharedMemory) -> Generator[dict[str, Tensor]]:
    """The tensors of another process, which are there until the end of the block.

    `MemoryNotShared` if it is on another GPU, or the driver refuses.
    """
    here = memory.gpu()
    if here != part.gpu:
        raise MemoryNotShared(f"the weights are on {part.gpu}, and this process is on {here}")
    starts: list[int] = []
    try:
        for handle, _ in part.allocations:
            starts.append(memory.open(handle))
        sizes = [size for _, size in part.allocations]
        wholes = [memory.view(*one) for one in zip(starts, sizes, strict=True)]
        yield {placed[0]: _placed(wholes, placed) for placed in part.tensors}
    finally:
        memory.wait()
        for start in starts:
            memory.close(start)


def _placed(wholes: list[Tensor], placed: PlacedTensor) -> Tensor:
    _, dtype, shape, index, first = placed
    kind: torch.dtype = getattr(torch, dtype)
    if index < 0:
        return torch.empty(shape, dtype=kind)
    size = prod(shape) * kind.itemsize
    return wholes[index][first : first + size].view(kind).view(shape)


def can_read(probe: MemoryProbe, memory: SharedMemory | None = None) -> bool:
    """Whether this process reads the owner's memory: it is on the same GPU, and may open it.

    `memory` None: that of this process's GPU, if it has one.
    """
    if memory is None:
        if not torch.cuda.is_available():
            return False
        memory = cuda_memory()
    try:
        memory.wait()
        with opened(probe.weights, memory) as found:
            return bytes(found["probe"].tolist()).hex() == probe.secret
    except NOT_SHARED:
        return False
