"""Weights in the layout that this CPU multiplies fastest, for as long as tokens are generated.

A plain linear layer repacks its weights at every call, which is cheap compared with many rows and
expensive compared with the few rows of a decode step. Packed copies are made for a run of decode
steps and dropped after it. They exist only for bf16 on a CPU, if PyTorch has the operators.

Where the processor multiplies bf16, oneDNN's copies are bf16. Where it does not (AVX2, AVX512
without BF16), libraries convert the numbers one by one: MKL's copies are fp32 there, twice the
memory of the weights, and were measured to be three to five times as fast for 4 to 256 rows.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, TypeAlias, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_SMALLEST = 1 << 16
"""Weights of fewer numbers are left alone: the call itself is what they cost."""
_WORTHWHILE_STEPS = 16
"""Passes that must be ahead. Measured: making the copies costs what 7 to 11 decode steps save."""
_ROWS = 32
"""Rows that the packed layout is requested for; oneDNN and MKL use the same one for all numbers."""
_PROBED_ROWS = (2, 31, 33, 65)
"""Numbers of rows that are multiplied once for each shape, to see that MKL does."""

_Key: TypeAlias = tuple[int, int]
"""Where a weight lies and how often it was written to."""
_Copy: TypeAlias = tuple[_Key, Tensor, Callable[[Tensor], Tensor]]
"""What was packed, the memory it lies in, and the layer with packed weights.

As long as the memory is held, no other weight can lie at its address.
"""


@final
class PrepackedLinears:
    """The linear layers of a model with packed weights, inside `in_use` and nowhere else.

    Before each use, the place and the version of every weight are compared, and a copy of another
    weight is packed again. A write through `.data` increases no version: call `drop` before weights
    may be written so. The engine does whenever nothing is left to generate.
    """

    def __init__(self, model: nn.Module, *, head: nn.Module | None = None) -> None:
        """The `head` may give fp32, which its caller converts its result to anyway."""
        self._layers = _packable(model)
        self._head = head
        self._copies: list[_Copy | None]
        self.drop()

    def drop(self) -> None:
        """Free all copies."""
        self._copies = [None] * len(self._layers)

    @contextmanager
    def in_use(self, *, steps: int) -> Iterator[None]:
        """Multiply with packed weights, if that pays for the `steps` passes that may follow.

        Gradients must be off: packed weights have none.
        """
        assert not torch.is_grad_enabled(), "packed weights have no gradient"
        if not self._is_ready(steps):
            self.drop()
            yield
            return
        try:
            for layer, copy in zip(self._layers, self._copies, strict=True):
                assert copy is not None
                # In the layer's own dictionary: torch's setattr is slow, and this is every step.
                layer.__dict__["forward"] = copy[2]
            yield
        finally:
            for layer in self._layers:
                layer.__dict__.pop("forward", None)

    def _is_ready(self, steps: int) -> bool:
        """Whether every copy is there and fresh, after making those that are worth making."""
        for index, layer in enumerate(self._layers):
            copy, key = self._copies[index], _key(layer.weight)
            if copy is None or copy[0] != key:
                if steps < _WORTHWHILE_STEPS:
                    return False
                # The stale copy goes before the fresh one comes.
                self._copies[index] = None
                self._copies[index] = (
                    key,
                    layer.weight.detach(),
                    _packed(layer, is_wide=layer is self._head),
                )
        return bool(self._layers)


def _key(weight: Tensor) -> _Key:
    return weight.data_ptr(), weight._version


def _packable(model: nn.Module) -> list[nn.Linear]:
    """Linear layers whose weights are worth packing; adapters around them stay as they are."""
    if not _has_operators():
        return []
    return [
        module
        for module in model.modules()
        if type(module) is nn.Linear
        and module.weight.dtype == torch.bfloat16
        and module.weight.device.type == "cpu"
        and module.weight.numel() >= _SMALLEST
    ]


def _has_operators() -> bool:
    """Whether this PyTorch can pack for this processor."""
    return has_bf16_products() or _has_mkl()


def has_bf16_products() -> bool:
    """Whether oneDNN packs bf16 weights, and this processor multiplies them."""
    mkldnn: Any = torch.ops.mkldnn
    cpu: Any = torch.cpu
    try:
        _ = mkldnn._reorder_linear_weight, mkldnn._linear_pointwise
        return mkldnn._is_mkldnn_bf16_supported() and cpu._is_avx512_bf16_supported()
    except AttributeError:
        return False


def _has_mkl() -> bool:
    """Whether MKL packs fp32 weights."""
    mkl: Any = torch.ops.mkl
    try:
        _ = mkl._mkl_reorder_linear_weight, mkl._mkl_linear
        return torch.backends.mkl.is_available()
    except AttributeError:
        return False


def _packed(layer: nn.Linear, *, is_wide: bool) -> Callable[[Tensor], Tensor]:
    """The layer as a function with a packed copy of its weight."""
    if not has_bf16_products():
        return _packed_by_mkl(layer, is_wide=is_wide)
    mkldnn: Any = torch.ops.mkldnn
    weight = mkldnn._reorder_linear_weight(layer.weight.detach(), _ROWS)
    bias = layer.bias
    multiply = mkldnn._linear_pointwise.default

    def forward(x: Tensor) -> Tensor:
        return multiply(x, weight, bias, "none", [], "")

    return forward


def _packed_by_mkl(layer: nn.Linear, *, is_wide: bool) -> Callable[[Tensor], Tensor]:
    """The same with fp32 numbers; sums are rounded to bf16 unless the result `is_wide`."""
    columns, depth = layer.weight.shape
    if not _mkl_multiplies(columns, depth):
        return partial(nn.Linear.forward, layer)
    mkl: Any = torch.ops.mkl
    plain, bias = layer.weight.detach(), layer.bias
    weight = mkl._mkl_reorder_linear_weight(plain.float(), _ROWS)
    # Only its shape is read.
    like = torch.empty(1).expand(columns, depth)
    multiply = mkl._mkl_linear.default

    def forward(x: Tensor) -> Tensor:
        rows = x.numel() // depth
        if rows < 2:  # half the bytes are read
            return F.linear(x, plain, bias)
        out = multiply(x.float(), weight, like, None if bias is None else bias.float(), rows)
        return out if is_wide else out.bfloat16()

    return forward


@cache
def _mkl_multiplies(columns: int, depth: int) -> bool:
    """Whether weights that are packed once give the products of any number of rows.

    MKL takes a number of rows when it packs. It was never seen to matter, and is not documented.
    """
    mkl: Any = torch.ops.mkl
    random = torch.Generator().manual_seed(0)
    weight = torch.randn(columns, depth, generator=random)
    x = torch.randn(max(_PROBED_ROWS), depth, generator=random)
    packed = mkl._mkl_reorder_linear_weight(weight, _ROWS)
    truth = F.linear(x, weight)
    return all(
        torch.allclose(mkl._mkl_linear(x[:n], packed, weight, None, n), truth[:n], 1e-3, 1e-3)
        for n in _PROBED_ROWS
    )
