"""Sizes of published models by their name on the hub, so that they can be planned without it.

The numbers are those of each `config.json`.
"""

from typing import Any

from luyen.config.model_folder.config_json import ModelShape, shape_from

_QWEN25 = {"vocab_size": 152064, "num_key_value_heads": 8}
_TIED = {"vocab_size": 151936, "num_key_value_heads": 2, "tie_word_embeddings": True}

PUBLISHED: dict[str, dict[str, Any]] = {
    "HuggingFaceTB/SmolLM2-135M-Instruct": {
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "tie_word_embeddings": True,
    },
    "Qwen/Qwen2.5-0.5B-Instruct": {
        **_TIED,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
    },
    "Qwen/Qwen2.5-1.5B-Instruct": {
        **_TIED,
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
    },
    "Qwen/Qwen2.5-7B-Instruct": {
        **_QWEN25,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
    },
    "Qwen/Qwen2.5-32B-Instruct": {
        **_QWEN25,
        "hidden_size": 5120,
        "intermediate_size": 27648,
        "num_hidden_layers": 64,
        "num_attention_heads": 40,
    },
    "meta-llama/Llama-3.3-70B-Instruct": {
        "vocab_size": 128256,
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
    },
    "Qwen/Qwen3-30B-A3B": {
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
    },
}
"""Name of a model -> the sizes in its `config.json`."""


def published_shape(name: str) -> ModelShape | None:
    """The shape of a published model; None for a name that is not listed.

    Example:
        >>> shape = published_shape("Qwen/Qwen3-30B-A3B")
        >>> shape is not None and round(shape.parameters() / 1e9, 1)
        30.5
    """
    return shape_from(PUBLISHED[name]) if name in PUBLISHED else None
