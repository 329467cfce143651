"""Clipping gradients whose parts lie on many ranks."""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

_norms: Any = vars(torch)["_foreach_norm"]
_multiply: Any = vars(torch)["_foreach_mul_"]


def clip_sharded(gradients: Sequence[Tensor], most: float) -> float:
    """The norm over all shards, the same number on every rank, after which none is above `most`.

    A gradient that is not finite on one rank makes the norm of all ranks not finite.
    """
    shards = [g for g in gradients if isinstance(g, DTensor)]
    assert shards, "nothing was learned from the step"
    assert len(shards) == len(gradients), "a gradient is not sharded"
    local = [shard.to_local() for shard in shards]
    total = torch.stack(_norms(local)).double().square().sum()
    mesh = shards[0].device_mesh
    # Replicas hold the same gradients: only the dimension that shards is added up.
    dist.all_reduce(total, group=mesh.get_group(mesh.ndim - 1))
    norm = math.sqrt(float(total)) if math.isfinite(float(total)) else math.nan
    factor = most / (norm + 1e-6)
    if factor < 1.0:
        _multiply(local, factor)
    return norm
