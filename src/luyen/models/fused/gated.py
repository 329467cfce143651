"""The gate of an MLP: `act(gate) * up`."""

from typing import Any, Literal, final

import torch
import torch.nn.functional as F
from torch import Tensor

from luyen.models.fused.gradient_free import applied
from luyen.models.steady import steady

Activation = Literal["silu", "gelu_tanh", "gelu"]


def gated(gate_up: Tensor, activation: Activation) -> Tensor:
    """`[..., inner]` from `[..., 2 x inner]`, whose first half is the gate."""
    if not gate_up.is_cuda:
        gate, up = gate_up.chunk(2, -1)
        return reference_gated(gate, up, activation)
    return applied(Gated, gate_up, None, activation)


def gated_pair(gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
    """The same of two tensors."""
    if not gate.is_cuda:
        return reference_gated(gate, up, activation)
    return applied(Gated, gate, up, activation)


def reference_gated(gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
    """The same in plain PyTorch: the activation is rounded before it is multiplied."""
    return steady(_FUNCTIONS[activation], gate) * up


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


_FUNCTIONS: dict[str, Any] = {"silu": F.silu, "gelu_tanh": _gelu_tanh, "gelu": F.gelu}


@final
class Gated(torch.autograd.Function):
    """Triton kernels; `up` is None where `gate` holds both."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor | None, activation: Activation) -> Tensor:
        """`act(gate) * up`."""
        from luyen.models.cuda.gated_kernels import gated_forward

        ctx.save_for_backward(gate, up)
        ctx.activation = activation
        return gated_forward(gate, up, activation)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Gradients in the layout of the inputs."""
        from luyen.models.cuda.gated_kernels import gated_backward

        gate, up = ctx.saved_tensors
        return (*gated_backward(grads[0], gate, up, ctx.activation), None)
