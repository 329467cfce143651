"""Files of a state, written at once, or later from a copy in host memory during training."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol, final

import torch
from torch import Tensor

from luyen.checkpoint.shards import memory_of, write_shard


@final
class Staging:
    """Copies states into reused buffers: the previous copy must be written before the next call.

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


# File writers of a state: immediate, or deferred from copies.


class FileWriter(Protocol):
    """Takes the files of a state, whose folders are there."""

    def tensors(self, file: Path, tensors: Mapping[str, Tensor]) -> None:
        """A file of tensors by name."""
        ...

    def text(self, file: Path, text: str) -> None:
        """A file of text."""
        ...


@final
class ImmediateWriter:
    """Every file is written when it is given."""

    def tensors(self, file: Path, tensors: Mapping[str, Tensor]) -> None:
        """Write it; an OSError when the disk refuses."""
        write_shard(file, tensors)

    def text(self, file: Path, text: str) -> None:
        """Write it; an OSError when the disk refuses."""
        file.write_text(text, encoding="utf-8")


@final
class DeferredWriter:
    """Files wait for `write`, with their tensors as they were when they were given.

    Copies lie in main memory, which is used again: what was given last must be written before
    anything new is given.
    """

    def __init__(self) -> None:
        self._copies: dict[tuple[str, str], Staging] = {}
        self._waiting: list[Callable[[], object]] = []

    def tensors(self, file: Path, tensors: Mapping[str, Tensor]) -> None:
        """Copy the tensors."""
        # Files of the same name hold the same kinds of tensors in every checkpoint.
        staging = self._copies.setdefault((file.parent.name, file.name), Staging())
        self._waiting.append(partial(write_shard, file, staging.copy(dict(tensors))))

    def text(self, file: Path, text: str) -> None:
        """Keep the text."""
        self._waiting.append(partial(file.write_text, text, encoding="utf-8"))

    def write(self) -> None:
        """Write all that waits, in the order it came; an OSError when the disk refuses."""
        waiting, self._waiting = self._waiting, []
        for write in waiting:
            write()

    def forget(self) -> None:
        """Nothing waits any more."""
        self._waiting = []
