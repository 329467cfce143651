"""The worker extension: it runs inside vLLM's workers, receives weights and says what arrived.

A copy of this file is put on the path of the server, whose environment need not have Luyen: only
torch, safetensors and the standard library may be imported here. vLLM mixes the class into its
worker (`--worker-extension-cls`); its methods are called over `/collective_rpc`.
"""

import base64
from collections.abc import Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from safetensors.torch import load_file
from torch import Tensor

dist: Any = torch.distributed
PREFIX = "luyen_weights"
"""Prefix of the store's keys on both sides of a group."""

# Digests as `luyen.models.weights` defines them; a test keeps both equal.

_TABLE = 1 << 20
_GOLDEN = -0x61C8864680B583EB
_MIX = -0x4B47D0C5A1A6AD2D
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int32, 16: torch.int32}
_MASK = (1 << 64) - 1


def tensor_digest(tensor: Tensor) -> str:
    """Type, shape and digest of a tensor, computed on its device.

    Example:
        >>> tensor_digest(torch.zeros(2, 3))
        'float32 [2, 3] 0000000000000000'
    """
    flat = tensor.detach().reshape(-1).contiguous()
    bits = flat.view(_WORDS[flat.element_size()])
    mixed = torch.arange(1, _TABLE + 1, dtype=torch.int64, device=bits.device) * _GOLDEN
    mixed = (mixed ^ (mixed >> 32)) * _MIX
    constants = (mixed ^ (mixed >> 29)) | 1
    total = 0
    for row, start in enumerate(range(0, len(bits), _TABLE)):
        words = bits[start : start + _TABLE].to(torch.int64)
        total += int((words * constants[: len(words)]).sum()) * _row_constant(row)
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{dtype} {list(tensor.shape)} {total & _MASK:016x}"


def _row_constant(row: int) -> int:
    if row == 0:
        return 1
    mixed = (row * (_GOLDEN & _MASK)) & _MASK
    mixed = ((mixed ^ (mixed >> 29)) * (_MIX & _MASK)) & _MASK
    return (mixed ^ (mixed >> 32)) | 1


def make_group(
    address: str,
    port: int,
    rank: int,
    size: int,
    backend: str,
    timeout_s: float,
    prefixes: Iterable[str] = (PREFIX,),
) -> Any:
    """A process group apart from the default one; rank 0 is the trainer, which listens."""
    timeout = timedelta(seconds=timeout_s)
    store = dist.TCPStore(
        address, port, size, is_master=rank == 0, timeout=timeout, wait_for_workers=False
    )
    scoped: Any = store
    for prefix in prefixes:
        scoped = dist.PrefixStore(prefix, scoped)
    if backend == "gloo":
        return dist.ProcessGroupGloo(scoped, rank, size, timeout)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(scoped, rank, size, options)


def make_communicator(address: str, port: int, size: int, device: torch.device) -> Any:
    """The trainer's end of vLLM's weight transfer; runs in the trainer, where vLLM is installed."""
    from vllm.distributed.device_communicators.pynccl import (  # pyright: ignore[reportMissingImports]
        PyNcclCommunicator,
    )
    from vllm.distributed.utils import (  # pyright: ignore[reportMissingImports]
        StatelessProcessGroup,
    )

    group: Any = StatelessProcessGroup.create(host=address, port=port, rank=0, world_size=size)
    communicator: Any = PyNcclCommunicator
    return communicator(group, device=device)


def broadcast(group: Any, tensor: Tensor) -> None:
    """Send a tensor from rank 0, or receive it in place."""
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = 0, 0
    group.broadcast([tensor], options).wait()


def export_handle(tensor: Tensor) -> list[Any]:
    """What another process on this GPU needs to map a contiguous tensor, as JSON.

    The memory must stay as it is until the other process has read it.
    """
    storage: Any = tensor.untyped_storage()
    _, handle, size, offset, counter, counter_offset, event, must_wait = storage._share_cuda_()
    words = [base64.b64encode(part).decode() for part in (handle, counter, event)]
    place = [size, offset, counter_offset, must_wait, tensor.storage_offset()]
    dtype = str(tensor.dtype).removeprefix("torch.")
    return [gpu_identity(tensor.device), dtype, list(tensor.shape), words, place]


