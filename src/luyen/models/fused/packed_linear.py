"""Several linear layers of one input as one matrix, without changing what they are.

Each layer keeps its own parameters, which become rows of one storage: optimizer, checkpoints and
export see the layers, and the matrix product sees the whole.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Product: TypeAlias = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""`x @ weight.T + bias`, without gradients."""


def unpackable(modules: Sequence[nn.Module]) -> str | None:
    """Why these layers cannot be one matrix; None when they can."""
    linears = [m for m in modules if type(m) is nn.Linear]
    if len(linears) != len(modules):
        return "a projection is not a plain linear layer (an adapter, or quantised)"
    weights = [m.weight for m in linears]
    if len({(w.dtype, w.device, w.shape[1]) for w in weights}) != 1:
        return "the projections differ in type, device or input width"
    if len({m.bias is None for m in linears}) != 1:
        return "some projections have a bias and some have none"
    if any(m._forward_hooks or m._forward_pre_hooks for m in linears):
        return "a projection has a hook"
    return None


@final
class PackedLinear:
    """Linear layers whose outputs stand side by side.

    The storage follows the parameters: where they were moved or copied since (to another device,
    by `deepcopy`), it is rebuilt at the next call.
    """

    def __init__(self, modules: Sequence[nn.Linear]) -> None:
        assert unpackable(modules) is None
        self.modules = list(modules)
        self.product: Product = F.linear
        """What multiplies; any function with the values of `F.linear`."""
        self._pack()

    def __call__(self, x: Tensor) -> Tensor:
        """`[..., sum of outputs]`; gradients reach each layer's own parameters."""
        if not self._is_whole():
            self._pack()
        if not torch.is_grad_enabled():
            return self.product(x, self.weight, self.bias)
        biases = () if self.bias is None else tuple(m.bias for m in self.modules)
        weights = tuple(m.weight for m in self.modules)
        return _PackedLinear.apply(x, self.weight, self.bias, self.product, *weights, *biases)

    def _pack(self) -> None:
        self.weight = pack_rows([m.weight for m in self.modules])
        has_bias = self.modules[0].bias is not None
        self.bias = pack_rows([m.bias for m in self.modules]) if has_bias else None

    def _is_whole(self) -> bool:
        if self.bias is not None and not _lie_in(self.bias, [m.bias for m in self.modules]):
            return False
        return _lie_in(self.weight, [m.weight for m in self.modules])


def _lie_in(storage: Tensor, parts: Sequence[Tensor]) -> bool:
    """Whether the parts are the rows of this storage, in order."""
    at = storage.data_ptr()
    for part in parts:
        if part.data_ptr() != at:
            return False
        at += part.numel() * part.element_size()
    return True


def pack_linear(modules: Sequence[nn.Linear]) -> PackedLinear:
    """The layers as one; their parameters stay the same objects with the same values."""
    return PackedLinear(modules)


def pack_rows(parameters: Sequence[Tensor]) -> Tensor:
    """One tensor of all rows, of which each parameter becomes a part, in order."""
    with torch.no_grad():
        whole = torch.cat([p.detach() for p in parameters])
        for parameter, part in zip(
            parameters, whole.split([p.shape[0] for p in parameters]), strict=True
        ):
            parameter.data = part
    return whole


@final
class _PackedLinear(torch.autograd.Function):
    """The whole matrix forward; backward hands each parameter its rows of one gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        product: Product,
        *parameters: Tensor,
    ) -> Tensor:
        """`x` times the whole."""
        ctx.rows = [p.shape[0] for p in parameters if p.dim() == 2]
        is_learning = any(p.requires_grad for p in parameters[: len(ctx.rows)])
        ctx.save_for_backward(x if is_learning else None, weight)
        return product(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Gradients of the input and of the parameters that learn."""
        x, weight = ctx.saved_tensors
        flat = grads[0].reshape(-1, weight.shape[0])
        below = None
        if ctx.needs_input_grad[0]:
            below = (flat @ weight).view(*grads[0].shape[:-1], -1)
        wanted = ctx.needs_input_grad[4:]
        count = len(ctx.rows)
        learned: list[Tensor | None] = [None] * len(wanted)
        if any(wanted[:count]):
            learned[:count] = (flat.t() @ x.reshape(-1, x.shape[-1])).split(ctx.rows)
        if any(wanted[count:]):
            learned[count:] = flat.sum(0).split(ctx.rows)
        shares = (g if w else None for g, w in zip(learned, wanted, strict=True))
        return below, None, None, None, *shares
