"""Weights that never change and lie in host memory while nobody needs them on the device."""

from collections.abc import Generator
from contextlib import contextmanager
from typing import final

import torch
from torch import Tensor, nn


@final
class RestingWeights:
    """The weights of a model, whose device memory is given back between two uses.

    The memory behind the tensors goes and comes; the tensors stay the same objects, and those that
    are views of one storage stay so. Copying back restores the same bits.
    """

    def __init__(self, model: nn.Module) -> None:
        """The model rests from now on."""
        pinned = next(model.parameters()).is_cuda
        self._kept: list[tuple[torch.UntypedStorage, Tensor]] = []
        for storage in _storages(model):
            whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            kept = torch.empty(whole.shape, dtype=torch.uint8, pin_memory=pinned)
            self._kept.append((storage, kept.copy_(whole)))
        self._rest()

    @contextmanager
    def awake(self) -> Generator[None]:
        """The weights are on their device inside."""
        for storage, kept in self._kept:
            storage.resize_(kept.numel())
            torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).copy_(kept)
        try:
            yield
        finally:
            self._rest()

    def _rest(self) -> None:
        for storage, _ in self._kept:
            storage.resize_(0)
        if any(storage.device.type == "cuda" for storage, _ in self._kept):
            # Others on the device cannot use what the allocator keeps for us.
            torch.cuda.empty_cache()


def _storages(model: nn.Module) -> list[torch.UntypedStorage]:
    """The memory behind all weights, each piece once."""
    found: dict[int, torch.UntypedStorage] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        storage = tensor.untyped_storage()
        if storage.size():
            found[storage.data_ptr()] = storage
    return list(found.values())
