"""State sharded over ranks: checkpoints, full weights for the rollout engines, and digests."""

import functools
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from luyen.base.files import read_json
from luyen.checkpoint.tensors import load_state
from luyen.engine.fsdp import REPLICATE
from luyen.engine.optim import ADAMW, MasterOptimizer
from luyen.engine.tensor_parallel import TENSOR, divided_dimension
from luyen.models.weights import (
    block_digest,
    digest_number,
    digest_numbers,
    export_dtype,
    export_parameters,
    restore_parameters,
    trained_parameters,
)


def role_state(name: str, module: nn.Module, optimizer: MasterOptimizer) -> dict[str, Any]:
    """Parts of a checkpoint by name, for `luyen.checkpoint.tensors.save_state` on every rank.

    Names, dtypes and global shapes are the same for shards as for a model on one device.
    """
    return {name: export_parameters(module), _optimizer(name): optimizer.state_dict()}


def role_weights(name: str, module: nn.Module, optimizer: MasterOptimizer) -> dict[str, Tensor]:
    """The trained weights and masters of `role_state`, by part and name."""
    masters = enumerate(optimizer.separate_masters())
    return {
        **{f"{name}/{own}": tensor for own, tensor in export_parameters(module).items()},
        **{f"{_optimizer(name)}/masters/{i}": master for i, master in masters},
    }


def load_role(folder: Path, name: str, module: nn.Module, optimizer: MasterOptimizer) -> None:
    """Load a checkpoint of any number of ranks. All ranks call it, and each reads its shards."""
    part = _optimizer(name)
    if not optimizer.is_sharded:
        state = {own: load_state(folder, own) for own in (name, part)}
        restore_role(state, name, module, optimizer)
        return
    restore_parameters(module, load_state(folder, name, into=export_parameters(module)))
    saved, into = read_json(folder / f"{part}.json")["state"], optimizer.state_dict()
    optimizer.refuse_others(saved)
    if not saved[ADAMW]["state"]:
        into[ADAMW]["state"] = {}  # saved before the first step
    optimizer.load_state_dict(load_state(folder, part, into=into))


def restore_role(
    state: Mapping[str, Any], name: str, module: nn.Module, optimizer: MasterOptimizer
) -> None:
    """Write `role_state` back into a model that is not sharded; parameters keep their addresses."""
    restore_parameters(module, state[name])
    optimizer.load_state_dict(state[_optimizer(name)])


def _optimizer(name: str) -> str:
    return f"{name}_optimizer"


# Full weights for the rollout engines.

BUCKET_BYTES = 1 << 28
"""Most bytes of full weights that are gathered at once."""

_PARTS = 16
_LEAST_BYTES = 1 << 24
"""Smallest bucket. On CPUs, gathering 136 MB took 165 ms in such buckets, 600 ms in one."""

_Named: TypeAlias = tuple[str, DTensor]


def full_weights(
    module: nn.Module, *, bucket_bytes: int = BUCKET_BYTES
) -> Iterator[tuple[str, Tensor]]:
    """Every trained parameter in full, with the names and dtypes of a model on one device.

    Every rank must exhaust the iterator; the first rank gets the weights, in host memory, the
    remaining ranks nothing. At most `bucket_bytes` are gathered at a time, or one parameter. A
    model that is not sharded gives its own tensors.
    """
    own = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    sharded = [(name, p) for name, p in own if isinstance(p, DTensor)]
    if not sharded:
        yield from trained_parameters(module).items()
        return
    assert len(sharded) == len(own), "some parameters are not sharded: a pass left them gathered"
    mesh = sharded[0][1].device_mesh
    names = mesh.mesh_dim_names or ()
    if REPLICATE in names and mesh.get_local_rank(REPLICATE) > 0:
        return  # another replica has the same weights
    for bucket in _buckets(sharded, bucket_bytes):
        parts = _gather(bucket, mesh.get_group("shard"))
        if TENSOR in names and parts is not None:
            parts = _join_parts(bucket, parts, mesh.get_group(TENSOR))
        if parts is not None:
            yield from _on_host(bucket, parts)


def weight_buckets(module: nn.Module) -> Iterator[dict[str, Tensor]]:
    """`full_weights` in buckets in host memory; ranks but the first yield nothing.

    Those of a model that is not sharded are not copied: the next update changes them.
    """
    bucket: dict[str, Tensor] = {}
    size, most = 0, fitting_bucket(module)
    for name, weight in full_weights(module, bucket_bytes=most):
        bucket[name] = weight.detach().to("cpu")
        size += weight.numel() * weight.element_size()
        if size >= most:
            yield bucket
            bucket, size = {}, 0
    if bucket:
        yield bucket


