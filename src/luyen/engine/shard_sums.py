"""Digests of tensors whose shards lie on several ranks: each rank adds its own part."""

import functools
from collections.abc import Mapping, Sequence
from math import prod
from typing import TypeAlias

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from luyen.models.digest import digest_number

Sums: TypeAlias = Mapping[str, tuple[str, int]]
"""Type and shape of the whole tensor, and this rank's part of the sum."""
_MASK = (1 << 64) - 1


@torch.no_grad()
def shard_sums(tensors: Mapping[str, Tensor], *, is_first: bool) -> dict[str, tuple[str, int]]:
    """This rank's part of each digest; a tensor that is whole on every rank counts on the first.

    Shards are rows, so the elements of one follow each other in the whole.
    """
    found: dict[str, tuple[str, int]] = {}
    for name, tensor in tensors.items():
        found[name] = _form(tensor.dtype, tensor.shape), _part(tensor, is_first=is_first)
    return found


@functools.cache
def _form(dtype: torch.dtype, shape: torch.Size) -> str:
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}"


def merged(parts: Sequence[Sums]) -> dict[str, str]:
    """The texts that `luyen.models.digest.describe` gives for the whole tensors.

    Example:
        >>> merged([{"w": ("float32 [2]", 3)}, {"w": ("float32 [2]", -1)}])
        {'w': 'float32 [2] 0000000000000002'}
    """
    totals = {name: sum(part[name][1] for part in parts) for name in parts[0]}
    return {name: f"{parts[0][name][0]} {total & _MASK:016x}" for name, total in totals.items()}


def _part(tensor: Tensor, *, is_first: bool) -> int:
    if not isinstance(tensor, DTensor):
        return digest_number(tensor) if is_first else 0
    mesh, placements = tensor.device_mesh, tensor.placements
    for dimension, placement in enumerate(placements):
        if isinstance(placement, Replicate) and mesh.get_local_rank(dimension) > 0:
            return 0  # another replica counts it
    local = tensor.to_local()
    if local.numel() == 0:
        return 0
    return digest_number(local, offset=_first_element(tensor.shape, mesh, placements))


@functools.cache
def _first_element(shape: torch.Size, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> int:
    """Where the shard of this rank begins in the whole tensor."""
    _, offsets = compute_local_shape_and_global_offset(shape, mesh, placements)
    assert not any(offsets[1:]), "shards are rows"
    return offsets[0] * prod(shape[1:])
