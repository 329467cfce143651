"""Device memory saved: activations and idle weights in host memory, feed-forward layers in tiles.

What autograd keeps of the decoder layers is copied out as soon as it is made, and copied back when
its gradient is due. Copies are ordered with the device's own work, so the host waits for none of
them. With activation checkpointing only the inputs of layers are kept, and only they move.
"""

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import MethodType
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from luyen.base.errors import UserError

_SMALLEST = 1 << 20
"""Bytes below which a tensor stays: the copy would cost more than the room is worth."""


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Moved:
    """A tensor that waits in host memory.

    Example:
        >>> _Moved(copy=torch.ones(2), device=torch.device("cpu")).back()
        tensor([1., 1.])
    """

    copy: Tensor
    """Its numbers."""
    device: torch.device
    """Where they are computed with."""

    def back(self) -> Tensor:
        """The tensor where it was."""
        return self.copy.to(self.device, non_blocking=True)


@contextmanager
def offload_activations(model: nn.Module) -> Iterator[None]:
    """What autograd saves inside goes to host memory, bit for bit.

    The model's own parameters and buffers stay, and so does everything on a CPU, where host memory
    is the device's.
    """
    if not torch.is_grad_enabled():
        yield
        return
    # By storage: layers save transposed weights and rows of packed ones, which are views.
    own = {_address(x) for x in (*model.parameters(), *model.buffers())}

    def pack(x: Tensor) -> Tensor | _Moved:
        if not is_worth_moving(x) or _address(x) in own:
            return x
        return _Moved(copy=_host_copy(x), device=x.device)

    def unpack(kept: Tensor | _Moved) -> Tensor:
        return kept.back() if isinstance(kept, _Moved) else kept

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


def is_worth_moving(x: Tensor) -> bool:
    """Whether a saved tensor takes room on a GPU that a copy would free."""
    return x.is_cuda and x.numel() * x.element_size() >= _SMALLEST


def _address(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def _host_copy(x: Tensor) -> Tensor:
    """A copy with the same strides; from a GPU into pinned memory, without waiting."""
    host = torch.empty_like(x, device="cpu", pin_memory=x.is_cuda, requires_grad=False)
    return host.copy_(x.detach(), non_blocking=True)


# Frozen weights, kept in host memory while they are not in use on the device.


@final
class OffloadedWeights:
    """The weights of a model, whose device memory is given back between two uses.

    The memory behind the tensors goes and comes; the tensors stay the same objects, and those that
    are views of one storage stay so. Copying back restores the same bits.
    """

    def __init__(self, model: nn.Module) -> None:
        """The model rests from now on."""
        pinned = next(model.parameters()).is_cuda
        self._kept: list[tuple[torch.UntypedStorage, Tensor]] = []
        for storage in _storages(model):
            whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            kept = torch.empty(whole.shape, dtype=torch.uint8, pin_memory=pinned)
            self._kept.append((storage, kept.copy_(whole)))
        self._rest()

    @contextmanager
    def awake(self) -> Generator[None]:
        """The weights are on their device inside."""
        for storage, kept in self._kept:
            storage.resize_(kept.numel())
            torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).copy_(kept)
        try:
            yield
        finally:
            self._rest()

    def _rest(self) -> None:
        for storage, _ in self._kept:
            storage.resize_(0)
        if any(storage.device.type == "cuda" for storage, _ in self._kept):
            # Other processes on the device cannot use memory that our allocator caches.
            torch.cuda.empty_cache()


def _storages(model: nn.Module) -> list[torch.UntypedStorage]:
    """The memory behind all weights, each piece once."""
    found: dict[int, torch.UntypedStorage] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        storage = tensor.untyped_storage()
        if storage.size():
            found[storage.data_ptr()] = storage
    return list(found.values())


# Feed-forward layers computed one slice of the tokens at a time.
#
# The inner activation, several times as wide as the residual stream, exists for one slice only:
# the backward pass computes a slice again before it asks for its gradient. A token's result
# does not depend on its neighbours, so slices change no bit where the matrix product promises
# as much.

_NAME = "mlp"
"""What transformers calls the feed-forward part of a decoder layer."""
_ROUTED = {"experts", "router", "gate"}
"""Parts of a layer that sends tokens to experts: its results are not one tensor a token."""
_ROWS = 256
"""Without gradients slices are not made smaller: a decode step is one slice."""


def tile_feed_forward(model: nn.Module, *, slices: int) -> int:
    """Make every feed-forward layer compute in slices, in place; how many there are.

    To be called last: what changes a layer's forward afterwards undoes it. A UserError when the
    model has none, or when experts are chosen inside them.
    """
    found = [m for name, m in model.named_modules() if name.rpartition(".")[2] == _NAME]
    routed = [m for m in found if _ROUTED & {name for name, _ in m.named_children()}]
    if not found or routed:
        why = "its feed-forward layers send tokens to experts" if routed else "it has no such layer"
        raise UserError(
            "actor_rollout_ref.model.tiled_mlp.enabled",
            True,
            f"{type(model).__name__} cannot be computed in slices: {why}",
            "set it to false",
        )
    for module in found:
        _tile(module, slices)
    return len(found)


def _tile(module: Any, slices: int) -> None:
    module.luyen_whole = module.forward
    module.luyen_slices = slices
    module.forward = MethodType(_tiled_forward, module)


def _tiled_forward(self: Any, x: Tensor) -> Tensor:
    """The layer's own forward on `[..., tok, hidden]`, slice by slice."""
    is_learning = torch.is_grad_enabled()
    size = max(-(-x.shape[-2] // self.luyen_slices), 1 if is_learning else _ROWS)
    if size >= x.shape[-2]:
        return self.luyen_whole(x)
    parts = x.split(size, -2)
    if not is_learning:
        return torch.cat([self.luyen_whole(part) for part in parts], -2)
    # There is no dropout whose mask would have to be sampled again.
    made = [
        checkpoint(self.luyen_whole, part, use_reentrant=False, preserve_rng_state=False)
        for part in parts
    ]
    return torch.cat(made, -2)
