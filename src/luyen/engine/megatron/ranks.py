"""The ranks of Megatron's layers: which divide layers, and which divide experts."""

import warnings
from dataclasses import dataclass
from typing import final

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from luyen.engine.fsdp import join_ranks, limit_waiting
from luyen.engine.tensor_parallel import TENSOR

SHARD = "shard"
"""Dimension of the mesh whose ranks compute different sequences, and share masters."""
_EXPERTS, _COPIES = "experts", "copies"
"""Dimensions of the second mesh: `SHARD` in two parts."""


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MegatronRanks:
    """Groups that this rank belongs to.

    Ranks with different sequences that have the same experts are consecutive among all of those, so
    that their masters together are the experts that they compute with.

    Example:
        >>> sorted(MegatronRanks.__slots__)
        ['copies', 'mesh', 'spread']
    """

    mesh: DeviceMesh
    """Ranks that divide layers, and ranks that compute different sequences."""
    spread: dist.ProcessGroup
    """Ranks with different sequences, each of which has some of the experts."""
    copies: dist.ProcessGroup
    """Ranks with different sequences that have the same experts."""

    @property
    def dividing(self) -> dist.ProcessGroup:
        """Ranks that divide layers."""
        return self.mesh.get_group(TENSOR)

    @property
    def sharing(self) -> dist.ProcessGroup:
        """Ranks that compute different sequences."""
        return self.mesh.get_group(SHARD)


def join_megatron_ranks(
    rank: int,
    world: int,
    address: str,
    *,
    device: str,
    tensor_size: int,
    expert_size: int,
    timeout_s: float,
) -> MegatronRanks:
    """Join the process group; `tensor_size` consecutive ranks divide each layer.

    The others are `expert_size` groups, each of which has some of the experts.
    """
    join_ranks(rank, world, address, device=device, timeout_s=timeout_s)
    _divide_ranks(tensor_size, timeout_s)
    places = torch.arange(world).view(-1, tensor_size).t().contiguous()
    mesh = DeviceMesh(device, places, mesh_dim_names=(TENSOR, SHARD))
    parts = places.view(tensor_size, expert_size, -1)
    experts = DeviceMesh(device, parts, mesh_dim_names=(TENSOR, _EXPERTS, _COPIES))
    for one in (mesh, experts):
        limit_waiting(one, timeout_s)
    spread, copies = experts.get_group(_EXPERTS), experts.get_group(_COPIES)
    return MegatronRanks(mesh=mesh, spread=spread, copies=copies)


def _divide_ranks(tensor_size: int, timeout_s: float) -> None:
    """Tell Megatron which ranks of the process group divide layers: consecutive ones."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core import parallel_state  # pyright: ignore[reportMissingImports]
    # It reports its own deprecated calls in each pass.
    warnings.filterwarnings("ignore", module=r"megatron\.")
    parallel_state.destroy_model_parallel()  # that of a process group that is gone
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tensor_size,
        distributed_timeout_minutes=timeout_s / 60,
        create_gloo_process_groups=False,
    )
