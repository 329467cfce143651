"""FSDP2: the ranks' process group; weights, gradients and optimizer state sharded over it.

Each decoder layer is a unit that is gathered for its own pass. The rest (embedding, final norm,
head) is the root's: scores are made inside the model's forward, so the root is whole then, and a
tied embedding belongs to one unit.
"""

from collections.abc import Container, Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

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
)
from torch.utils._pytree import register_pytree_node

from luyen.base.errors import UserError
from luyen.config.schema.actor_rollout_ref import FsdpConfig
from luyen.models.fused.layers import AttentionPlan, LayerPlan, MlpPlan
from luyen.models.head import TokenScores
from luyen.models.policy import Policy, ValueModel

# The type a parameter has for the world, where its shards are kept in another one.
#
# A sharded bf16 model keeps fp32 shards. Checkpoints and samplers see bf16 weights and fp32
# masters beside them, as on one device, so that any number of ranks can go on from what another
# one saved.

_EXPORT_DTYPE = "luyen_shown_dtype"


def export_as(module: nn.Module, names: Container[str], dtype: torch.dtype | None) -> None:
    """Note that these parameters are weights of this type to everybody else."""
    for name, parameter in module.named_parameters():
        if name in names and dtype is not None and parameter.dtype != dtype:
            vars(parameter)[_EXPORT_DTYPE] = dtype


def export_dtype(parameter: Tensor) -> torch.dtype:
    """The type that others see."""
    return vars(parameter).get(_EXPORT_DTYPE, parameter.dtype)


def export_parameters(module: nn.Module) -> dict[str, Tensor]:
    """`luyen.models.trained_weights.trained_parameters` as others see them; shards stay shards."""
    return dict(iterate_export_parameters(module))


