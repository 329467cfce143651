"""Mixtures of experts: routing, products and sums in a fixed order, and a log of what was routed.

The experts of a token are the k likeliest, of equally likely ones those that come first; the rows
of each expert are multiplied together, and a token adds its experts in the order in which they were
chosen. So its bits depend on no other token. On a GPU that need not be exact the layers of
transformers compute, unless ranks divide the experts.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MethodType
from typing import Any, final

import torch
from torch import Tensor, nn

from luyen.base.errors import UserError
from luyen.base.records import ExpertRoutes
from luyen.models.batch_invariant import batch_invariant, gather_rows
from luyen.models.batch_invariant_linear import (
    batch_invariant_linear,
    few_rows_product,
    grouped_linear,
)
from luyen.models.fused.packed_linear import Product
from luyen.models.rank_splits import ExpertSplit

ROUTING = "luyen_routing"
"""Forward keyword argument: the `RoutingLog` of a call, which every decoder layer gets."""
_EXACT = "luyen_exact"
"""Attribute of a routed layer and of its router: whether rows must not depend on each other."""
_SPLIT = "luyen_split"
"""Attribute of the experts of a layer: the `ExpertSplit` of the ranks that divide them."""
_BLOCKS = ("MixtralSparseMoeBlock", "Qwen2MoeSparseMoeBlock", "Qwen3MoeSparseMoeBlock")

# What routers decide.


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Routing:
    """What a router decided.

    Example:
        >>> route(torch.tensor([[0.0, 1.0, 1.0, 1.0]]), 2).experts
        tensor([[1, 2]])
    """

    probability: Tensor
    """`[tok, expert]` in fp32, of all experts."""
    experts: Tensor
    """`[tok, k]` experts of each token, the likeliest first."""


def route(logits: Tensor, k: int) -> Routing:
    """The k likeliest experts of each row; of equally likely ones, those of the lower numbers."""
    probability = torch.softmax(logits, -1, dtype=torch.float32)
    order = probability.detach().sort(dim=-1, descending=True, stable=True).indices
    return Routing(probability=probability, experts=order[:, :k])


@final
class RoutingLog:
    """What the routers of a model decided in one pass.

    It travels with the call as attention's context does: a layer that is computed again in the
    backward pass finds its first entry, and adds none.
    """

    def __init__(self, recorded: Tensor | None = None, *, is_replayed: bool = False) -> None:
        """`recorded`: `[tok, layer, k]` experts that another pass over these tokens chose.

        They are compared with those of this pass, and with `is_replayed` used instead of them. The
        largest number of their type stands where nothing was recorded.
        """
        self._layers: dict[int, Routing] = {}
        self._copies: Tensor | None = None
        self._recorded = recorded
        self._is_replayed = is_replayed
        self._changed: dict[int, tuple[Tensor, Tensor]] = {}
        """Of each layer, the tokens whose sets of experts differ, and those that can be compared.
        """

    @property
    def is_replayed(self) -> bool:
        """Whether layers take the experts of another pass."""
        return self._is_replayed and self._recorded is not None

    def experts_for(self, layer: int, own: Tensor, experts: int) -> Tensor:
        """`[tok, k]` of so many experts; those that a router chose itself, `own`, are compared."""
        if self._recorded is None:
            return own
        shape = (own.shape[0], own.shape[1])
        found = self._recorded[:, layer] if layer < self._recorded.shape[1] else None
        if found is None or tuple(found.shape) != shape:
            raise self._of_another_model()
        found = found.long()
        is_known = found[:, 0] != _missing(self._recorded.dtype)
        sets = found.sort(-1).values
        is_odd = (sets[:, 0] < 0) | (sets[:, -1] >= experts) | (sets.diff(dim=-1) == 0).any(-1)
        if (is_known & is_odd).any():
            why = f"a token has an expert twice, or one that is none of the {experts}"
            raise UserError("routes", list(self._recorded.shape), why, _SAME_MODEL)
        is_changed = is_known & (sets != own.sort(-1).values).any(-1)
        self._changed.setdefault(layer, (is_changed, is_known))
        return torch.where(is_known[:, None], found, own) if self._is_replayed else own

    def _of_another_model(self) -> UserError:
        sizes = [] if self._recorded is None else list(self._recorded.shape)
        why = "its routers have another number of layers or of experts a token"
        return UserError("routes", sizes, why, _SAME_MODEL)

    def changed(self) -> tuple[Tensor, Tensor] | None:
        """How many tokens, summed over layers, have other experts than those recorded; and of how
        many that is known. None: nothing was recorded."""
        if self._recorded is None:
            return None
        if len(self._changed) != self._recorded.shape[1]:
            raise self._of_another_model()
        pairs = [pair for _, pair in sorted(self._changed.items())]
        copies = 1 if self._copies is None else self._copies
        changed, known = ((torch.stack(part) * copies).sum() for part in zip(*pairs, strict=True))
        return changed, known

    def routes(self) -> ExpertRoutes:
        """The experts of all tokens, in as few bytes as their number allows."""
        layers = [routing for _, routing in sorted(self._layers.items())]
        width = 1 if layers[0].probability.shape[-1] <= _missing(torch.uint8) else 2
        chosen = torch.stack([routing.experts for routing in layers], 1)
        kind = torch.uint8 if width == 1 else torch.int16
        data = chosen.to(device="cpu", dtype=kind).numpy().tobytes()
        return ExpertRoutes(layers=len(layers), chosen=chosen.shape[-1], width=width, data=data)

    def add(self, layer: int, routing: Routing) -> None:
        """Note what a routed layer decided, once; layers count from 0."""
        self._layers.setdefault(layer, routing)

    def count_rows(self, copies: Tensor, first: Tensor) -> None:
        """Each row of the pass stands for so many tokens, of which `first` is where one stands."""
        self._copies = copies
        if self._recorded is not None:
            self._recorded = self._recorded[first]

    def counts(self) -> Tensor:
        """`[layer, expert]` tokens that each expert was chosen for, in float64."""
        return torch.stack([self._counts_of(self._layers[i]) for i in sorted(self._layers)])

    def probability(self) -> Tensor:
        """`[expert]` probabilities summed over all tokens and layers, with their gradient."""
        sums = [self._weights(r) @ r.probability for _, r in sorted(self._layers.items())]
        return _sum_in_order(sums)

    def _counts_of(self, routing: Routing) -> Tensor:
        weights = self._weights(routing).double().repeat_interleave(routing.experts.shape[-1])
        found = weights.new_zeros(routing.probability.shape[-1])
        # Whole numbers: no order of additions changes their sum.
        return found.index_add_(0, routing.experts.flatten(), weights)

    def _weights(self, routing: Routing) -> Tensor:
        if self._copies is None:
            return routing.probability.new_ones(routing.probability.shape[0])
        return self._copies.to(routing.probability.dtype)


_SAME_MODEL = "use the model that these rollouts were sampled with"


def recorded_routes(routes: Sequence[tuple[ExpertRoutes | None, int]]) -> Tensor:
    """`[tok, layer, k]` of sequences of so many tokens, of which one at least has them.

    Example:
        >>> known = ExpertRoutes(layers=1, chosen=2, width=1, data=bytes([3, 0]))
        >>> found = recorded_routes([(known, 2), (None, 1)])
        >>> found.flatten().tolist()
        [3, 0, 255, 255, 255, 255]
    """
    known = [one for one, _ in routes if one is not None]
    sizes = {(one.layers, one.chosen, one.width) for one in known}
    if len(sizes) > 1:
        why = "rollouts of one step were recorded with different routers"
        raise UserError("routes", sorted(sizes), why, "sample all of them with one model")
    longest = max((one.tokens - count for one, count in routes if one is not None), default=0)
    if longest > 0:
        why = f"a sequence has experts of {longest} tokens more than it has tokens"
        raise UserError("routes", longest, why, "generate these rollouts again")
    empty = replace(known[0], data=b"")
    data = bytearray().join((one or empty).padded(count) for one, count in routes)
    kind = torch.uint8 if empty.width == 1 else torch.int16
    return torch.frombuffer(data, dtype=kind).view(-1, empty.layers, empty.chosen)


def _missing(kind: torch.dtype) -> int:
    """The number that stands for no expert: all its bits are set."""
    return 255 if kind == torch.uint8 else -1


# The layers of transformers, given another forward.


def routed_layers(model: nn.Module) -> list[nn.Module]:
    """The layers of the model whose routing is known, in order."""
    return [module for module in model.modules() if _is_known(module)]


def _is_known(module: nn.Module) -> bool:
    kind = type(module)
    return kind.__name__ in _BLOCKS and kind.__module__.startswith("transformers.")


def batch_invariant_experts(model: nn.Module) -> None:
    """Give each routed layer a fixed order on a CPU and let it write a call's log, in place."""
    numbers = {block: number for number, block in enumerate(routed_layers(model))}
    for layer in list(model.modules()):
        for name, block in layer.named_children():
            if block in numbers:
                vars(block)["forward"] = MethodType(_forward, block)
                vars(block.gate)["forward"] = MethodType(_route_forward, block.gate)
                # Transformers gives a block hidden states alone; its layer gets all of a call.
                note = partial(_hand_over, name=name, number=numbers[block])
                layer.register_forward_pre_hook(note, with_kwargs=True)