def map_handle(described: list[Any], device: torch.device) -> Tensor:
    """The tensor of another process that `export_handle` described; its memory is that process's.

    A RuntimeError if it is on another GPU than `device`.
    """
    gpu, dtype, shape, words, place = described
    if gpu != gpu_identity(device):
        raise RuntimeError(f"the tensor is on {gpu}, and this worker on {gpu_identity(device)}")
    handle, counter, event = (base64.b64decode(word) for word in words)
    size, offset, counter_offset, must_wait, start = place
    untyped: Any = torch.UntypedStorage
    storage = untyped._new_shared_cuda(
        device.index or 0, handle, size, offset, counter, counter_offset, event, must_wait
    )
    kind = getattr(torch, dtype)
    whole = torch.empty(0, dtype=kind, device=device).set_(storage)
    count = torch.Size(shape).numel()
    return whole[start : start + count].view(shape)


def gpu_identity(device: torch.device) -> str:
    """The GPU itself, whatever number a process gives it."""
    return str(torch.cuda.get_device_properties(device).uuid)


def refresh_packed_copies(model: Any) -> None:
    """Pack again the weights that layers on a CPU multiply with a packed copy of.

    vLLM 0.32 leaves an output layer that is tied to the embedding with the copy of former weights.
    """
    for layer in model.modules():
        if "cpu_linear" in vars(layer) and layer.weight.numel() > 0:
            layer.quant_method.process_weights_after_loading(layer)


class WeightExtension:
    """Mixed into vLLM's worker, whose attributes `rank`, `device` and `model_runner` it uses."""

    def luyen_join_group(
        self: Any, address: str, port: int, size: int, backend: str, timeout_s: float
    ) -> dict[str, Any]:
        """Join the trainer's group, as the rank after this worker's own."""
        self.luyen_group = make_group(address, port, self.rank + 1, size, backend, timeout_s)
        return {"rank": self.rank + 1}

    def luyen_receive(self: Any, forms: list[list[Any]], version: int) -> dict[str, Any]:
        """Receive tensors, each `[name, dtype, shape]`, and load them as this version."""

        def received() -> Iterator[tuple[str, Tensor]]:
            for name, dtype, shape in forms:
                tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=self.device)
                broadcast(self.luyen_group, tensor)
                yield name, tensor

        return self.luyen_load(received(), version)

    def luyen_map(self: Any, tensors: list[list[Any]], version: int) -> dict[str, Any]:
        """Load tensors that the trainer has on this GPU, each `[name, handle]`, as this version."""

        def mapped() -> Iterator[tuple[str, Tensor]]:
            for name, described in tensors:
                yield name, map_handle(described, self.device)

        found = self.luyen_load(mapped(), version)
        # The trainer may change its memory as soon as the reply arrives.
        torch.cuda.synchronize(self.device)
        return found

    def luyen_load_folder(self: Any, folder: str, version: int) -> dict[str, Any]:
        """Load the safetensors files of a folder as this version."""

        def read() -> Iterator[tuple[str, Tensor]]:
            for file in sorted(Path(folder).glob("*.safetensors")):
                yield from load_file(file, device=str(self.device)).items()

        return self.luyen_load(read(), version)

    def luyen_load(
        self: Any, tensors: Iterable[tuple[str, Tensor]], version: int
    ) -> dict[str, Any]:
        """Load tensors, digesting each one as the model takes it."""
        self.luyen_version, self.luyen_texts = None, {}
        texts: dict[str, str] = {}

        def noted() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in tensors:
                texts[name] = tensor_digest(tensor)
                yield name, tensor

        self.model_runner.reload_weights(weights_iterator=noted())
        refresh_packed_copies(self.model_runner.get_model())
        self.luyen_version, self.luyen_texts = version, texts
        return {"tensors": len(texts)}

    def luyen_note_version(self: Any, version: int) -> dict[str, Any]:
        """Note that vLLM's transfer engine has loaded this version."""
        self.luyen_version, self.luyen_texts = version, {}
        return {"version": version}

    def luyen_digests(self: Any) -> dict[str, str]:
        """Digests of the tensors that were loaded last."""
        return self.luyen_texts

    def luyen_weight_version(self: Any) -> dict[str, Any]:
        """The version that was loaded last; None: none was, or loading it failed."""
        return {"version": vars(self).get("luyen_version")}
