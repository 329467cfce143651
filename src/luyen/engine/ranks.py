"""Processes that train together: how they meet, and how they part."""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from luyen.base.errors import UserError

_TIMEOUT_S = 1800.0
"""A rank that is this late for a collective is taken for dead."""


def mesh_shape(world: int, fsdp_size: int) -> tuple[int, ...]:
    """`(ranks,)`, or `(replicas, ranks of a replica)` where weights are sharded over some only.

    Example:
        >>> mesh_shape(8, -1), mesh_shape(8, 4)
        ((8,), (2, 4))
    """
    if fsdp_size in (-1, world):
        return (world,)
    if fsdp_size < 1 or world % fsdp_size:
        raise UserError(
            "actor_rollout_ref.actor.fsdp_config.fsdp_size",
            fsdp_size,
            f"{world} ranks cannot be divided into replicas of that many",
            f"set it to -1, or to a divisor of {world}",
        )
    return (world // fsdp_size, fsdp_size)


def join_ranks(
    rank: int,
    world: int,
    address: str,
    *,
    device: str = "cpu",
    fsdp_size: int = -1,
    timeout_s: float = _TIMEOUT_S,
) -> DeviceMesh:
    """Meet the other ranks at `address` (`tcp://HOST:PORT` or `file://PATH`).

    Returns when all are there, with the mesh that `luyen.engine.fsdp.shard` takes. A rank that is
    late, here or at any later collective, is a RuntimeError on the others after `timeout_s`.
    CPUs speak gloo. GPUs speak NCCL, and gloo for what lies in host memory.
    """
    shape = mesh_shape(world, fsdp_size)
    if device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group(
        "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl",
        init_method=address,
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=timeout_s),
    )
    names = ("shard",) if len(shape) == 1 else ("replicate", "shard")
    return init_device_mesh(device, shape, mesh_dim_names=names)


def leave_ranks() -> None:
    """Part from the other ranks; nothing without a group. Every rank calls it."""
    if dist.is_initialized():
        dist.destroy_process_group()
