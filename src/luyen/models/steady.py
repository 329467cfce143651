"""Element-wise functions whose result for a number does not depend on how many there are.

PyTorch computes `silu`, `tanh` or `cos` in vectors of up to 32 numbers, and finishes the share of
each thread in scalar code, which may differ in the last bit. A number then changes with its place,
and so with the batch. The remedy is a few numbers more: every share is made of whole vectors then.
"""

from collections.abc import Callable
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_VECTOR = 32
_GRAIN = 32768
"""Numbers that PyTorch gives to a thread before it calls for another one."""
_ACTIVATIONS = ("torch.nn.modules.activation", "transformers.activations")
_NOT_ELEMENTWISE = (nn.Softmax, nn.LogSoftmax, nn.Softmin, nn.Softmax2d, nn.GLU)


def is_whole(numbers: int) -> bool:
    """Whether PyTorch's threads would share this many numbers in whole vectors."""
    shares = max(1, min(torch.get_num_threads(), -(-numbers // _GRAIN)))
    return numbers % (_VECTOR * shares) == 0


def steady(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """`function(x)`, element by element; equal numbers give equal bits wherever they stand."""
    count = x.numel()
    is_dense = x.is_contiguous() or (x.stride(-1) == 1 and x.shape[-1] % _VECTOR == 0)
    if is_dense and is_whole(count):
        return function(x)
    total = count
    while not is_whole(total):
        total = -(-(total + 1) // _VECTOR) * _VECTOR
    return function(F.pad(x.reshape(-1), (0, total - count)))[:count].view(x.shape)


@final
class _Activation(nn.Module):
    """An activation of the model, steadied."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        """`inner(x)`."""
        return steady(self.inner, x)


@final
class _Rotary(nn.Module):
    """A rotary embedding of the model, whose cosines and sines do not depend on their number."""

    def __init__(self, inner: nn.Module, widths: set[int]) -> None:
        """`widths` are how many numbers a position has, in any intermediate result."""
        super().__init__()
        self.inner = inner
        self._widths = widths

    def forward(self, x: Tensor, position_ids: Tensor, *rest: Any, **more: Any) -> Any:
        """Cosines and sines of these positions."""
        count = position_ids.shape[-1]
        total, rows = count, position_ids.numel() // count
        while not all(is_whole(rows * total * width) for width in self._widths):
            total += 1
        if total == count:
            return self.inner(x, position_ids, *rest, **more)
        padded = F.pad(position_ids, (0, total - count))
        cos, sin = self.inner(x, padded, *rest, **more)
        return cos[:, :count], sin[:, :count]


def steady_modules(model: nn.Module) -> None:
    """Replace the model's activations and rotary embeddings by steadied ones, in place."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if _is_activation(child):
                setattr(parent, name, _Activation(child))
            elif widths := _rotary_widths(child):
                setattr(parent, name, _Rotary(child, widths))


def _is_activation(module: nn.Module) -> bool:
    is_known = type(module).__module__ in _ACTIVATIONS
    is_bare = not list(module.parameters()) and not list(module.children())
    return is_known and is_bare and not isinstance(module, _NOT_ELEMENTWISE)


def _rotary_widths(module: nn.Module) -> set[int]:
    """Numbers of a position: one a frequency, and two once sine and cosine are laid out."""
    buffers = dict(module.named_buffers(recurse=False))
    sizes = [b.numel() for name, b in buffers.items() if name.endswith("inv_freq")]
    return {size * copies for size in sizes for copies in (1, 2)}
