"""A policy or a critic over ranks as Megatron computes it, with masters that all engines read.

The parameters of the model stay under their Hugging Face names: fp32 masters, divided over the
ranks that divide layers, and sharded over the ranks that compute different sequences, as their
moments are (Megatron's distributed optimizer). Checkpoints, digests and publication see nothing
else. Passes compute with Megatron's own weights, which a step computes from the masters.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from luyen.base.errors import UserError
from luyen.config.megatron_models import why_not
from luyen.engine.fsdp import Shardable, export_as
from luyen.engine.megatron.fused_weights import FusedWeight
from luyen.engine.megatron.model import MegatronLayers, MegatronRanks
from luyen.engine.tensor_parallel import TensorRanks
from luyen.models.policy import Policy, ValueModel


def lay_out(module: Shardable, ranks: MegatronRanks) -> "MegatronWeights":
    """Give a rank its part of a model, in place; every rank has the whole model."""
    policy = module.body if isinstance(module, ValueModel) else module
    assert isinstance(policy, Policy), "the configuration was checked"
    linear: Any = policy.head.linear
    group = ranks.dividing
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    _refuse(policy, ranks)
    rows = linear.weight.shape[0] // size
    dividing = TensorRanks(group=group, rank=rank, size=size, rows=rows)
    layers = MegatronLayers(policy, dividing, ranks.spread, has_head=isinstance(module, Policy))
    fused = layers.weights(policy)
    if isinstance(module, ValueModel):
        fused += _value_head(module.value)
    else:
        vars(linear)["forward"] = lambda hidden: F.linear(hidden, layers.output_weight)
    policy.reader = layers.read
    policy.vocabulary_split = dividing
    weights = MegatronWeights(fused, ranks)
    learning = {name: p for name, p in module.named_parameters() if p.requires_grad}
    dtypes = {name: p.dtype for name, p in learning.items()}
    weights.take_parameters()
    for dtype in set(dtypes.values()):
        export_as(module, {name for name, own in dtypes.items() if own == dtype}, dtype)
    weights.refresh()
    return weights


def _refuse(policy: Policy, ranks: MegatronRanks) -> None:
    """A UserError unless Megatron's layers can compute this model, divided over these ranks."""
    config: Any = policy.model.config.get_text_config()
    reason = why_not(
        config.to_dict(),
        dist.get_world_size(ranks.dividing),
        expert_size=dist.get_world_size(ranks.spread),
        copies=dist.get_world_size(ranks.copies),
    )
    if reason is not None:
        raise UserError("actor_rollout_ref.actor.strategy", "megatron", *reason)


