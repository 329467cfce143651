"""Which modules of transformers compute what the fused functions compute.

A module is known by its class, because parts of the same names do different things elsewhere: a
norm over all heads at once, a rotation of neighbours, a factor on the residual.
"""

from collections.abc import Callable
from typing import Any

from torch import nn

from luyen.models.fused.gated import Activation
from luyen.models.fused.layers import AttentionPlan, MlpPlan
from luyen.models.fused.norm import NormStyle
from luyen.models.fused.rotary import Heads

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
    held = vars(module)
    eps = held["variance_epsilon"] if "variance_epsilon" in held else held["eps"]
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
