"""Weights that stay where they are: a process on the GPU maps the trainer's memory (CUDA IPC).

Nothing is copied on the trainer's side. The memory holds a publication until the trainer takes its
next step; who maps it after that finds other digests.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import final

import torch
from torch import Tensor

from luyen.rollout.servers.vllm_worker import export_handle, map_handle


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class MappedWeights:
    """Parameters as handles of the memory that holds them.

    Example:
        >>> MappedWeights(handles=()).handles
        ()
    """

    handles: tuple[tuple[str, str], ...]
    """Name and handle of each, as JSON."""


@final
class WeightExporter:
    """Makes handles of parameters; those of parameters that have not moved are made once.

    Example:
        >>> WeightExporter().export({})
        MappedWeights(handles=())
    """

    def __init__(self) -> None:
        self._made: dict[str, tuple[tuple[object, ...], str]] = {}

    def export(self, tensors: Mapping[str, Tensor]) -> MappedWeights:
        """Handles of contiguous tensors on a GPU, once all that was launched here is done."""
        for device in {tensor.device for tensor in tensors.values()}:
            torch.cuda.current_stream(device).synchronize()
        return MappedWeights(handles=tuple((n, self._handle(n, t)) for n, t in tensors.items()))

    def _handle(self, name: str, tensor: Tensor) -> str:
        place = (tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape))
        made = self._made.get(name)
        if made is None or made[0] != place:
            self._made[name] = made = place, json.dumps(export_handle(tensor.detach()))
        return made[1]


def map_weights(part: MappedWeights, device: torch.device) -> dict[str, Tensor]:
    """The parameters on this GPU, in the memory of the other process; they must not be written to.

    Memory that was mapped once stays so. A RuntimeError if it is on another GPU.
    """
    return {name: _mapped(handle, device) for name, handle in part.handles}


@cache
def _mapped(handle: str, device: torch.device) -> Tensor:
    return map_handle(json.loads(handle), device)
