"""Tensor and expert parallelism: ranks divide heads, MLPs' inner width, experts, and vocabulary.

Each rank has some columns of the projections that read the residual stream, and the same rows of
those that write to it; a sum over the ranks follows each of the latter. A mixture's experts stay
whole, and each rank has some of them. The residual stream, norms and routers are the same on all
ranks. Parameters are DTensors over the ranks, which FSDP2 shards further;
modules compute with the local part.
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from luyen.base.errors import UserError
from luyen.models.experts import routed_layers, split_experts
from luyen.models.policy import Policy, ValueModel
from luyen.models.rank_splits import ExpertSplit
from luyen.models.weights import is_adapter_layer

TENSOR = "tensor"
"""Dimension of the mesh whose ranks divide layers."""
FIELD = "actor_rollout_ref.actor.fsdp_config.tensor_parallel_size"

_MODELS = ("Llama", "Mistral", "Qwen2", "Qwen3", "Mixtral", "Qwen2Moe", "Qwen3Moe")
_ATTENTIONS = {f"{name}Attention" for name in _MODELS}
_MLPS = {f"{name}MLP" for name in _MODELS}


def divided_dimension(tensor: DTensor) -> int | None:
    """Along which dimension ranks divide a parameter; None: each has all of it."""
    names = tensor.device_mesh.mesh_dim_names or ()
    placement = tensor.placements[names.index(TENSOR)] if TENSOR in names else None
    return placement.dim if isinstance(placement, Shard) else None


def is_counted(tensor: DTensor) -> bool:
    """Whether a sum over the ranks that divide layers takes it from this one.

    What is whole on each of them is counted on the first.
    """
    is_divided = TENSOR in (tensor.device_mesh.mesh_dim_names or ())
    if not is_divided or divided_dimension(tensor) is not None:
        return True
    return tensor.device_mesh.get_local_rank(TENSOR) == 0


# Collectives.


class _Enter(torch.autograd.Function):
    """The same values; ranks compute different parts from them, so gradients are summed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        total = grads[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None


class _Sum(torch.autograd.Function):
    """The sum of the ranks' parts, whose gradient every rank has."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        del ctx
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        del ctx
        return grads[0], None


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TensorRanks:
    """The ranks that divide layers, and which of them this one is.

    Example:
        >>> ranks = TensorRanks(group=dist.group.WORLD, rank=1, size=2, rows=32)
        >>> ranks.first
        32
    """

    group: dist.ProcessGroup
    """Connects them."""
    rank: int
    """This one, of the group."""
    size: int
    """How many they are."""
    rows: int
    """Rows of the vocabulary that each has."""

    @property
    def first(self) -> int:
        """First row of this rank."""
        return self.rank * self.rows

    def enter(self, x: Tensor) -> Tensor:
        """The same values, whose gradient is summed over the ranks."""
        entered: Any = _Enter.apply(x, self.group)
        return entered

    def sum(self, x: Tensor) -> Tensor:
        """The sum over the ranks; every rank has its gradient."""
        total: Any = _Sum.apply(x, self.group)
        return total

    def max(self, x: Tensor) -> Tensor:
        """The largest of the ranks, without a gradient."""
        largest = x.detach().clone()
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.group)
        return largest

    def join(self, x: Tensor) -> Tensor:
        """`[..., rows]` of every rank one after the other, without a gradient."""
        parts = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(parts, x.contiguous(), group=self.group)
        return torch.cat(parts, -1)


# How a module sees its parameters.


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _View:
    """What of a parameter a module computes with on this rank.

    Example:
        >>> _View(is_partial=True).rows is None
        True
    """

    is_partial: bool = False
    """Whether ranks have different parts of the gradient of a parameter that all of them hold."""
    rows: Tensor | None = None
    """Rows of it; None: all."""
    is_silent: bool = False
    """Whether it counts on another rank, and is 0 here."""

    def of(self, parameter: DTensor) -> Tensor:
        """The local part."""
        local = parameter.to_local(grad_placements=[Partial()] if self.is_partial else None)
        local = local if self.rows is None else local.index_select(0, self.rows)
        return local * 0.0 if self.is_silent else local


_VIEWS = "luyen_views"
_WHOLE = _View()


def _read(self: Any, name: str) -> Tensor | None:
    parameter = self._parameters[name]
    is_gathered = isinstance(parameter, DTensor) and parameter.device_mesh.ndim == 1
    # Between passes FSDP has its shards here, and reads them itself.
    return vars(self)[_VIEWS].get(name, _WHOLE).of(parameter) if is_gathered else parameter


@functools.cache
def _divided_class(kind: type[nn.Module], names: tuple[str, ...]) -> type[nn.Module]:
    """The class with parameters of these names that read as the local part."""
    reads = {name: property(functools.partial(_read, name=name)) for name in names}
    return type(kind.__name__, (kind,), {**reads, "__module__": kind.__module__})


@final
class _Divider:
    """Replaces the parameters of modules with this rank's parts, each once."""

    def __init__(self, mesh: DeviceMesh, masters: torch.dtype | None) -> None:
        self.device = mesh.device_type
        """Where parts are."""
        self._mesh = mesh
        self._masters = masters
        self._made: dict[int, nn.Parameter] = {}
        self._kept: list[nn.Parameter] = []  # an id is unique while its object is there

    @torch.no_grad()
    def divide(
        self, module: nn.Module, placement: Placement, views: dict[str, _View] | None = None
    ) -> None:
        """The module's own parameters; those of one dimension are not cut along the second."""
        own = {name: p for name, p in module._parameters.items() if p is not None}
        if not own or _VIEWS in vars(module):
            return
        for name, parameter in own.items():
            fits = not isinstance(placement, Shard) or placement.dim < parameter.dim()
            module._parameters[name] = self._part(parameter, placement if fits else Replicate())
        vars(module)[_VIEWS] = views or {}
        module.__class__ = _divided_class(type(module), tuple(own))

    def _part(self, parameter: nn.Parameter, placement: Placement) -> nn.Parameter:
        if id(parameter) not in self._made:
            local = parameter.data
            if isinstance(placement, Shard):
                size, rank = self._mesh.size(), self._mesh.get_local_rank()
                local = local.chunk(size, placement.dim)[rank].clone()
            dtype = self._masters if parameter.requires_grad else None
            local = local.to(self.device, dtype or parameter.dtype)
            part = DTensor.from_local(
                local.contiguous(),
                self._mesh,
                [placement],
                run_check=False,
                shape=parameter.shape,
                stride=parameter.stride(),
            )
            made = nn.Parameter(part, requires_grad=parameter.requires_grad)
            self._made[id(parameter)] = made
            self._kept.append(parameter)
        return self._made[id(parameter)]


# Layers.


def divide_layers(
    module: Policy | ValueModel,
    mesh: DeviceMesh,
    *,
    masters: torch.dtype | None = None,
    field: str = FIELD,
) -> TensorRanks:
    """Divide a model in place over a mesh of one dimension; every rank has the whole model.

    The whole may be in host memory; parts are on the device of the mesh. Parts that are trained
    become `masters`; None: they keep their dtype. `field` is the key that says over how many, for
    errors.
    """
    policy = module.body if isinstance(module, ValueModel) else module
    _refuse(policy, mesh.size(), field)
    group = mesh.get_group()
    embedding: Any = policy.model.get_input_embeddings()
    rows = embedding.weight.shape[0] // mesh.size()
    ranks = TensorRanks(group=group, rank=mesh.get_local_rank(), size=mesh.size(), rows=rows)
    divider = _Divider(mesh, masters)
    for part in list(policy.model.modules()):
        if type(part).__name__ in _ATTENTIONS:
            _divide_attention(part, ranks, divider)
        elif type(part).__name__ in _MLPS:
            _divide_reading(part, ("gate_proj", "up_proj"), ranks, divider)
            _divide_writing(part.get_submodule("down_proj"), ranks, divider)
    for block in routed_layers(policy.model):
        _divide_experts(block.get_submodule("experts"), ranks, divider)
    divider.divide(embedding, Shard(0))
    _look_up_own_rows(embedding, ranks)
    _divide_outputs(policy.head.linear, divider)
    policy.vocabulary_split = ranks
    for part in list(module.modules()):
        divider.divide(part, Replicate())
    for buffer in module.buffers():
        buffer.data = buffer.data.to(mesh.device_type)
    return ranks


@final
class _JoinedOutput(nn.Module):
    """The output layer of a divided model: this rank's rows, then those of all ranks."""

    def __init__(self, inner: nn.Module, ranks: TensorRanks) -> None:
        super().__init__()
        self.inner = inner
        self._ranks = ranks

    @property
    def weight(self) -> Tensor:
        """This rank's rows."""
        return self.inner.weight  # pyright: ignore[reportReturnType]

    def forward(self, hidden: Tensor) -> Tensor:
        """Logits of the whole vocabulary, the same on every rank."""
        return self._ranks.join(self.inner(hidden))


def join_logits(policy: Policy, ranks: TensorRanks) -> None:
    """Let the head of a divided model make the logits of all ranks, for sampling."""
    policy.vocabulary_split = None
    policy.head = replace(
        policy.head, linear=_JoinedOutput(policy.head.linear, ranks), part_rows=ranks.rows
    )


def _refuse(policy: Policy, size: int, field: str) -> None:
    """A UserError unless every layer can be divided over so many ranks."""
    config: Any = policy.model.config.get_text_config()
    attentions = [m for m in policy.model.modules() if type(m).__name__ in _ATTENTIONS]
    kind = type(policy.model).__name__
    if len(attentions) != config.num_hidden_layers:
        why = f"how the layers of {kind} are divided is not known"
        fix = "set it to 1, or name a Llama, Mistral, Mixtral, Qwen 2 or Qwen 3"
        raise UserError(field, size, why, fix)
    if is_adapter_layer(policy.model.get_input_embeddings()):
        why = f"the embedding of {kind} has an adapter, whose rows are not divided"
        raise UserError(field, size, why, "leave embed_tokens out of model.target_modules")
    sizes = {name: vars(config)[name] for name in ("num_attention_heads", "vocab_size")}
    mlps = [m for m in policy.model.modules() if type(m).__name__ in _MLPS]
    # A mixture has several widths, and some have no MLP.
    sizes |= {_width_name(m, config): m.get_submodule("down_proj").in_features for m in mlps}
    for block in routed_layers(policy.model):
        experts: Any = block.get_submodule("experts")
        sizes["num_experts"] = len(experts.down_proj)
    for name, number in sizes.items():
        if number % size:
            why = f"{name} of {kind} is {number}, which {size} devices cannot divide"
            raise UserError(field, size, why, f"set it to a divisor of {number}")


def _width_name(mlp: Any, config: Any) -> str:
    is_shared = mlp.down_proj.in_features != config.intermediate_size
    return "shared_expert_intermediate_size" if is_shared else "intermediate_size"


def _divide_experts(experts: Any, ranks: TensorRanks, divider: _Divider) -> None:
    """Keep this rank's experts of a layer, each whole."""
    count = len(experts.down_proj) // ranks.size
    divider.divide(experts, Shard(0))
    split_experts(experts, ExpertSplit(ranks=ranks, first=ranks.rank * count, count=count))


def _divide_attention(attention: Any, ranks: TensorRanks, divider: _Divider) -> None:
    config = attention.config
    heads, groups = config.num_attention_heads, config.num_key_value_heads
    _divide_reading(attention, ("q_proj",), ranks, divider)
    if groups % ranks.size == 0:
        _divide_reading(attention, ("k_proj", "v_proj"), None, divider)
    else:
        rows = _key_rows(heads, groups, attention.head_dim, ranks)
        for name in ("k_proj", "v_proj"):
            _keep_whole(attention.get_submodule(name), rows, divider)
    for name, norm in attention.named_children():
        if name in ("q_norm", "k_norm"):
            divider.divide(norm, Replicate(), {"weight": _View(is_partial=True)})
    _divide_writing(attention.o_proj, ranks, divider)


def _key_rows(heads: int, groups: int, width: int, ranks: TensorRanks) -> list[int]:
    """Rows of the key projection that belong to this rank's query heads.

    Example:
        Two of four ranks need the first of two key heads.

        >>> rank = TensorRanks(group=dist.group.WORLD, rank=1, size=4, rows=1)
        >>> _key_rows(4, 2, 3, rank)
        [0, 1, 2]
    """
    own = heads // ranks.size
    wanted = [h * groups // heads for h in range(ranks.rank * own, (ranks.rank + 1) * own)]
    distinct = sorted(set(wanted))
    # Heads that are shared unequally get a key of their own.
    is_equal = wanted == [g for g in distinct for _ in range(own // len(distinct))]
    return [g * width + i for g in (distinct if is_equal else wanted) for i in range(width)]


def _linears(projection: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """The layer itself, or the base and the matrices of its adapter, with what each is."""
    parts = dict(projection.named_children())
    if "base_layer" not in parts:
        yield projection, "base"
        return
    yield parts["base_layer"], "base"
    for name in ("lora_A", "lora_B"):
        for inner in parts[name].children():
            yield inner, name


def _divide_reading(
    owner: nn.Module, names: tuple[str, ...], ranks: TensorRanks | None, divider: _Divider
) -> None:
    """Divide outputs of projections; with `ranks`, what the owner reads enters the ranks."""
    for name in names:
        _divide_outputs(owner.get_submodule(name), divider)
    if ranks is not None:
        enter = ranks.enter

        def entered(_: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
            if given:
                return (enter(given[0]), *given[1:]), named
            return given, {**named, "hidden_states": enter(named["hidden_states"])}

        owner.register_forward_pre_hook(entered, with_kwargs=True)


def _divide_outputs(projection: nn.Module, divider: _Divider) -> None:
    for linear, part in _linears(projection):
        if part == "lora_A":  # whole, and read by columns of lora_B
            divider.divide(linear, Replicate(), {"weight": _View(is_partial=True)})
        else:
            divider.divide(linear, Shard(0))


def _keep_whole(projection: nn.Module, rows: list[int], divider: _Divider) -> None:
    """Every rank keeps all rows, and computes its own."""
    own = _View(is_partial=True, rows=torch.tensor(rows, device=divider.device))
    for linear, part in _linears(projection):
        view = _View(is_partial=True) if part == "lora_A" else own
        divider.divide(linear, Replicate(), {"weight": view, "bias": view})


def _divide_writing(projection: nn.Module, ranks: TensorRanks, divider: _Divider) -> None:
    """Divide inputs of a projection; its outputs are summed over the ranks."""

    def summed(_: nn.Module, __: tuple[Any, ...], made: Tensor) -> Tensor:
        return ranks.sum(made)

    for linear, part in _linears(projection):
        if part == "lora_B":  # it reads the sum of what lora_A made, and is whole
            divider.divide(linear, Replicate())
            continue
        bias = _View(is_partial=True, is_silent=ranks.rank > 0)
        divider.divide(linear, Shard(1), {"bias": bias})
        linear.register_forward_hook(summed)


def _look_up_own_rows(embedding: Any, ranks: TensorRanks) -> None:
    """Tokens of other ranks' rows are 0 here; the sum has every token."""
    inner, padding = embedding.forward, embedding.padding_idx
    if padding is not None:
        is_own = ranks.first <= padding < ranks.first + ranks.rows
        embedding.padding_idx = padding - ranks.first if is_own else None

    def forward(tokens: Tensor) -> Tensor:
        own = tokens - ranks.first
        is_own = (own >= 0) & (own < ranks.rows)
        found = inner(own.clamp(0, ranks.rows - 1))
        return ranks.sum(found * is_own[..., None])

    vars(embedding)["forward"] = forward
