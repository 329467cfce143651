"""Weights, gradients and optimizer state sharded over ranks, by torch's FSDP2.

Each decoder layer is a unit that is gathered for its own pass. The rest (embedding, final norm,
head) is the root's: scores are made inside the model's forward, so the root is whole then, and a
tied embedding belongs to one unit.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.utils._pytree import register_pytree_node

from luyen.base.errors import UserError
from luyen.config.schema.fsdp import Fsdp
from luyen.engine.shown import show_as
from luyen.models.fused.layers import AttentionPlan, LayerPlan, MlpPlan
from luyen.models.head import Scored
from luyen.models.policy import Policy
from luyen.models.value import ValueModel

_PLAN = "luyen_plan"


def shard_as(module: Policy | ValueModel, mesh: DeviceMesh, fsdp_config: Fsdp) -> None:
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
    show_as(module, names, compute)


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
    Scored,
    lambda s: ([s.logp, s.entropy, s.sum_pi_squared], None),
    lambda values, _: Scored(
        **dict(zip(("logp", "entropy", "sum_pi_squared"), values, strict=True))
    ),
    serialized_type_name="luyen.models.head.Scored",
)
