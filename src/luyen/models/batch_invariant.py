"""Operations that give the same bits in any batch and any run: element-wise, gathers, embeddings.

PyTorch computes `silu`, `tanh` or `cos` in vectors of up to 32 numbers, and finishes the share of
each thread in scalar code, which may differ in the last bit. A number then changes with its place,
and so with the batch. The remedy is a few numbers more: every share is made of whole vectors then.
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from inspect import signature
from types import MethodType
from typing import Any, final

import torch
import torch.nn.functional as F
import torch.utils.deterministic
from torch import Tensor, nn

from luyen.models.device_lock import MODES

_VECTOR = 32
_GRAIN = 32768
"""Numbers that PyTorch gives to a thread before it calls for another one."""
_ACTIVATIONS = ("torch.nn.modules.activation", "transformers.activations")
_NOT_ELEMENTWISE = (nn.Softmax, nn.LogSoftmax, nn.Softmin, nn.Softmax2d, nn.GLU)


def is_whole(numbers: int) -> bool:
    """Whether PyTorch's threads would share this many numbers in whole vectors."""
    shares = max(1, min(torch.get_num_threads(), -(-numbers // _GRAIN)))
    return numbers % (_VECTOR * shares) == 0


def batch_invariant(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
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
        return batch_invariant(self.inner, x)


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

    def __getattr__(self, name: str) -> Any:
        """What the model reads of its own embedding, such as its `config`."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)


def batch_invariant_modules(model: nn.Module) -> None:
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


# PyTorch's deterministic mode: sums on a GPU in a fixed order.

_FILL: Any = torch.utils.deterministic


@contextmanager
def deterministic_algorithms() -> Generator[None]:
    """Kernels that are launched here add in a fixed order; those that cannot raise an error.

    Some operators have no other switch. It is process-wide, so it is on for single calls only: it
    would slow down, or refuse, operators that repeat anyway.
    """
    with MODES:
        before = torch.are_deterministic_algorithms_enabled()
        is_warning = torch.is_deterministic_algorithms_warn_only_enabled()
        is_filling = _FILL.fill_uninitialized_memory
        torch.use_deterministic_algorithms(True)
        _FILL.fill_uninitialized_memory = False
        try:
            yield
        finally:
            _FILL.fill_uninitialized_memory = is_filling
            torch.use_deterministic_algorithms(before, warn_only=is_warning)


# Row gather with repeated indices, whose gradient is bitwise reproducible.

_FEW = 4096
"""Up to 3,072 rows PyTorch's kernel rounds between additions; it is given fp32 then."""


def gather_rows(x: Tensor, rows: Tensor) -> Tensor:
    """`x[rows]` for `[n, width]`; the gradient is the same in every run, however often a row is."""
    if not x.is_cuda:
        return x.index_select(0, rows)
    found: Any = _GatherRows.apply(x, rows)
    return found


@final
class _GatherRows(torch.autograd.Function):
    """Gradients of a row are summed in fp32 and in a fixed order.

    PyTorch's own gradient adds them as threads come along, and rounds to the type of `x` each time.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.count = x.shape[0]
        return x.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (rows,) = ctx.saved_tensors
        grad = grads[0].float() if rows.numel() <= _FEW else grads[0]
        with deterministic_algorithms():
            total = torch.ops.aten.embedding_dense_backward(grad, rows, ctx.count, -1, False)
        return total.to(grads[0].dtype), None


# Embeddings whose gradient is bitwise reproducible on a GPU.


def deterministic_embeddings(model: nn.Module) -> None:
    """Let every embedding look up each distinct token once, and spread the rows from there.

    What a class makes of its rows (a scale) stays its own. One whose forward takes more than tokens
    (OPT's positions) is left alone, and so is an adapter of an embedding.
    """
    for module in model.modules():
        if isinstance(module, nn.Embedding) and len(signature(module.forward).parameters) == 1:
            vars(module)["forward"] = MethodType(_forward, module)


def _forward(self: nn.Embedding, tokens: Tensor) -> Tensor:
    plain: Any = type(self).forward
    if not (torch.is_grad_enabled() and self.weight.requires_grad):
        return plain(self, tokens)
    distinct, place = tokens.unique(return_inverse=True)
    return gather_rows(plain(self, distinct), place.flatten()).unflatten(0, tokens.shape)
