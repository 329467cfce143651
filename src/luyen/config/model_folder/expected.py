"""Names and shapes of the weights of the architectures that most people train."""

from collections.abc import Collection, Mapping
from typing import Any

_KNOWN = ("llama", "mistral", "qwen2", "qwen3")
"""Kinds whose layers have these names and no others."""
Shapes = dict[str, tuple[int, ...]]


def expected_shapes(
    config: Mapping[str, Any], names: Collection[str], *, has_head: bool
) -> Shapes | None:
    """Every weight of the model by name, in the spelling of `names`; None for another kind.

    Files that hold the decoder alone leave `model.` out.

    Example:
        >>> sizes = dict(hidden_size=8, num_attention_heads=2, num_key_value_heads=1,
        ...              intermediate_size=4, vocab_size=5, num_hidden_layers=1)
        >>> found = expected_shapes({"model_type": "llama", **sizes}, (), has_head=True)
        >>> found["model.embed_tokens.weight"], found["model.layers.0.self_attn.k_proj.weight"]
        ((5, 8), (4, 8))
    """
    if config.get("model_type") not in _KNOWN:
        return None
    hidden, vocab = _size(config, "hidden_size"), _size(config, "vocab_size")
    layers, layer = _size(config, "num_hidden_layers"), _layer(config)
    if layer is None or not (hidden and vocab and layers):
        return None
    stem = "model." if not names or any(name.startswith("model.") for name in names) else ""
    found: Shapes = {f"{stem}embed_tokens.weight": (vocab, hidden), f"{stem}norm.weight": (hidden,)}
    for number in range(min(layers, 10_000)):
        found |= {f"{stem}layers.{number}.{name}": shape for name, shape in layer.items()}
    tied = config.get("tie_word_embeddings")
    if (has_head and tied is False) or "lm_head.weight" in names:
        found["lm_head.weight"] = (vocab, hidden)
    return found


def _layer(config: Mapping[str, Any]) -> Shapes | None:
    """Weights of one layer; None where sizes are not given."""
    hidden, heads = _size(config, "hidden_size"), _size(config, "num_attention_heads")
    inner = _size(config, "intermediate_size")
    if not (hidden and heads and inner):
        return None
    kind = config.get("model_type")
    # Where a key is left out its default counts, and kinds differ in it.
    width = _size(config, "head_dim") or (hidden // heads if kind != "qwen3" else None)
    groups = _size(config, "num_key_value_heads") or (heads if kind == "llama" else None)
    if not (width and groups):
        return None
    products = {
        "self_attn.q_proj": (heads * width, hidden),
        "self_attn.k_proj": (groups * width, hidden),
        "self_attn.v_proj": (groups * width, hidden),
        "self_attn.o_proj": (hidden, heads * width),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    found: Shapes = {f"{name}.weight": shape for name, shape in products.items()}
    found |= {f"{name}.bias": products[name][:1] for name in _biased(config)}
    found |= {"input_layernorm.weight": (hidden,), "post_attention_layernorm.weight": (hidden,)}
    if kind == "qwen3":
        found |= {"self_attn.q_norm.weight": (width,), "self_attn.k_norm.weight": (width,)}
    return found


def _biased(config: Mapping[str, Any]) -> list[str]:
    """Products with a bias."""
    kind, attention = config.get("model_type"), ["q_proj", "k_proj", "v_proj"]
    found: list[str] = []
    if kind == "qwen2":
        found += [f"self_attn.{name}" for name in attention]
    elif kind in ("llama", "qwen3") and config.get("attention_bias"):
        found += [f"self_attn.{name}" for name in (*attention, "o_proj")]
    if kind == "llama" and config.get("mlp_bias"):
        found += [f"mlp.{name}" for name in ("gate_proj", "up_proj", "down_proj")]
    return found


def _size(config: Mapping[str, Any], name: str) -> int | None:
    value = config.get(name)
    return value if type(value) is int and value > 0 else None
