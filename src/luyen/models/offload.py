"""Activations in host memory between the forward and the backward pass.

What autograd keeps of the decoder layers is copied out as soon as it is made, and copied back when
its gradient is due. Copies run in the order of the device's own work, so nobody waits for them to
be asked for. Where layers are checkpointed, their inputs are all that is kept, and all that moves.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn

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
def kept_on_host(model: nn.Module) -> Iterator[None]:
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
