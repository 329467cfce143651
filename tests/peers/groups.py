"""The receiving end of a process group over which a trainer broadcasts weights from rank 0."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _new_process_group_helper, _world

_LIMIT = timedelta(seconds=60)


@final
class WeightGroup:
    """A group beside the default one, which the server may use for itself."""

    def __init__(
        self, *, address: str, port: int, rank: int, world_size: int, name: str, backend: str
    ) -> None:
        if backend != "gloo":
            raise ValueError(f"this server has no {backend}")
        # Servers of other tests in this process may have left a group of this name behind.
        for group in [g for g, known in _world.pg_names.items() if known == name]:
            dist.destroy_process_group(group)
        host = f"tcp://{address}:{port}"
        store, rank, world_size = next(
            dist.rendezvous(host, rank, world_size, timeout=_LIMIT)  # pyright: ignore
        )
        store = dist.PrefixStore(name, store)
        store.set_timeout(_LIMIT)
        self._group, _ = _new_process_group_helper(
            world_size, rank, [], backend, store, group_name=name, timeout=_LIMIT
        )
        _world.pg_group_ranks[self._group] = {i: i for i in range(world_size)}

    def receive(self, forms: Sequence[tuple[str, str, Sequence[int]]]) -> dict[str, Tensor]:
        """Tensors of these names, dtypes and shapes, in this order."""
        found = {}
        for name, dtype, shape in forms:
            tensor = torch.empty(list(shape), dtype=getattr(torch, dtype.removeprefix("torch.")))
            dist.broadcast(tensor, src=0, group=self._group)
            found[name] = tensor
        return found

    def close(self) -> None:
        """Leave the group."""
        dist.destroy_process_group(self._group)


def unflatten(flat: Tensor, metadata: Sequence[Sequence[Any]]) -> dict[str, Tensor]:
    """Tensors of a bucket: name, shape, dtype, and first and last element of each."""
    found = {}
    for name, shape, dtype, start, end, _numel in metadata:
        found[name] = flat[start:end].view(dtype).reshape(shape)
    return found