def fitting_bucket(module: nn.Module) -> int:
    """Bytes of a bucket, so that the weights are sent in about 16 parts."""
    own = [p for p in module.parameters() if p.requires_grad]
    whole = sum(p.numel() * export_dtype(p).itemsize for p in own)
    return min(BUCKET_BYTES, max(_LEAST_BYTES, whole // _PARTS))


def _buckets(weights: Sequence[_Named], most: int) -> Iterator[list[_Named]]:
    """Consecutive parameters of one dtype, of at most `most` bytes."""
    bucket: list[_Named] = []
    size = 0
    for name, weight in weights:
        dtype = export_dtype(weight)
        more = weight.numel() * dtype.itemsize
        if bucket and (size + more > most or export_dtype(bucket[0][1]) != dtype):
            yield bucket
            bucket, size = [], 0
        bucket.append((name, weight))
        size += more
    if bucket:
        yield bucket


def _gather(bucket: Sequence[_Named], group: dist.ProcessGroup) -> list[Tensor] | None:
    """The parameters of a bucket in one collective, on the first rank of the group.

    Each rank sends its rows of all of them, padded to the length of the longest. Where ranks divide
    layers, it is their part of each parameter.
    """
    ranks, dtype = dist.get_world_size(group), export_dtype(bucket[0][1])
    sizes = [[_rows(w, rank, ranks) for _, w in bucket] for rank in range(ranks)]
    mine = torch.cat([weight.to_local().detach().flatten().to(dtype) for _, weight in bucket])
    short = max(map(sum, sizes)) - len(mine)
    mine = nn.functional.pad(mine, (0, short)) if short else mine
    is_first = dist.get_rank(group) == 0
    found = [torch.empty_like(mine) for _ in range(ranks)] if is_first else None
    dist.gather(mine, found, group=group, group_dst=0)
    if found is None:
        return None
    parts = [one[: sum(own)].split(own) for one, own in zip(found, sizes, strict=True)]
    whole = torch.cat([part[index] for index in range(len(bucket)) for part in parts])
    shapes = [_divided_shape(weight) for _, weight in bucket]
    flats = whole.split([prod(shape) for shape in shapes])
    return [flat.view(shape) for flat, shape in zip(flats, shapes, strict=True)]


def _join_parts(
    bucket: Sequence[_Named], parts: Sequence[Tensor], group: dist.ProcessGroup
) -> list[Tensor] | None:
    """The same from the parts of the ranks that divide layers, on the first of them."""
    cut = [divided_dimension(weight) for _, weight in bucket]
    own = [part.flatten() for part, at in zip(parts, cut, strict=True) if at is not None]
    is_first = dist.get_rank(group) == 0
    ranks = dist.get_world_size(group)
    found: list[Tensor] = []
    if own:
        mine = torch.cat(own)
        found = [torch.empty_like(mine) for _ in range(ranks)] if is_first else []
        dist.gather(mine, found or None, group=group, group_dst=0)
    if not is_first:
        return None
    each = [iter(one.split([len(flat) for flat in own])) for one in found]
    return [
        part if at is None else torch.cat([next(one).view(part.shape) for one in each], at)
        for part, at in zip(parts, cut, strict=True)
    ]


def _on_host(bucket: Sequence[_Named], parts: list[Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Adjacent in host memory."""
    whole = torch.cat([part.flatten() for part in parts]).cpu()
    parts.clear()  # free them before the caller uses the weights
    flats = whole.split([weight.numel() for _, weight in bucket])
    for (name, weight), flat in zip(bucket, flats, strict=True):
        yield name, flat.view(weight.shape)


def _divided_shape(weight: DTensor) -> tuple[int, ...]:
    """Shape of a parameter on the ranks that divide layers."""
    shape, at = list(weight.shape), divided_dimension(weight)
    if at is not None:
        shape[at] //= weight.device_mesh[TENSOR].size()
    return tuple(shape)


def _rows(weight: DTensor, rank: int, ranks: int) -> int:
    """Elements of a parameter on a rank: whole rows, on the last ranks fewer or none."""
    shape = _divided_shape(weight)
    most = -(-shape[0] // ranks)
    own = min(most, max(0, shape[0] - rank * most))
    return own * prod(shape[1:])


# Digests of sharded tensors: the sum of each rank's part.

ShardSums: TypeAlias = Mapping[str, tuple[str, int]]
"""Type and shape of the global tensor, and this rank's part of the sum."""
_MASK = (1 << 64) - 1


@torch.no_grad()
def shard_sums(tensors: Mapping[str, Tensor], *, is_first: bool) -> dict[str, tuple[str, int]]:
    """This rank's part of each digest; a tensor that is not sharded counts on the first rank.

    Shards are rows, or, where ranks divide layers, some columns of rows.
    """
    plain = {name: tensor for name, tensor in tensors.items() if not isinstance(tensor, DTensor)}
    own = digest_numbers(plain) if is_first else dict.fromkeys(plain, 0)
    return {
        name: (
            _form(tensor.dtype, tensor.shape),
            _part(tensor) if isinstance(tensor, DTensor) else own[name],
        )
        for name, tensor in tensors.items()
    }


@functools.cache
def _form(dtype: torch.dtype, shape: torch.Size) -> str:
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}"


def merge_sums(parts: Sequence[ShardSums]) -> dict[str, str]:
    """The texts of `luyen.models.weights.tensor_digests` for the global tensors.

    Example:
        >>> merge_sums([{"w": ("float32 [2]", 3)}, {"w": ("float32 [2]", -1)}])
        {'w': 'float32 [2] 0000000000000002'}
    """
    totals = {name: sum(part[name][1] for part in parts) for name in parts[0]}
    return {name: f"{parts[0][name][0]} {total & _MASK:016x}" for name, total in totals.items()}


def _part(tensor: DTensor) -> int:
    mesh, placements = tensor.device_mesh, tensor.placements
    for dimension, placement in enumerate(placements):
        if isinstance(placement, Replicate) and mesh.get_local_rank(dimension) > 0:
            return 0  # another replica counts it
    local = tensor.to_local()
    if local.numel() == 0:
        return 0
    first = _first_element(tensor.shape, mesh, placements)
    if local.shape[1:] == tensor.shape[1:]:
        return digest_number(local, offset=first)
    return block_digest(local, offset=first, columns=tensor.shape[1])


@functools.cache
def _first_element(shape: torch.Size, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> int:
    """Index of the first element of this rank's shard in the global tensor."""
    _, offsets = compute_local_shape_and_global_offset(shape, mesh, placements)
    return sum(at * prod(shape[index + 1 :]) for index, at in enumerate(offsets))
