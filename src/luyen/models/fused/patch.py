"""Give modules of a Hugging Face model fused forwards, where their arithmetic is known."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import MethodType
from typing import Any, final

from torch import nn

from luyen.models.batch_invariant import deterministic_embeddings
from luyen.models.fused.layers import (
    AttentionPlan,
    LayerPlan,
    MlpPlan,
    attention_forward,
    layer_forward,
    mlp_forward,
    norm_forward,
)
from luyen.models.fused.ops import Activation, Heads, NormStyle
from luyen.models.fused.packed_linear import pack_linear, unpackable

# The modules of transformers that the fused functions can replace.
#
# They are identified by class, because equal attribute names mean different things across classes:
# a norm over all heads at once, a rotation of neighbours, a factor on the residual.

_GEMMA = ("Gemma2", "Gemma3")
_LLAMA = ("Llama", "Mistral", "Qwen2", "Qwen3", "SmolLM3")

_NORMS = {f"{name}RMSNorm": (0.0, False) for name in (*_LLAMA, "Granite", "Phi3")}
_NORMS |= {f"{name}RMSNorm": (0.0, True) for name in ("GptOss", "Olmo2")}
_NORMS |= {f"{name}RMSNorm": (1.0, True) for name in _GEMMA}
"""Offset of the weight, and whether it is applied before rounding."""

_MLPS = {f"{name}MLP" for name in (*_LLAMA, *_GEMMA, "Granite", "Olmo2", "Cohere2")}

_ACTIVATIONS: dict[str, Activation] = {
    "SiLUActivation": "silu",
    "SiLU": "silu",
    "GELUTanh": "gelu_tanh",
    "PytorchGELUTanh": "gelu_tanh",
    "GELUActivation": "gelu",
}


def _nothing(_: Any) -> dict[str, Any]:
    return {}


def _window(module: Any) -> dict[str, Any]:
    return {"sliding_window": module.sliding_window}


def _config_window(module: Any) -> dict[str, Any]:
    return {"sliding_window": module.config.sliding_window}


def _softcap(module: Any) -> dict[str, Any]:
    return {"sliding_window": module.sliding_window, "softcap": module.attn_logit_softcapping}


def _sinks(module: Any) -> dict[str, Any]:
    return {"sliding_window": module.sliding_window, "s_aux": module.sinks}


_ATTENTIONS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "LlamaAttention": _nothing,
    "GraniteAttention": _nothing,
    "MistralAttention": _config_window,
    "Qwen2Attention": _window,
    "Qwen3Attention": _window,
    "SmolLM3Attention": _window,
    "Gemma2Attention": _softcap,
    "Gemma3Attention": _window,
    "GptOssAttention": _sinks,
}
"""What each architecture tells the attention function."""

_LAYERS: dict[str, dict[str, str]] = {
    f"{name}DecoderLayer": {"before_mlp": "post_attention_layernorm"} for name in _LLAMA
}
_LAYERS |= {
    f"{name}DecoderLayer": {
        "after_attention": "post_attention_layernorm",
        "before_mlp": "pre_feedforward_layernorm",
        "after_mlp": "post_feedforward_layernorm",
    }
    for name in _GEMMA
}
"""Where the norms stand in layers that add to the residual stream and do nothing else to it."""

_UNKNOWN = "its arithmetic is not among those known"


def norm_style(module: Any) -> NormStyle | str:
    """How this RMSNorm is written, or why it is not known."""
    found = _NORMS.get(_class(module))
    if found is None:
        return _UNKNOWN
    fields = vars(module)
    eps = fields["variance_epsilon"] if "variance_epsilon" in fields else fields["eps"]
    return NormStyle(eps=eps, offset=found[0], is_wide=found[1])


def mlp_plan(module: Any) -> MlpPlan | str:
    """How this MLP is computed, or why it is not known."""
    if _class(module) not in _MLPS:
        return _UNKNOWN
    # A steadied activation holds the model's own.
    act = dict(module.act_fn.named_children()).get("inner", module.act_fn)
    name = type(act).__name__
    if name not in _ACTIVATIONS:
        return f"no fused function for the activation {name}"
    return MlpPlan(activation=_ACTIVATIONS[name])


def attention_plan(module: Any) -> AttentionPlan | str:
    """How this attention module makes its heads, or why it is not known."""
    extras = _ATTENTIONS.get(_class(module))
    if extras is None:
        return _UNKNOWN
    config: Any = module.config
    heads = Heads(
        queries=config.num_attention_heads,
        keys=config.num_key_value_heads,
        width=module.head_dim,
    )
    norm = dict(module.named_children()).get("q_norm")
    style = None if norm is None else norm_style(norm)
    if isinstance(style, str):
        return f"the norm of its heads is not known: {style}"
    return AttentionPlan(
        heads=heads,
        extras=extras,
        head_norm=style,
        is_rotated=bool(vars(module).get("use_rope", True)),
        is_half=_class(module) == "GptOssAttention",
    )


def layer_norms(module: nn.Module) -> dict[str, str] | str:
    """The norms of this decoder layer by their part in it, or why it is not known."""
    return _LAYERS.get(_class(module), _UNKNOWN)


def _class(module: nn.Module) -> str:
    """Name of a class of transformers; code of a model's own repository may use the same names."""
    kind = type(module)
    return kind.__name__ if kind.__module__.startswith("transformers.") else ""


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
    deterministic_embeddings(model)
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
