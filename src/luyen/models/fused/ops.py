"""Fused functions of a decoder layer, with references: RMSNorm, rotary positions, gated MLP."""

from dataclasses import dataclass
from typing import Any, Literal, final

import torch
import torch.nn.functional as F
from torch import Tensor

from luyen.models.batch_invariant import batch_invariant

# Forward passes of our autograd functions without autograd's bookkeeping.


def apply_function(function: type[torch.autograd.Function], *inputs: Any) -> Any:
    """`function.apply`; without gradients, only its forward.

    Reading a prompt is a thousand small calls, and the host is slower than the device at them.
    """
    if torch.is_grad_enabled():
        return function.apply(*inputs)
    return function.forward(_NoGradContext(), *inputs)


@final
class _NoGradContext:
    """The context of a function that will not be called backward: it takes all and keeps none."""

    def save_for_backward(self, *_: Tensor | None) -> None:
        """Nothing to save for."""

    def set_materialize_grads(self, _: bool) -> None:
        """There will be none."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class NormStyle:
    """How an architecture writes RMSNorm.

    Example:
        >>> NormStyle(eps=1e-6, offset=1.0, is_wide=True).offset
        1.0
    """

    eps: float
    """Added to the mean square."""
    offset: float = 0.0
    """Added to the weight (Gemma: 1)."""
    is_wide: bool = False
    """Whether the weight is applied in fp32, before rounding (Gemma, gpt-oss) and not after it."""


def add_rms_norm(
    hidden: Tensor, residual: Tensor | None, weight: Tensor, style: NormStyle
) -> tuple[Tensor, Tensor]:
    """The norm of `hidden + residual`, and that sum; without a residual the sum is `hidden`.

    The sum is rounded to the type of `hidden` before the norm reads it, so that the result is the
    same whether the addition is made here or earlier. A row never depends on other rows.
    """
    if not hidden.is_cuda:
        return reference_add_rms_norm(hidden, residual, weight, style)
    made = apply_function(AddRmsNorm, hidden, residual, weight, style)
    return (made, hidden) if residual is None else made


def reference_add_rms_norm(
    hidden: Tensor, residual: Tensor | None, weight: Tensor, style: NormStyle
) -> tuple[Tensor, Tensor]:
    """The same in plain PyTorch, in the rounding order of the Hugging Face modules."""
    total = hidden if residual is None else residual + hidden
    wide = total.float()
    scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + style.eps)
    if style.is_wide:
        factor = weight.float() + style.offset if style.offset else weight
        return (scaled * factor).to(total.dtype), total
    assert style.offset == 0.0, "a weight with an offset is applied in fp32"
    return weight * scaled.to(total.dtype), total


@final
class AddRmsNorm(torch.autograd.Function):
    """Triton kernels: `(normed, sum)` with a residual, and `normed` alone without one."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, residual: Tensor | None, weight: Tensor, style: NormStyle
    ) -> Any:
        """Norm of the sum."""
        from luyen.models.cuda.norm_gate_kernels import norm_forward

        normed, total, inverse = norm_forward(
            hidden,
            residual,
            weight,
            eps=style.eps,
            offset=style.offset,
            is_wide=style.is_wide,
        )
        ctx.save_for_backward(total, weight, inverse)
        ctx.style, ctx.has_residual = style, residual is not None
        ctx.set_materialize_grads(False)
        return (normed, total) if residual is not None else normed

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        """One gradient for both summands, and the weight's in a fixed order of addition."""
        from luyen.models.cuda.norm_gate_kernels import norm_backward

        total, weight, inverse = ctx.saved_tensors
        passed = grads[1] if ctx.has_residual else None
        if grads[0] is None:
            return passed, passed, None, None
        summed, learned = norm_backward(
            grads[0],
            passed,
            total,
            weight,
            inverse,
            offset=ctx.style.offset,
            needs_weight=ctx.needs_input_grad[2],
        )
        return summed, summed if ctx.has_residual else None, learned, None


