"""A copy of a state in host memory, so that training may go on while it is written."""

from collections.abc import Mapping
from typing import Any, final

import torch
from torch import Tensor

from luyen.checkpoint.shards import memory_of


@final
class Staging:
    """Copies states into buffers that are used again: whoever copies must be done with the last.

    Example:
        >>> weight = torch.ones(2)
        >>> copied = Staging().copy({"weight": weight, "step": 3})
        >>> _ = weight.zero_()
        >>> copied
        {'weight': tensor([1., 1.]), 'step': 3}
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[Any, ...], list[Tensor]] = {}

    def copy(self, state: Any) -> Any:
        """The state with its tensors as they are now, on the host; tied ones are one again."""
        free = {kind: list(buffers) for kind, buffers in self._buffers.items()}
        known: dict[tuple[Any, ...], Tensor] = {}
        copied = self._copy(state, free, known)
        if any(place[0] != "cpu" for place in known):
            torch.cuda.synchronize()
        return copied

    def _copy(
        self,
        state: Any,
        free: dict[tuple[Any, ...], list[Tensor]],
        known: dict[tuple[Any, ...], Tensor],
    ) -> Any:
        if isinstance(state, Mapping):
            return {name: self._copy(inner, free, known) for name, inner in state.items()}
        if isinstance(state, list | tuple):
            return type(state)(self._copy(inner, free, known) for inner in state)
        if not isinstance(state, Tensor):
            return state
        place = memory_of(state)
        if place is None:
            return state.detach().cpu().clone()
        if place not in known:
            buffer = self._buffer(state, free)
            known[place] = buffer.copy_(state.detach(), non_blocking=True)
        return known[place]

    def _buffer(self, tensor: Tensor, free: dict[tuple[Any, ...], list[Tensor]]) -> Tensor:
        """A buffer of the tensor's kind that nothing of this state is in."""
        kind = (tensor.dtype, tuple(tensor.shape), tensor.is_cuda)
        if free.get(kind):
            return free[kind].pop()
        # Page-locked memory takes a copy from a GPU several times faster.
        made = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        self._buffers.setdefault(kind, []).append(made)
        return made
