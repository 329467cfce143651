"""From hidden states to scores with logits of a chunk of rows alive at a time, in both directions.

The forward pass keeps two numbers a row. The backward pass computes a chunk's logits again, turns
them into their own gradient in place, and adds its share to the gradients of the inputs.
"""

from collections.abc import Iterator
from typing import Any, TypeAlias, final

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from luyen.models.fused.packed_weights import Product
from luyen.models.logit_scores import Form, logits_to_gradient, score_logits

_NUMBERS_CUDA = 1 << 27
_NUMBERS_CPU = 1 << 23
"""Logits that exist at once."""

Scores: TypeAlias = tuple[Tensor, Tensor | None, Tensor | None]
"""Log-probability, entropy and sum of squared probabilities."""


def fused_scores(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    *,
    vocabulary: int,
    scale: float = 1.0,
    softcap: float | None = None,
    temperature: float = 1.0,
    entropy: bool = False,
    entropy_gradient: bool = True,
    sum_pi_squared: bool = False,
    product: Product = F.linear,
) -> Scores:
    """Scores of each row's target under the softmax of `hidden @ weight.T + bias`, in float32.

    Gradients reach `hidden`, `weight` and `bias` through the log-probability and, with
    `entropy_gradient`, through the entropy. The weight's is summed over chunks in float32. What is
    not asked for is None. `product` makes the logits, with the values of `F.linear`.
    """
    form = Form(vocabulary=vocabulary, scale=scale, softcap=softcap, temperature=temperature)
    wanted = (entropy, entropy_gradient, sum_pi_squared)
    found: Any = _FusedScores.apply(hidden, weight, bias, targets, form, wanted, product)
    return found


@final
class _FusedScores(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        form: Form,
        wanted: tuple[bool, bool, bool],
        product: Product,
    ) -> Scores:
        chunks = [
            score_logits(product(hidden[rows], weight, bias), targets[rows], form, wanted)
            for rows in _row_chunks(hidden, weight)
        ]
        logp, lse, entropy, peaked = (
            None if column[0] is None else torch.cat(column) for column in zip(*chunks, strict=True)
        )
        assert logp is not None
        ctx.save_for_backward(hidden, weight, bias, targets, lse, entropy)
        ctx.form, ctx.product = form, product
        ctx.set_materialize_grads(False)
        fixed = [entropy if not wanted[1] else None, peaked]
        ctx.mark_non_differentiable(*(x for x in fixed if x is not None))
        return logp, entropy, peaked

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, lse, entropy = ctx.saved_tensors
        grad_logp, grad_entropy, _ = grads
        nothing: tuple[None, ...] = (None,) * 4
        needs: tuple[bool, ...] = ctx.needs_input_grad[:3]
        if grad_logp is None and grad_entropy is None:
            return None, None, None, *nothing
        if grad_logp is None:
            grad_logp = torch.zeros_like(lse)
        sums = _GradientSums(hidden, weight, bias, needs)
        for rows in _row_chunks(hidden, weight):
            logits = ctx.product(hidden[rows], weight, bias)
            of_entropy = None if grad_entropy is None else grad_entropy[rows]
            known = (lse[rows], None if of_entropy is None else entropy[rows])
            logits_to_gradient(
                logits, targets[rows], known, (grad_logp[rows], of_entropy), ctx.form
            )
            sums.add(rows, logits)
        return *sums.finished(), *nothing


@final
class _GradientSums:
    """The gradients of a projection's inputs, added up over chunks of rows."""

    def __init__(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, needs: tuple[bool, ...]
    ) -> None:
        self._inputs = (hidden, weight, bias)
        self._hidden = torch.empty_like(hidden) if needs[0] else None
        # float64 stays float64, so that the arithmetic can be checked in it.
        exact = torch.promote_types(weight.dtype, torch.float32)
        self._weight = torch.zeros_like(weight, dtype=exact) if needs[1] else None
        wants_bias = bias is not None and needs[2]
        self._bias = weight.new_zeros(weight.shape[0], dtype=exact) if wants_bias else None

    def add(self, rows: slice, gradient: Tensor) -> None:
        """Take the gradient of the logits of these rows into account."""
        hidden, weight, _ = self._inputs
        if self._hidden is not None:
            torch.mm(gradient, weight, out=self._hidden[rows])
        if self._weight is not None:
            self._weight += _product(gradient.t(), hidden[rows])
        if self._bias is not None:
            self._bias += gradient.sum(0, dtype=self._bias.dtype)

    def finished(self) -> tuple[Tensor | None, ...]:
        """The sums, each in the type of what it is the gradient of."""
        sums = (self._hidden, self._weight, self._bias)
        return tuple(
            s if s is None or x is None else s.to(x.dtype)
            for s, x in zip(sums, self._inputs, strict=True)
        )


def _product(left: Tensor, right: Tensor) -> Tensor:
    """A matrix product whose result is at least float32."""
    if left.dtype in (torch.float32, torch.float64):
        return left @ right
    if left.is_cuda:
        return torch.mm(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()


def _row_chunks(hidden: Tensor, weight: Tensor) -> Iterator[slice]:
    """Ranges of rows; one empty range if there is no row."""
    numbers = _NUMBERS_CUDA if hidden.is_cuda else _NUMBERS_CPU
    size = max(1, numbers // weight.shape[0])
    for first in range(0, max(1, hidden.shape[0]), size):
        yield slice(first, min(first + size, hidden.shape[0]))