def choose_experts(model: nn.Module, *, is_exact: bool) -> None:
    """On a GPU: let routed layers compute in a fixed order, or as transformers does."""
    for block in routed_layers(model):
        vars(block)[_EXACT] = is_exact
        vars(block.get_submodule("gate"))[_EXACT] = is_exact


def split_experts(experts: nn.Module, split: ExpertSplit) -> None:
    """Let the experts of a layer, of which this rank keeps its own, add up their parts."""
    vars(experts)[_SPLIT] = split


def is_grouped(x: Tensor) -> bool:
    """Whether rows are multiplied by kernels that know on the device alone whose they are."""
    return x.is_cuda


def _is_ours(module: nn.Module, x: Tensor) -> bool:
    return not x.is_cuda or vars(module).get(_EXACT, False)


def _hand_over(layer: nn.Module, _: Any, given: dict[str, Any], *, name: str, number: int) -> None:
    """Let a routed block see the log of its layer's call."""
    vars(layer.get_submodule(name))[ROUTING] = (given.get(ROUTING), number)


def _forward(self: Any, hidden_states: Tensor) -> Tensor:
    """`[batch, tok, hidden]` of a routed layer."""
    x = hidden_states.reshape(-1, hidden_states.shape[-1])
    log, number = vars(self).pop(ROUTING, (None, 0))
    logits, weights, experts = self.gate(x)
    if log is not None:
        experts = log.experts_for(number, experts, logits.shape[-1])
        if log.is_replayed:
            weights = _weights(self.gate, logits, experts)
        probability = torch.softmax(logits, -1, dtype=torch.float32)
        log.add(number, Routing(probability=probability, experts=experts))
    is_split = _SPLIT in vars(self.experts)
    is_ours = is_split or _is_ours(self, x)
    compute = partial(_in_order, self.experts) if is_ours else self.experts
    made = compute(x, experts, weights)
    if "shared_expert" in dict(self.named_children()):
        # Qwen2-MoE: an expert that every token has, as far as a gate of its own lets it through.
        gate = batch_invariant(torch.sigmoid, self.shared_expert_gate(x))
        made = made + gate * self.shared_expert(x)
    return made.view(hidden_states.shape)