# Rotary positions on queries and keys, with the norm per head that some architectures put
# first.
#
# The rotation is the one of Llama: a number of the first half is paired with one of the second
# half. Cosines and sines of one half are read; a layout that repeats them for the other half is
# fine.


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """How the columns of a joint projection are divided: queries, then keys, then values.

    Example:
        >>> Heads(queries=9, keys=3, width=64).columns
        960
    """

    queries: int
    """Query heads."""
    keys: int
    """Key heads, and as many value heads."""
    width: int
    """Numbers of a head."""

    @property
    def columns(self) -> int:
        """Columns of the joint projection."""
        return (self.queries + 2 * self.keys) * self.width

    def split(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Views `[tok, heads, width]` of queries, keys and values."""
        sizes = [n * self.width for n in (self.queries, self.keys, self.keys)]
        q, k, v = (x.unflatten(-1, (-1, self.width)) for x in qkv.split(sizes, -1))
        return q, k, v


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HeadNorms:
    """RMSNorm over each query head and each key head.

    Example:
        >>> HeadNorms(query=torch.ones(4), key=torch.ones(4), style=NormStyle(eps=1e-6)).style.eps
        1e-06
    """

    query: Tensor
    """Weight `[width]` for queries."""
    key: Tensor
    """Weight `[width]` for keys."""
    style: NormStyle
    """How the norm is written."""


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Joint:
    """Queries, keys and values as one projection made them, and how they are to be turned.

    Example:
        >>> heads = Heads(queries=2, keys=1, width=4)
        >>> angles = {"cos": torch.ones(3, 4), "sin": torch.zeros(3, 4)}
        >>> Joint(qkv=torch.ones(3, 16), heads=heads, rotated=4, **angles).turned()[0].shape
        torch.Size([3, 2, 4])
    """

    qkv: Tensor
    """`[tok, columns]`."""
    cos: Tensor
    """`[tok, at least rotated / 2]`."""
    sin: Tensor
    """The same shape."""
    heads: Heads
    """How the columns are divided."""
    rotated: int
    """Numbers of a head that turn."""

    def turned(self) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values `[tok, heads, width]`."""
        return rotated_heads(self.qkv, self.cos, self.sin, self.heads, self.rotated, None)


def rotated_heads(
    qkv: Tensor, cos: Tensor, sin: Tensor, heads: Heads, rotated: int, norms: HeadNorms | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values `[tok, heads, width]` of a joint projection `[tok, columns]`.

    The first `rotated` numbers of each head turn by the angles of `cos` and `sin`, `[tok, at least
    rotated / 2]`. Values are a view of `qkv`.
    """
    assert norms is None or rotated == heads.width, "a normed head is rotated as a whole"
    if qkv.is_cuda:
        weights = (None, None) if norms is None else (norms.query, norms.key)
        style = None if norms is None else norms.style
        return apply_function(RotatedHeads, qkv, cos, sin, *weights, heads, rotated, style)
    q, k, v = heads.split(qkv)
    if norms is not None:
        q = reference_add_rms_norm(q, None, norms.query, norms.style)[0]
        k = reference_add_rms_norm(k, None, norms.key, norms.style)[0]
    return reference_rotated(q, cos, sin, rotated), reference_rotated(k, cos, sin, rotated), v


def apply_rotary(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, rotated: int
) -> tuple[Tensor, Tensor]:
    """The same for queries and keys `[tok, heads, width]` from projections of their own."""
    if q.is_cuda:
        return apply_function(Rotated, q, k, cos, sin, rotated)
    return reference_rotated(q, cos, sin, rotated), reference_rotated(k, cos, sin, rotated)


def reference_rotated(x: Tensor, cos: Tensor, sin: Tensor, rotated: int) -> Tensor:
    """Heads `[tok, heads, width]`, rotated in plain PyTorch."""
    half = rotated // 2
    c, s = cos[:, None, :half], sin[:, None, :half]
    first, second, rest = x.split([half, half, x.shape[-1] - rotated], -1)
    return torch.cat([first * c - second * s, second * c + first * s, rest], -1).to(x.dtype)


@final
class Rotated(torch.autograd.Function):
    """Triton kernel for queries and keys; the backward pass turns the other way."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, rotated: int) -> Any:
        """Rotated copies."""
        from luyen.models.cuda.rotary_kernels import rotate

        ctx.save_for_backward(cos, sin)
        ctx.rotated = rotated
        return rotate(q, k, cos, sin, rotated)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Rotated back."""
        from luyen.models.cuda.rotary_kernels import rotate

        cos, sin = ctx.saved_tensors
        q, k = rotate(grads[0], grads[1], cos, sin, ctx.rotated, is_inverse=True)
        return q, k, None, None, None


@final
class RotatedHeads(torch.autograd.Function):
    """Triton kernels for a joint projection; its gradient is written as one tensor."""

    @staticmethod
    def forward(
        ctx: Any,
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        query_weight: Tensor | None,
        key_weight: Tensor | None,
        heads: Heads,
        rotated: int,
        style: NormStyle | None,
    ) -> Any:
        """Queries, keys and values."""
        from luyen.models.cuda.rotary_kernels import norm_rotate, rotate

        ctx.heads, ctx.rotated, ctx.style = heads, rotated, style
        q, k, v = heads.split(qkv)
        if style is None:
            ctx.save_for_backward(cos, sin)
            return (*rotate(q, k, cos, sin, rotated), v)
        assert query_weight is not None
        assert key_weight is not None
        ctx.save_for_backward(cos, sin, qkv, query_weight, key_weight)
        flags = (style.eps, style.offset, style.is_wide)
        return (*norm_rotate(q, k, cos, sin, query_weight, key_weight, *flags), v)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Gradient of the joint projection, and of the norms' weights."""
        from luyen.models.cuda.rotary_kernels import norm_rotate_backward, rotate

        cos, sin, *rest = ctx.saved_tensors
        whole = grads[0].new_empty(grads[0].shape[0], ctx.heads.columns)
        q_grad, k_grad, v_grad = ctx.heads.split(whole)
        v_grad.copy_(grads[2])
        learned: tuple[Tensor | None, Tensor | None] = (None, None)
        if ctx.style is None:
            out = (q_grad, k_grad)
            rotate(grads[0], grads[1], cos, sin, ctx.rotated, is_inverse=True, out=out)
        else:
            q, k, _ = ctx.heads.split(rest[0])
            given = ((q, grads[0], rest[1], q_grad), (k, grads[1], rest[2], k_grad))
            learned = norm_rotate_backward(given, cos, sin, ctx.style.eps, ctx.style.offset)
        return whole, None, None, *learned, None, None, None


# The gate of an MLP: `act(gate) * up`.

Activation = Literal["silu", "gelu_tanh", "gelu"]


def gated(gate_up: Tensor, activation: Activation) -> Tensor:
    """`[..., inner]` from `[..., 2 x inner]`, whose first half is the gate."""
    if not gate_up.is_cuda:
        gate, up = gate_up.chunk(2, -1)
        return reference_gated(gate, up, activation)
    return apply_function(Gated, gate_up, None, activation)


def gated_pair(gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
    """The same of two tensors."""
    if not gate.is_cuda:
        return reference_gated(gate, up, activation)
    return apply_function(Gated, gate, up, activation)


def reference_gated(gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
    """The same in plain PyTorch: the activation is rounded before it is multiplied."""
    return batch_invariant(_FUNCTIONS[activation], gate) * up


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


_FUNCTIONS: dict[str, Any] = {"silu": F.silu, "gelu_tanh": _gelu_tanh, "gelu": F.gelu}


@final
class Gated(torch.autograd.Function):
    """Triton kernels; `up` is None where `gate` holds both."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor | None, activation: Activation) -> Tensor:
        """`act(gate) * up`."""
        from luyen.models.cuda.norm_gate_kernels import gated_forward

        ctx.save_for_backward(gate, up)
        ctx.activation = activation
        return gated_forward(gate, up, activation)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Gradients in the layout of the inputs."""
        from luyen.models.cuda.norm_gate_kernels import gated_backward

        gate, up = ctx.saved_tensors
        return (*gated_backward(grads[0], gate, up, ctx.activation), None)
