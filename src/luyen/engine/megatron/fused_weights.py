"""Megatron's fused weights, and the Hugging Face weights that each of them is made of.

Ranks that divide layers have the same rows or columns of both, so that a rank joins and splits its
own parts alone. A parameter of ours is fp32, under its Hugging Face name, and sharded over the
ranks that compute different sequences; a weight of Megatron's is whole on each of these, in the
dtype of passes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, final

import torch
from torch import Tensor, nn

from luyen.engine.megatron.experts import RoutedExperts

Join: TypeAlias = Callable[[Sequence[Tensor]], Tensor]
Split: TypeAlias = Callable[[Tensor], list[Tensor]]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionHeads:
    """Heads of a rank: the rows of Megatron's projection of queries, keys and values.

    Megatron stores, for each head of keys, the queries that read it, then the key, then the value.

    Example:
        >>> heads = AttentionHeads(groups=1, queries=2, width=1)
        >>> q, k, v = torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0]]), torch.tensor([[4.0]])
        >>> heads.join([q, k, v])[:, 0].tolist()
        [1.0, 2.0, 3.0, 4.0]
    """

    groups: int
    """Heads of keys."""
    queries: int
    """Heads of queries that read one of them."""
    width: int
    """Width of a head."""

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Megatron's weight or bias, from those of queries, keys and values."""
        rest = parts[0].shape[1:]
        return torch.cat([p.reshape(self.groups, -1, *rest) for p in parts], 1).flatten(0, 1)

    def split(self, joined: Tensor) -> list[Tensor]:
        """What `join` was given."""
        rows = [self.queries * self.width, self.width, self.width]
        by_group = joined.reshape(self.groups, sum(rows), *joined.shape[1:])
        return [part.flatten(0, 1) for part in by_group.split(rows, 1)]


def join_gate(parts: Sequence[Tensor]) -> Tensor:
    """Megatron's first weight of an MLP, from those of gate and up."""
    return torch.cat(list(parts))


def split_gate(joined: Tensor) -> list[Tensor]:
    """What `join_gate` was given."""
    return list(joined.chunk(2))


def same_one(parts: Sequence[Tensor]) -> Tensor:
    """A weight that is the same in both."""
    (part,) = parts
    return part


def as_one(joined: Tensor) -> list[Tensor]:
    """What `same_one` was given."""
    return [joined]


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FusedWeight:
    """A weight that passes compute with, and where the parameters that it is made of are.

    Example:
        >>> norm = nn.RMSNorm(2)
        >>> FusedWeight(weight=norm.weight, sources=((norm, "weight"),), at=None).is_partial
        False
    """

    weight: nn.Parameter | None
    """Of Megatron; None: passes do not read it."""
    sources: tuple[tuple[nn.Module, str], ...]
    """Modules of the Hugging Face model and the names of their parameters."""
    at: int | None
    """Dimension along which ranks divide it; None: each has all of it."""
    join: Join = same_one
    """The weight from the parts of its parameters."""
    split: Split = as_one
    """The other way round."""
    is_partial: bool = False
    """Whether ranks that divide layers have different parts of its gradient."""
    is_spread: bool = False
    """Whether ranks that compute different sequences may have different experts of it."""


# Layers.


def layer_weights(theirs: Any, ours: Any, heads: AttentionHeads) -> list[FusedWeight]:
    """The weights of a layer of Megatron's, and their sources in that of the Hugging Face model."""
    attention = theirs.self_attention
    names = ("q_proj", "k_proj", "v_proj")
    reads = [ours.self_attn.get_submodule(name) for name in names]
    is_routed = isinstance(theirs.mlp, RoutedExperts)
    found = [
        plain_weight(theirs.input_layernorm.weight, ours.input_layernorm),
        *(
            FusedWeight(
                weight=attention.linear_qkv.get_parameter(part),
                sources=tuple((linear, part) for linear in reads),
                at=0,
                join=heads.join,
                split=heads.split,
            )
            for part, _ in reads[0].named_parameters(recurse=False)
        ),
        plain_weight(attention.linear_proj.weight, ours.self_attn.o_proj, at=1),
        plain_weight(theirs.pre_mlp_layernorm.weight, ours.post_attention_layernorm),
        *(_expert_weights if is_routed else _mlp_weights)(theirs.mlp, ours.mlp),
    ]
    for theirs_name, name in (("q_layernorm", "q_norm"), ("k_layernorm", "k_norm")):
        norm = dict(ours.self_attn.named_children()).get(name)
        if norm is not None:
            weight = attention.get_submodule(theirs_name).weight
            found.append(plain_weight(weight, norm, is_partial=True))
    return found


def _mlp_weights(theirs: Any, ours: Any) -> list[FusedWeight]:
    return _gated_weights(theirs.linear_fc1.weight, theirs.linear_fc2.weight, ours)


def _gated_weights(first: Any, second: Any, ours: Any) -> list[FusedWeight]:
    """Of an MLP whose gate and up are one weight."""
    joined = FusedWeight(
        weight=first,
        sources=((ours.gate_proj, "weight"), (ours.up_proj, "weight")),
        at=0,
        join=join_gate,
        split=split_gate,
    )
    return [joined, plain_weight(second, ours.down_proj, at=1)]


def _expert_weights(theirs: Any, ours: Any) -> list[FusedWeight]:
    """Stacked experts are divided whole, so that they are the same in both."""
    stacked = {"gate_up_proj": theirs.gate_up, "down_proj": theirs.down}
    experts = [
        FusedWeight(weight=weight, sources=((ours.experts, name),), at=0, is_spread=True)
        for name, weight in stacked.items()
    ]
    found = [plain_weight(theirs.router, ours.gate), *experts]
    if theirs.has_shared:
        found.append(plain_weight(theirs.shared_router, ours.shared_expert_gate))
        found += _gated_weights(theirs.shared_gate_up, theirs.shared_down, ours.shared_expert)
    return found


def plain_weight(
    weight: Any, module: nn.Module, *, at: int | None = None, is_partial: bool = False
) -> FusedWeight:
    """One that is a parameter of this module in both."""
    return FusedWeight(weight=weight, sources=((module, "weight"),), at=at, is_partial=is_partial)