def iterate_export_parameters(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The same, one by one: in another type all of them would take half as much memory again."""
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            # To detach a shard takes longer than to read it; where nothing is recorded, none need.
            own = parameter.detach() if torch.is_grad_enabled() else parameter
            dtype = export_dtype(parameter)
            yield name, own if own.dtype == dtype else own.to(dtype)


_PLAN = "luyen_plan"


def shard_as(module: Policy | ValueModel, mesh: DeviceMesh, fsdp_config: FsdpConfig) -> None:
    """`shard` as the configuration says."""
    shard(
        module,
        mesh,
        cpu_offload=fsdp_config.param_offload and fsdp_config.optimizer_offload,
        reshard_after_forward=fsdp_config.reshard_after_forward,
    )


def shard(
    module: Policy | ValueModel,
    mesh: DeviceMesh,
    *,
    mixed_precision: torch.dtype | None = None,
    cpu_offload: bool = False,
    reshard_after_forward: bool = True,
) -> None:
    """Shard a model in place, over the last dimension of the mesh; over the first it is replicated.

    Parameters become DTensors under the same names. Every rank has loaded the same weights before,
    and makes its optimizer after. Gradients are summed over ranks, in fp32, never averaged.

    `mixed_precision` is the type that passes compute in; None: the type of the weights. Where it is
    not fp32, shards of what learns are fp32 and are the masters themselves: they are rounded when
    they are gathered. That is what `luyen.engine.optim.MasterAdamW` does on one device with bf16
    copies of its masters, and gives the same numbers. `cpu_offload` keeps shards and optimizer in
    host memory. Without `reshard_after_forward` a layer stays whole until its backward pass.
    """
    policy = module.body if isinstance(module, ValueModel) else module
    if not policy.is_packed:
        why = "a model that transformers itself runs is not sharded: ranks would read other rows"
        raise UserError("trainer.n_gpus_per_node", mesh.size(), why, "train it on one device")
    _take_apart(policy)
    learning = [p for p in policy.parameters() if p.requires_grad]
    compute = mixed_precision or _only_type(learning)
    own = {id(p) for p in learning}
    names = {name for name, p in module.named_parameters() if id(p) in own}
    _widen(policy)
    offload = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")
    common: dict[str, Any] = {
        "mesh": mesh,
        "offload_policy": offload if cpu_offload else OffloadPolicy(),
    }
    # Passes hand over tensors of the right type themselves.
    precision = MixedPrecisionPolicy(
        param_dtype=compute, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    for layer in decoder_layers(policy.model):
        fully_shard(
            layer, mp_policy=precision, reshard_after_forward=reshard_after_forward, **common
        )
    if isinstance(module, ValueModel):
        _shard_value_head(module, common)
    # The root is needed again as soon as the backward pass begins.
    fully_shard(module, mp_policy=precision, reshard_after_forward=False, **common)
    _sum_gradients(module)
    export_as(module, names, compute)


def decoder_layers(model: nn.Module) -> Iterator[nn.Module]:
    """The layers of the outermost lists of modules."""
    lists = {name: m for name, m in model.named_modules() if isinstance(m, nn.ModuleList)}
    for name, layers in lists.items():
        if not any(name.startswith(f"{other}.") for other in lists):
            yield from layers


def _take_apart(policy: Policy) -> None:
    """Undo what reaches over the borders of a unit, or holds weights apart from their layer.

    A layer's norm is then made by the layer itself, and projections are called one by one.
    """
    for module in policy.modules():
        plan = vars(module).get(_PLAN)
        if isinstance(plan, AttentionPlan | MlpPlan):
            vars(module)[_PLAN] = replace(plan, packed=None)
        elif isinstance(plan, LayerPlan):
            vars(module)[_PLAN] = replace(plan, next_norm=None)
    # Projections that were one product may need ours, each by itself.
    policy.is_exact = policy.is_exact


def _only_type(learning: Sequence[Tensor]) -> torch.dtype | None:
    """The type of all weights that learn; None where none does."""
    found = {p.dtype for p in learning}
    if len(found) > 1:
        raise UserError(
            "actor_rollout_ref.model.dtype",
            sorted(map(str, found)),
            "the weights that learn have several types, and a sharded layer is gathered in one",
            "set it to float32, or train on one device",
        )
    return next(iter(found), None)


@torch.no_grad()
def _widen(policy: Policy) -> None:
    """fp32 for what learns; what is frozen keeps its type, since nothing is added to it."""
    for parameter in policy.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()


def _shard_value_head(module: ValueModel, common: dict[str, Any]) -> None:
    """The value's own layer computes in fp32; a vocabulary head without use is never gathered."""
    precision = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
    fully_shard(module.value, mp_policy=precision, **common)
    head = module.body.head.linear
    if not any(p.requires_grad for p in head.parameters()):
        fully_shard(head, mp_policy=precision, **common)


def _sum_gradients(module: nn.Module) -> None:
    """A loss is a sum over ranks, and so is its gradient."""
    for unit in module.modules():
        if isinstance(unit, FSDPModule):
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)


# FSDP looks for the tensors of an output; before torch 2.13 it looks into registered types only.
register_pytree_node(
    TokenScores,
    lambda s: ([s.logp, s.entropy, s.sum_pi_squared], None),
    lambda values, _: TokenScores(
        **dict(zip(("logp", "entropy", "sum_pi_squared"), values, strict=True))
    ),
    serialized_type_name="luyen.models.head.TokenScores",
)


# Sharded weights at rest between passes.


def reshard(model: nn.Module) -> None:
    """Let go of whole weights that a pass without gradients has left behind on a sharded model.

    They would be taken for the current ones after the shards have changed.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


# The pass of a rank that has no sequences left while others still work.
#
# The collectives of a sharded model count on every rank: each must run the same number of
# forward and backward passes.


def dummy_loss(model: nn.Module, device: torch.device) -> Tensor:
    """0 times the score of one token that follows another: every gradient is exactly 0."""
    tokens = torch.zeros(2, dtype=torch.int64, device=device)
    found = model(tokens, (2,), torch.tensor([False, True], device=device))
    numbers = found.logp if isinstance(found, TokenScores) else found
    return 0.0 * numbers.sum()


# Processes that train together: how they meet, and how they part.

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
