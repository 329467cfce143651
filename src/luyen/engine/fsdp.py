"""FSDP2: the ranks' process group; weights, gradients and optimizer state sharded over it.

Each decoder layer is a unit that is gathered for its own pass. The rest (embedding, final norm,
head) belongs to the root: scores are computed inside the model's forward, where the root is
gathered, and a tied embedding belongs to one unit.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor
from torch.utils._pytree import register_pytree_node

from luyen.base.errors import UserError
from luyen.config.schema.actor_rollout_ref import FsdpConfig
from luyen.engine.tensor_parallel import TENSOR, divide_layers
from luyen.models.fused.layers import AttentionPlan, LayerPlan, MlpPlan
from luyen.models.head import TokenScores
from luyen.models.policy import Policy, ValueModel
from luyen.models.rank_splits import SequenceSplit
from luyen.models.reward_model import RewardModel
from luyen.models.weights import export_as

_PLAN = "luyen_plan"
REPLICATE = "replicate"
"""Dimension of the mesh whose ranks hold copies."""


Shardable: TypeAlias = Policy | ValueModel | RewardModel


def shard_as(
    module: Shardable,
    mesh: DeviceMesh,
    fsdp_config: FsdpConfig,
    split: SequenceSplit | None = None,
) -> None:
    """`shard` with the options of the configuration; `split` divides passes over ranks too."""
    body = module.body if isinstance(module, ValueModel) else module
    if isinstance(body, Policy):
        body.sequence_split = split
    assert split is None or isinstance(body, Policy), "a reward model reads whole sequences"
    shard(
        module,
        mesh,
        cpu_offload=fsdp_config.param_offload and fsdp_config.optimizer_offload,
        reshard_after_forward=fsdp_config.reshard_after_forward,
    )


def shard(
    module: Shardable,
    mesh: DeviceMesh,
    *,
    mixed_precision: torch.dtype | None = None,
    cpu_offload: bool = False,
    reshard_after_forward: bool = True,
) -> None:
    """Shard a model in place over the last dimension of the mesh, and replicate it over the first.

    Parameters become DTensors of the same names. Every rank must have loaded the same weights, and
    builds its optimizer afterwards. Weights may be in host memory: layers are moved to the device
    of the mesh and sharded one after the other, so that it never holds more than one whole layer.
    Gradients are summed over ranks in fp32, not averaged.

    `mixed_precision` is the dtype of passes; None: that of the weights. If it is not fp32, trained
    shards are fp32 and are the masters themselves, rounded when they are gathered. On one device
    `luyen.engine.optim.MasterOptimizer` keeps rounded copies of its masters, with the same numbers.
    `cpu_offload` keeps shards and optimizer in host memory. Without `reshard_after_forward` a layer
    stays gathered until its backward pass.
    """
    body = module.body if isinstance(module, ValueModel) else module
    if isinstance(body, Policy) and not body.is_packed:
        why = "only packed models can be sharded, and transformers runs this one itself"
        raise UserError("trainer.n_gpus_per_node", mesh.size(), why, "train it on one device")
    take_apart(body)
    inner = body.net.base_model if isinstance(body, RewardModel) else body
    learning = [p for p in inner.parameters() if p.requires_grad]
    compute = mixed_precision or _only_type(learning)
    own = {id(p) for p in learning}
    names = {name for name, p in module.named_parameters() if id(p) in own}
    del learning  # what is sharded is freed layer by layer
    if TENSOR in (mesh.mesh_dim_names or ()):
        assert not isinstance(module, RewardModel), "the configuration was checked"
        divide_layers(module, mesh[TENSOR], masters=torch.float32)
        mesh = mesh[tuple(name for name in mesh.mesh_dim_names or () if name != TENSOR)]
    _shard_layers(
        module,
        mesh,
        compute=compute,
        cpu_offload=cpu_offload,
        reshard_after_forward=reshard_after_forward,
    )
    if isinstance(module, Policy):
        register_fsdp_forward_method(module, Policy.from_hidden.__name__)
    _sum_gradients(module)
    export_as(module, names, compute)


def _shard_layers(
    module: Shardable,
    mesh: DeviceMesh,
    *,
    compute: torch.dtype | None,
    cpu_offload: bool,
    reshard_after_forward: bool,
) -> None:
    """Shard each layer, the heads and what is left, in this order."""
    body = module.body if isinstance(module, ValueModel) else module
    offload = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")
    common: dict[str, Any] = {
        "mesh": mesh,
        "offload_policy": offload if cpu_offload else OffloadPolicy(),
    }
    # Inputs of the passes have the right dtype already.
    precision = MixedPrecisionPolicy(
        param_dtype=compute, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    for layer in decoder_layers(body.net if isinstance(body, RewardModel) else body.model):
        _move(layer, mesh.device_type)
        fully_shard(
            layer, mp_policy=precision, reshard_after_forward=reshard_after_forward, **common
        )
    _shard_heads(module, common)
    _move(module, mesh.device_type)
    # The root is needed again as soon as the backward pass begins.
    fully_shard(module, mp_policy=precision, reshard_after_forward=False, **common)


def decoder_layers(model: nn.Module) -> Iterator[nn.Module]:
    """The modules of the outermost `ModuleList`s."""
    lists = {name: m for name, m in model.named_modules() if isinstance(m, nn.ModuleList)}
    for name, layers in lists.items():
        if not any(name.startswith(f"{other}.") for other in lists):
            yield from layers


def take_apart(policy: Policy | RewardModel) -> None:
    """Undo fusions across FSDP units, and fused weights that are stored outside their layer.

    Each layer then computes its own norm, and projections are called one by one.
    """
    for module in policy.modules():
        plan = vars(module).get(_PLAN)
        if isinstance(plan, AttentionPlan | MlpPlan):
            vars(module)[_PLAN] = replace(plan, packed=None)
        elif isinstance(plan, LayerPlan):
            vars(module)[_PLAN] = replace(plan, next_norm=None)
    # The setter measures again which kernels the separate projections need.
    policy.is_exact = policy.is_exact


def _only_type(learning: Sequence[Tensor]) -> torch.dtype | None:
    """The dtype of all trained weights; None: no weight is trained."""
    found = {p.dtype for p in learning}
    if len(found) > 1:
        raise UserError(
            "actor_rollout_ref.model.dtype",
            sorted(map(str, found)),
            "trained weights have several dtypes, and a sharded layer is gathered in one",
            "set it to float32, or train on one device",
        )
    return next(iter(found), None)


@torch.no_grad()
def _move(module: nn.Module, device: str) -> None:
    """Move whole weights and buffers in place; trained weights become fp32 masters."""
    for parameter in module.parameters():
        if not isinstance(parameter, DTensor):
            dtype = torch.float32 if parameter.requires_grad else parameter.dtype
            parameter.data = parameter.data.to(device, dtype)
    for buffer in module.buffers():
        buffer.data = buffer.data.to(device)


def _shard_heads(module: Shardable, common: dict[str, Any]) -> None:
    """Shard heads that make one number in fp32, and a vocabulary head that is never gathered."""
    if isinstance(module, RewardModel):
        _shard_head(module.head, common)
    if not isinstance(module, ValueModel):
        return
    _shard_head(module.value, common)
    unused = module.body.head.linear
    if not any(p.requires_grad for p in unused.parameters()):
        _shard_head(unused, common)


def _shard_head(head: nn.Module, common: dict[str, Any]) -> None:
    """Shard a head in its own dtype."""
    _move(head, common["mesh"].device_type)
    precision = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
    fully_shard(head, mp_policy=precision, **common)


def _sum_gradients(module: nn.Module) -> None:
    """Sum gradients over ranks, as the loss is a sum over ranks."""
    for unit in module.modules():
        if isinstance(unit, FSDPModule):
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)


# FSDP searches outputs for tensors; before torch 2.13 only in registered types.
register_pytree_node(
    TokenScores,
    lambda s: ([s.logp, s.entropy, s.sum_pi_squared, s.is_likeliest], None),
    lambda values, _: TokenScores(
        **dict(zip(("logp", "entropy", "sum_pi_squared", "is_likeliest"), values, strict=True))
    ),
    serialized_type_name="luyen.models.head.TokenScores",
)


def reshard(model: nn.Module) -> None:
    """Free the gathered weights that a pass without gradients leaves on a sharded model.

    Otherwise the next pass would use them after the shards have changed.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def dummy_loss(model: nn.Module, device: torch.device) -> Tensor:
    """A loss whose gradients are exactly 0, for a rank that has fewer passes than another.

    Every rank must run the same number of forward and backward passes, for their collectives.
    """
    tokens = torch.zeros(2, dtype=torch.int64, device=device)
    found = model(tokens, (2,), torch.tensor([False, True], device=device))
    numbers = found.logp if isinstance(found, TokenScores) else found
    return 0.0 * numbers.sum()