def _value_head(head: nn.Linear) -> list[FusedWeight]:
    """The head of a critic, whole on each rank, and what it computes with."""
    own = nn.Linear(head.in_features, 1, dtype=head.weight.dtype, device=head.weight.device)
    vars(head)["forward"] = own.forward
    return [
        FusedWeight(weight=own.get_parameter(name), sources=((head, name),), at=None)
        for name in ("weight", "bias")
    ]


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Place:
    """Where this rank's shard of a parameter is among the rows that it holds of it.

    Example:
        >>> _Place(rows=5, ranks=2, rank=1).most, _Place(rows=5, ranks=2, rank=1).own
        (3, 2)
    """

    rows: int
    """Rows on the ranks that share it."""
    ranks: int
    """How many they are."""
    rank: int
    """This one."""

    @classmethod
    def of(cls, rows: int, group: dist.ProcessGroup) -> "_Place":
        """This rank's among those of a group."""
        return cls(rows=rows, ranks=dist.get_world_size(group), rank=dist.get_rank(group))

    @property
    def most(self) -> int:
        """Rows of the first shard; the last ones have fewer, or none."""
        return -(-self.rows // self.ranks)

    @property
    def own(self) -> int:
        """Rows of this shard."""
        return min(self.most, max(0, self.rows - self.rank * self.most))

    def padded(self, part: Tensor) -> Tensor:
        """With rows of zeros, so that all shards are equally long."""
        missing = self.most * self.ranks - self.rows
        rest = [0, 0] * (part.dim() - 1)
        return F.pad(part, [*rest, 0, missing]) if missing else part.contiguous()


@final
class MegatronWeights:
    """What passes compute with, and the masters that it is made of; a `ComputeWeights`."""

    def __init__(self, fused: Sequence[FusedWeight], ranks: MegatronRanks) -> None:
        self._fused = fused
        self._ranks = ranks
        for one in fused:
            if one.weight is not None and one.weight.requires_grad:
                one.weight.register_post_accumulate_grad_hook(_widen)

    @torch.no_grad()
    def take_parameters(self) -> None:
        """Replace every parameter of the model with this rank's shard of it, as an fp32 master."""
        made: dict[int, nn.Parameter] = {}
        kept: list[Tensor] = []  # an id is unique while its object is there
        for one in self._fused:
            for module, name in one.sources:
                whole = module.get_parameter(name)
                if id(whole) not in made:  # else it is tied
                    kept.append(whole)
                    master = self._shard(whole, one.at)
                    made[id(whole)] = nn.Parameter(master, requires_grad=whole.requires_grad)
                module._parameters[name] = made[id(whole)]

    def _shard(self, whole: Tensor, at: int | None) -> DTensor:
        part = whole.detach()
        if at is not None:
            group = self._ranks.dividing
            part = part.chunk(dist.get_world_size(group), at)[dist.get_rank(group)]
        place = _Place.of(part.shape[0], self._ranks.sharing)
        own = part[place.rank * place.most :][: place.own].clone()
        own = own.float() if whole.requires_grad else own
        return self._as_shard(own.contiguous(), whole, at)

    def _sharing(self, one: FusedWeight) -> dist.ProcessGroup:
        """Ranks with different sequences that compute with the same part of a weight."""
        return self._ranks.copies if one.is_spread else self._ranks.sharing

    def _as_shard(self, own: Tensor, whole: Tensor, at: int | None) -> DTensor:
        placements: list[Placement] = [Replicate() if at is None else Shard(at), Shard(0)]
        return DTensor.from_local(
            own,
            self._ranks.mesh,
            placements,
            run_check=False,
            shape=whole.shape,
            stride=whole.stride(),
        )

    @torch.no_grad()
    def collect_gradients(self) -> None:
        """Give every master the gradient of the weights that are made of it, over all ranks."""
        for one in self._fused:
            weight = one.weight
            if weight is None or not weight.requires_grad:
                continue
            found = _gradient(weight)
            if one.is_partial:
                dist.all_reduce(found, group=self._ranks.dividing)
            for (module, name), part in zip(one.sources, one.split(found), strict=True):
                master: Any = module.get_parameter(name)
                own = self._reduced(part, self._sharing(one))
                master.grad = self._as_shard(own, master, one.at)

    @staticmethod
    def _reduced(part: Tensor, group: dist.ProcessGroup) -> Tensor:
        """This rank's shard of the sum over ranks that compute different sequences."""
        place = _Place.of(part.shape[0], group)
        if place.ranks == 1:
            return part.contiguous()
        padded = place.padded(part)
        found = torch.empty_like(padded)
        # Exchanged and then added in the order of ranks: the sum is the same in every run.
        dist.all_to_all_single(found, padded, group=group)
        return found.view(place.ranks, place.most, *part.shape[1:]).sum(0)[: place.own]

    @torch.no_grad()
    def refresh(self) -> None:
        """Make the weights that passes compute with from the masters."""
        for one in self._fused:
            if one.weight is not None:
                parts = [self._gathered(m.get_parameter(n), one) for m, n in one.sources]
                one.weight.copy_(one.join(parts))

    def _gathered(self, master: Any, one: FusedWeight) -> Tensor:
        """The rows of a parameter that this rank computes with."""
        assert one.weight is not None
        local: Tensor = master.to_local().to(one.weight.dtype)
        group, shape = self._sharing(one), list(master.shape)
        if one.at is not None:
            shape[one.at] //= dist.get_world_size(self._ranks.dividing)
        if one.is_spread:
            shape[0] //= dist.get_world_size(self._ranks.spread)
        place = _Place.of(shape[0], group)
        if place.ranks == 1:
            return local
        rest = [0, 0] * (local.dim() - 1)
        padded = F.pad(local, [*rest, 0, place.most - place.own])
        whole = padded.new_empty((place.most * place.ranks, *shape[1:]))
        dist.all_gather(list(whole.chunk(place.ranks)), padded, group=group)
        return whole[: place.rows]


_SUM = "luyen_gradient"


def _widen(weight: Tensor) -> None:
    """Add a gradient that is not fp32 to an fp32 sum: many passes would round it."""
    if weight.dtype == torch.float32:
        return
    assert weight.grad is not None
    kept = vars(weight)
    gradient = weight.grad.float()
    kept[_SUM] = gradient if kept.get(_SUM) is None else kept[_SUM].add_(gradient)
    weight.grad = None


def _gradient(weight: nn.Parameter) -> Tensor:
    """The gradient of all passes in fp32, which is taken away; zeros if no pass read the weight."""
    found = weight.grad if weight.dtype == torch.float32 else vars(weight).pop(_SUM, None)
    weight.grad = None
    return torch.zeros_like(weight, dtype=torch.float32) if found is None else found
