"""Bytes of the moments that an optimizer keeps, tensor by tensor, for each `optim.name`."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import ceil, prod
from typing import final

from luyen.config.model_folder.config_json import ModelShape
from luyen.config.schema.actor_rollout_ref import FsdpConfig, OptimConfig

_FP32 = 4
LEAST_8BIT = 4096
"""Numbers of a tensor below which its moments stay fp32: rounding them would save nothing."""
_BLOCK = 256
"""8-bit moments that share an fp32 scale."""
OFFLOAD_PIECE, OFFLOAD_SLOTS = 2**25, 3
"""Weights that an optimizer in host memory updates at once, and how many such pieces move."""


def offload_bytes(weights: int) -> int:
    """Most memory of the device in a step of an optimizer in host memory.

    Example:
        >>> offload_bytes(100)
        1200
    """
    # A piece's moments and masters.
    return 3 * _FP32 * min(weights, OFFLOAD_PIECE * OFFLOAD_SLOTS)


def is_optimizer_offloaded(fsdp: FsdpConfig, device: str, ranks: int) -> bool:
    """Whether whole weights on a device have their masters and moments in host memory.

    Example:
        >>> is_optimizer_offloaded(FsdpConfig(optimizer_offload=True), "cuda", 1)
        True
    """
    return fsdp.optimizer_offload and ranks == 1 and device == "cuda"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedTensor:
    """A kind of trained tensor.

    Example:
        >>> TrainedTensor(size=64, count=2).total
        128
    """

    size: int
    """Numbers of one."""
    count: int
    """How many there are."""
    is_hidden: bool = False
    """Whether it is a matrix of a decoder layer."""

    @property
    def total(self) -> int:
        """Numbers of all."""
        return self.size * self.count


def whole_tensors(shape: ModelShape) -> Iterator[TrainedTensor]:
    """Every weight of a model, biases apart; the experts of a layer are one tensor."""
    for ends in _attention(shape):
        yield TrainedTensor(size=prod(ends), count=shape.layers, is_hidden=True)
    experts = shape.hidden * shape.intermediate * shape.experts
    yield TrainedTensor(size=experts, count=3 * shape.layers, is_hidden=shape.experts == 1)
    if shape.shared:
        yield TrainedTensor(
            size=shape.hidden * shape.shared, count=3 * shape.layers, is_hidden=True
        )
    yield TrainedTensor(size=shape.hidden, count=2 * shape.layers + 1)
    yield TrainedTensor(size=shape.vocab * shape.hidden, count=1 if shape.is_tied else 2)


def adapter_tensors(
    shape: ModelShape, rank: int, *, has_norms: bool = False
) -> Iterator[TrainedTensor]:
    """Both factors of an adapter on every linear layer; `has_norms`: a norm for each output too."""
    feed_forward = [(shape.hidden, shape.intermediate)] * 3
    for ends in (*_attention(shape), *feed_forward):
        for side in ends:
            yield TrainedTensor(size=rank * side, count=shape.layers, is_hidden=True)
    if has_norms:
        wide, narrow = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        inner = shape.intermediate
        for outputs in (wide, narrow, narrow, shape.hidden, inner, inner, shape.hidden):
            yield TrainedTensor(size=outputs, count=shape.layers, is_hidden=False)


def _attention(shape: ModelShape) -> list[tuple[int, int]]:
    """Rows and columns of the projections of an attention layer."""
    wide, narrow = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    return [(shape.hidden, wide)] * 2 + [(shape.hidden, narrow)] * 2


def moment_bytes(optim: OptimConfig, tensors: Iterable[TrainedTensor]) -> int:
    """Bytes of the optimizer's moments, without masters.

    Example:
        >>> matrix = TrainedTensor(size=4096, count=1, is_hidden=True)
        >>> [moment_bytes(OptimConfig(name=n), [matrix]) for n in ("adamw", "adamw_8bit", "muon")]
        [32768, 8320, 16384]
    """
    return sum(one.count * _moments(optim.name, one) for one in tensors)


def _moments(name: str, tensor: TrainedTensor) -> int:
    if name == "adamw_8bit" and tensor.size >= LEAST_8BIT:
        return 2 * (tensor.size + _FP32 * ceil(tensor.size / _BLOCK))
    return (1 if name == "muon" and tensor.is_hidden else 2) * _FP32 * tensor.size
