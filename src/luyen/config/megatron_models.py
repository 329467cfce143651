"""Which models the training engine `megatron` builds of megatron-core's layers."""

from collections.abc import Mapping
from typing import Any, cast

KINDS = ("llama", "mistral", "qwen2", "qwen3")
"""Values of `model_type` whose weights are mapped."""
_ROTARY = ("default", "linear", "llama3")
"""Kinds of rotary embeddings whose frequencies depend on nothing but the configuration."""
_DIVIDED = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size")


def why_not(raw: Mapping[str, Any], tensor_size: int) -> tuple[str, str] | None:
    """Why a `config.json` cannot be built on so many ranks, and the way out; None: it can.

    Example:
        >>> why_not({"model_type": "gemma2"}, 1)[0]
        'the weights of a gemma2 model are not mapped to those of megatron-core'
        >>> why_not({"model_type": "llama", "vocab_size": 63}, 2)[0]
        "the model's vocab_size is 63, which 2 devices cannot divide"
    """
    kind = raw.get("model_type")
    if kind not in KINDS:
        why = f"the weights of a {kind} model are not mapped to those of megatron-core"
        return why, f"train one of {', '.join(KINDS)}, or use fsdp2"
    for is_there, what in _unknown(raw).items():
        if what:
            return f"the model has {is_there}, which the engine does not build", "use fsdp2"
    heads = raw.get("num_attention_heads")
    given = {"num_key_value_heads": heads, **raw}
    for name in _DIVIDED:
        number = given.get(name)
        if isinstance(number, int) and number % tensor_size:
            why = f"the model's {name} is {number}, which {tensor_size} devices cannot divide"
            return why, f"set it to a divisor of {number}, or use fsdp2"
    return None


def _unknown(raw: Mapping[str, Any]) -> dict[str, bool]:
    """Parts of an architecture that the engine does not build -> whether this model has them."""
    layers = cast(list[str], raw.get("layer_types") or [])
    is_mistral = raw.get("model_type") == "mistral"
    has_window = raw.get("use_sliding_window", is_mistral)
    # transformers gives a Mistral model one where its config.json says nothing.
    window = raw.get("sliding_window", 4096 if is_mistral else None)
    rotary = cast(dict[str, Any], raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    rotation = rotary.get("rope_type", rotary.get("type", "default"))
    return {
        "a sliding window": bool(has_window and window) or "sliding_attention" in layers,
        "biases that are not those of Qwen 2": bool(
            raw.get("attention_bias") or raw.get("mlp_bias")
        ),
        f"the activation {raw.get('hidden_act')}": raw.get("hidden_act", "silu") != "silu",
        f"rotary embeddings of type {rotation}": rotation not in _ROTARY,
        "dropout in attention": bool(raw.get("attention_dropout")),
    }