# The process group.

_TIMEOUT_S = 1800.0
"""Timeout of a collective."""


def mesh_shape(world: int, fsdp_size: int) -> tuple[int, ...]:
    """`(ranks,)`, or `(replicas, ranks of a replica)` with hybrid sharding.

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
    tensor_size: int = 1,
    timeout_s: float = _TIMEOUT_S,
) -> DeviceMesh:
    """Join the process group at `address` (`tcp://HOST:PORT` or `file://PATH`).

    Returns the mesh for `shard` when all ranks have joined. If a rank is late, here or at a later
    collective, the waiting ranks raise a RuntimeError after `timeout_s`. CPU tensors use gloo, GPU
    tensors NCCL. `tensor_size` consecutive ranks divide each layer.
    """
    shape = mesh_shape(world // tensor_size, fsdp_size)
    if device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group(
        "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl",
        init_method=address,
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=timeout_s),
    )
    names = ("shard",) if len(shape) == 1 else (REPLICATE, "shard")
    if tensor_size > 1:
        shape, names = (*shape, tensor_size), (*names, TENSOR)
    mesh = init_device_mesh(device, shape, mesh_dim_names=names)
    limit_waiting(mesh, timeout_s)
    return mesh


_set_timeout: Any = vars(dist.distributed_c10d)["_set_pg_timeout"]
"""PyTorch exports it without declaring it."""


def limit_waiting(mesh: DeviceMesh, timeout_s: float) -> None:
    """Give the groups of a mesh this timeout: those that a mesh makes have one of PyTorch's own."""
    for dimension in range(mesh.ndim):
        _set_timeout(timedelta(seconds=timeout_s), mesh.get_group(dimension))


def leave_ranks() -> None:
    """Destroy the process group, if there is one. Every rank must call it."""
    if dist.is_initialized():
        dist.destroy_process_group()
