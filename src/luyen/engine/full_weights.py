"""Whole weights out of shards, for whoever samples with them."""

from collections.abc import Iterator, Sequence
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from luyen.engine.shown import shown_dtype
from luyen.models.state import trained_parameters

BUCKET_BYTES = 1 << 28
"""Whole weights that are gathered in one go."""

_PARTS = 16
_LEAST_BYTES = 1 << 24
"""On CPUs, 136 MB in buckets of this size were gathered in 165 ms, and in one bucket in 600."""

_Named: TypeAlias = tuple[str, DTensor]


def full_weights(
    module: nn.Module, *, bucket_bytes: int = BUCKET_BYTES
) -> Iterator[tuple[str, Tensor]]:
    """Every parameter that learns, whole, by the names and types it has on one device.

    Every rank takes part and must exhaust the iterator; the first rank is given the weights, on the
    host, the others nothing. At most `bucket_bytes` are gathered at a time, or one parameter. A
    model that is not sharded gives its own tensors.
    """
    own = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    sharded = [(name, p) for name, p in own if isinstance(p, DTensor)]
    if not sharded:
        yield from trained_parameters(module).items()
        return
    assert len(sharded) == len(own), "some parameters are whole: a pass has left them so"
    mesh = sharded[0][1].device_mesh
    if mesh.ndim > 1 and mesh.get_local_rank(0) > 0:
        return  # another replica holds the same weights
    for bucket in _buckets(sharded, bucket_bytes):
        yield from _gather(bucket, mesh.get_group(mesh.ndim - 1))


def fitting_bucket(module: nn.Module) -> int:
    """Bytes of a bucket, for weights that go on in a dozen parts or so: small, and not too many."""
    own = [p for p in module.parameters() if p.requires_grad]
    whole = sum(p.numel() * shown_dtype(p).itemsize for p in own)
    return min(BUCKET_BYTES, max(_LEAST_BYTES, whole // _PARTS))


def _buckets(weights: Sequence[_Named], most: int) -> Iterator[list[_Named]]:
    """Neighbours of one type, as many as `most` bytes hold."""
    bucket: list[_Named] = []
    size = 0
    for name, weight in weights:
        dtype = shown_dtype(weight)
        more = weight.numel() * dtype.itemsize
        if bucket and (size + more > most or shown_dtype(bucket[0][1]) != dtype):
            yield bucket
            bucket, size = [], 0
        bucket.append((name, weight))
        size += more
    if bucket:
        yield bucket


def _gather(bucket: Sequence[_Named], group: dist.ProcessGroup) -> Iterator[tuple[str, Tensor]]:
    """The parameters of a bucket in one collective, side by side in the memory of the host.

    Each rank gives its rows of all of them, filled up to the length that the longest has.
    """
    ranks, dtype = dist.get_world_size(group), shown_dtype(bucket[0][1])
    sizes = [[_rows(w, rank, ranks) for _, w in bucket] for rank in range(ranks)]
    mine = torch.cat([weight.to_local().detach().flatten().to(dtype) for _, weight in bucket])
    short = max(map(sum, sizes)) - len(mine)
    mine = nn.functional.pad(mine, (0, short)) if short else mine
    is_first = dist.get_rank(group) == 0
    found = [torch.empty_like(mine) for _ in range(ranks)] if is_first else None
    dist.gather(mine, found, group=group, group_dst=0)
    if found is not None:
        parts = [one[: sum(own)].split(own) for one, own in zip(found, sizes, strict=True)]
        whole = torch.cat([part[index] for index in range(len(bucket)) for part in parts]).cpu()
        del mine, found, parts  # whoever takes the weights may take their time
        each = whole.split([weight.numel() for _, weight in bucket])
        for (name, weight), flat in zip(bucket, each, strict=True):
            yield name, flat.view(weight.shape)


def _rows(weight: DTensor, rank: int, ranks: int) -> int:
    """Elements of a parameter that a rank holds: whole rows, the last ranks fewer or none."""
    most = -(-weight.shape[0] // ranks)
    own = min(most, max(0, weight.shape[0] - rank * most))
    return own * (weight.numel() // weight.shape[0])
