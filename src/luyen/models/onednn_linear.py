"""Weights in the layout that oneDNN multiplies fastest, for as long as tokens are generated.

A plain linear layer repacks its weights at every call, which is cheap compared with many rows and
expensive compared with the few rows of a decode step. Packed copies are made for a run of decode
steps and dropped after it. They exist only for bf16 on a CPU, if PyTorch has the operators.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias, final

import torch
from torch import Tensor, nn

_SMALLEST = 1 << 16
"""Weights of fewer numbers are left alone: the call itself is what they cost."""
_WORTHWHILE_STEPS = 16
"""Passes that must be ahead. Measured: making the copies costs what 7 to 11 decode steps save."""
_ROWS = 32
"""Rows that the packed layout is requested for; oneDNN uses the same one for 1 to 256."""

_Key: TypeAlias = tuple[int, int]
"""Where a weight lies and how often it was written to."""
_Copy: TypeAlias = tuple[_Key, Tensor, Callable[[Tensor], Tensor]]
"""What was packed, the memory it lies in, and the layer with packed weights.

As long as the memory is held, no other weight can lie at its address.
"""


@final
class OneDnnLinears:
    """The linear layers of a model with packed weights, inside `in_use` and nowhere else.

    Before each use, the place and the version of every weight are compared, and a copy of another
    weight is packed again. A write through `.data` increases no version: call `drop` before weights
    may be written so. The engine does whenever nothing is left to generate.
    """

    def __init__(self, model: nn.Module) -> None:
        self._layers = _packable(model)
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
                self._copies[index] = (key, layer.weight.detach(), _packed(layer))
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
    """Whether this PyTorch can pack and this processor multiplies bf16."""
    mkldnn: Any = torch.ops.mkldnn
    try:
        _ = mkldnn._reorder_linear_weight, mkldnn._linear_pointwise
        return mkldnn._is_mkldnn_bf16_supported()
    except AttributeError:
        return False


def _packed(layer: nn.Linear) -> Callable[[Tensor], Tensor]:
    """The layer as a function with a packed copy of its weight."""
    mkldnn: Any = torch.ops.mkldnn
    weight = mkldnn._reorder_linear_weight(layer.weight.detach(), _ROWS)
    bias = layer.bias
    multiply = mkldnn._linear_pointwise.default

    def forward(x: Tensor) -> Tensor:
        return multiply(x, weight, bias, "none", [], "")

    return forward
