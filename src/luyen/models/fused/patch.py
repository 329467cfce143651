"""Give the modules of a Hugging Face model fused forwards, where their arithmetic is known."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import MethodType
from typing import Any, final

from torch import nn

from luyen.models.fused.embedding import steady_embeddings
from luyen.models.fused.layers import (
    AttentionPlan,
    LayerPlan,
    MlpPlan,
    attention_forward,
    layer_forward,
    mlp_forward,
    norm_forward,
)
from luyen.models.fused.packed_weights import pack_linear, unpackable
from luyen.models.fused.recognised import attention_plan, layer_norms, mlp_plan, norm_style

_PLAN = "luyen_plan"
_QKV = ("q_proj", "k_proj", "v_proj")
_GATE_UP = ("gate_proj", "up_proj")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class FusedReport:
    """What was fused and what was not.

    Example:
        >>> FusedReport(fused={"LlamaMLP": 2}, kept={}, unpacked={}).fused["LlamaMLP"]
        2
    """

    fused: dict[str, int]
    """Modules with a fused forward, by class."""
    kept: dict[str, str]
    """Classes whose modules keep their own forward, and why."""
    unpacked: dict[str, str]
    """Modules by name that are fused but call their projections one by one, and why."""


def fuse_layers(model: nn.Module) -> FusedReport:
    """Patch every module that is recognised, each by itself, and say what was done.

    The model attends through the function registered by `luyen.models.attention`. Adapters must be
    in place: a projection that is replaced afterwards is not noticed. Parameters stay the same
    objects under the same names.
    """
    report = FusedReport(fused=Counter(), kept={}, unpacked={})
    # Norms first: layers ask whether theirs are fused.
    _fuse_kind(model, "RMSNorm", norm_style, norm_forward, report)
    _fuse_kind(model, "MLP", mlp_plan, mlp_forward, report)
    _fuse_kind(model, "Attention", attention_plan, attention_forward, report)
    shared = _shared_parameters(model)
    for name, module in model.named_modules():
        plan = vars(module).get(_PLAN)
        if isinstance(plan, AttentionPlan | MlpPlan) and plan.packed is None:
            _pack(name, module, plan, shared, report)
    for module in model.modules():
        if "layers" in dict(module.named_children()):
            _fuse_stack(module, report)
    steady_embeddings(model)
    return replace(report, fused=dict(report.fused))


def _fuse_kind(
    model: nn.Module,
    ending: str,
    recognise: Callable[[Any], Any],
    forward: Callable[..., Any],
    report: FusedReport,
) -> None:
    """Patch the modules whose class name ends so, if they are recognised."""
    for module in model.modules():
        kind = type(module).__name__
        if not kind.endswith(ending) or _PLAN in vars(module):
            continue
        plan = recognise(module)
        if isinstance(plan, str):
            report.kept[kind] = plan
        else:
            _patch(module, plan, forward, report)


def _patch(module: Any, plan: Any, forward: Callable[..., Any], report: FusedReport) -> None:
    module.luyen_plan = plan
    module.forward = MethodType(forward, module)
    kind = type(module).__name__
    report.fused[kind] = report.fused.get(kind, 0) + 1


def _pack(
    name: str,
    module: Any,
    plan: AttentionPlan | MlpPlan,
    shared: set[int],
    report: FusedReport,
) -> None:
    """Make one matrix of the projections that read the same input, where that is possible."""
    parts = dict(module.named_children())
    linears: Any = [parts[x] for x in (_QKV if isinstance(plan, AttentionPlan) else _GATE_UP)]
    why = unpackable(linears)
    if why is None and any(id(p) in shared for m in linears for p in m.parameters()):
        why = "a projection shares its weight with another module"
    if why is None:
        module.luyen_plan = replace(plan, packed=pack_linear(linears))
    else:
        report.unpacked[name] = why


def _fuse_stack(owner: nn.Module, report: FusedReport) -> None:
    """Patch decoder layers that stand one after the other; each knows the norm that follows it."""
    parts: Any = dict(owner.named_children())
    layers: list[Any] = list(parts["layers"].children())
    following = [dict(x.named_children()).get("input_layernorm") for x in layers[1:]]
    for layer, after in zip(layers, [*following, parts.get("norm")], strict=True):
        kind = type(layer).__name__
        if _PLAN in vars(layer):
            continue
        names = layer_norms(layer)
        if isinstance(names, str):
            report.kept[kind] = names
        else:
            next_norm = after if after is not None and _PLAN in vars(after) else None
            _patch(layer, LayerPlan(**names, next_norm=next_norm), layer_forward, report)


def _shared_parameters(model: nn.Module) -> set[int]:
    """Parameters that more than one module holds."""
    count = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    return {key for key, times in count.items() if times > 1}
