"""Which models the training engine `megatron` builds of megatron-core's layers."""

from collections.abc import Mapping
from typing import Any, cast

from luyen.config.catalog import ROUTED_MODELS
from luyen.config.model_folder.config_json import has_dense_layers

KINDS = ("llama", "mistral", "qwen2", "qwen3", *ROUTED_MODELS)
"""Values of `model_type` whose weights are mapped."""
_ROTARY = ("default", "linear", "llama3")
"""Kinds of rotary embeddings whose frequencies depend on nothing but the configuration."""
_DIVIDED = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size")
_EXPERTS = ("num_experts", "num_local_experts")
_SHARED = "shared_expert_intermediate_size"


def why_not(
    raw: Mapping[str, Any], tensor_size: int, *, expert_size: int = 1, copies: int = 1
) -> tuple[str, str] | None:
    """Why a `config.json` cannot be built on so many ranks, and the way out; None: it can.

    `expert_size` groups of `copies` ranks with different sequences divide experts further.

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
    divisors = {name: tensor_size for name in _DIVIDED if name in given}
    if kind in ROUTED_MODELS:
        if not has_dense_layers(given):
            divisors.pop("intermediate_size", None)  # experts are divided whole
        # The masters of a rank are those of experts that it computes with.
        of_one = tensor_size * (expert_size * copies if expert_size > 1 else 1)
        divisors |= {name: of_one for name in _EXPERTS if name in given}
        if _SHARED in given:
            divisors[_SHARED] = tensor_size
    for name, size in divisors.items():
        number = given[name]
        if isinstance(number, int) and number % size:
            why = f"the model's {name} is {number}, which {size} devices cannot divide"
            return why, f"set it to a divisor of {number}, or use fsdp2"
    return None


def _unknown(raw: Mapping[str, Any]) -> dict[str, bool]:
    """Parts of an architecture that the engine does not build -> whether this model has them."""
    layers = cast(list[str], raw.get("layer_types") or [])
    is_mistral = raw.get("model_type") == "mistral"
    has_window = raw.get("use_sliding_window", is_mistral or raw.get("model_type") == "mixtral")
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