def _route_forward(self: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, weights and experts of each token, as the router of transformers returns them."""
    x = hidden_states.reshape(-1, hidden_states.shape[-1])
    if not _is_ours(self, x):
        plain: Any = type(self).forward
        return plain(self, x)
    logits = _row_product(x)(x, self.weight, None)
    experts = route(logits, self.top_k).experts
    return logits, _weights(self, logits, experts), experts


def _weights(gate: Any, logits: Tensor, experts: Tensor) -> Tensor:
    """`[tok, k]` weights that a router gives to these experts."""
    weights = torch.softmax(logits, -1, dtype=torch.float32).gather(-1, experts)
    # Mixtral always divides by the sum.
    if vars(gate).get("norm_topk_prob", True):
        weights = weights / _sum_in_order(weights.unbind(-1))[:, None]
    return weights


def _in_order(experts: Any, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """The weighted outputs of each token's experts, added in the order of `chosen`.

    Of divided experts a rank adds its own, and then the ranks their sums.
    """
    split: ExpertSplit | None = vars(experts).get(_SPLIT)
    if split is not None:
        x, weights, chosen = split.ranks.enter(x), split.ranks.enter(weights), split.own(chosen)
    made = (_grouped_outputs if is_grouped(x) else _outputs)(experts, x, chosen)
    parts = zip(weights.unbind(-1), made, strict=True)
    total = _sum_in_order([weight[:, None] * part for weight, part in parts])
    return (total if split is None else split.ranks.sum(total)).to(x.dtype)


def _row_product(x: Tensor) -> Product:
    """A product whose rows do not depend on each other, for numbers of this type here."""
    if is_grouped(x):
        return batch_invariant_linear
    return few_rows_product(str(x.dtype).removeprefix("torch."))


def _grouped_outputs(experts: Any, x: Tensor, chosen: Tensor) -> Sequence[Tensor]:
    """As `_outputs`; the host never waits, so that a graph can hold the calls."""
    k, count = chosen.shape[-1], len(experts.down_proj)
    by_expert, order = chosen.flatten().sort(stable=True)
    each = torch.arange(count + 1, device=x.device)
    offsets = torch.searchsorted(by_expert, each)
    up = grouped_linear(gather_rows(x, order // k), experts.gate_up_proj, offsets)
    gate, value = up.chunk(2, -1)
    made = grouped_linear(experts.act_fn(gate) * value, experts.down_proj, offsets)
    if _SPLIT in vars(experts):  # rows of other ranks' experts were not multiplied
        made = made.masked_fill((by_expert == count)[:, None], 0.0)
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=order.device)
    return made.index_select(0, back).unflatten(0, (-1, k)).unbind(1)


def _outputs(experts: Any, x: Tensor, chosen: Tensor) -> Sequence[Tensor]:
    """`[tok, hidden]` of each token's first expert, of its second, and so on.

    0 for experts of other ranks.
    """
    product = _row_product(x)
    k, count = chosen.shape[-1], len(experts.down_proj)
    by_expert, order = chosen.flatten().sort(stable=True)
    counts = torch.bincount(by_expert, minlength=count + 1).tolist()
    *rows, foreign = x.index_select(0, order // k).split(counts)
    # One split of the stacked weights has one gradient; one for each expert would be as large.
    ups, downs = experts.gate_up_proj.unbind(0), experts.down_proj.unbind(0)
    # One even without any rows: weights of a rank without tokens have gradients, of 0.
    used = [i for i, own in enumerate(rows) if len(own)] or [0]
    parts = [_expert(experts, rows[i], ups[i], downs[i], product) for i in used]
    made = torch.cat([*parts, torch.zeros_like(foreign)])
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=order.device)
    return made.index_select(0, back).unflatten(0, (-1, k)).unbind(1)


def _expert(experts: Any, rows: Tensor, up: Tensor, down: Tensor, product: Product) -> Tensor:
    gate, value = product(rows, up, None).chunk(2, -1)
    return product(experts.act_fn(gate) * value, down, None)


def _sum_in_order(parts: Sequence[Tensor]) -> Tensor:
    first, *rest = parts
    for part in rest:
        first = first + part
    return first
