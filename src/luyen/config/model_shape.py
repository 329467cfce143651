"""The size of a model from its `config.json`, without loading it."""

import json
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, final

from luyen.config.schema.model import Model

_HUB_CACHE = Path.home() / ".cache" / "huggingface" / "hub"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The numbers that decide how much memory a decoder takes.

    Example:
        >>> shape = ModelShape(layers=30, hidden=576, heads=9, kv_heads=3, head_dim=64,
        ...                    intermediate=1536, vocab=49152, is_tied=True)
        >>> round(shape.parameters() / 1e6)
        135
    """

    layers: int
    """Decoder layers."""
    hidden: int
    """Width of the residual stream."""
    heads: int
    """Query heads."""
    kv_heads: int
    """Key and value heads."""
    head_dim: int
    """Width of a head."""
    intermediate: int
    """Width of the feed-forward layer."""
    vocab: int
    """Rows of the embedding."""
    is_tied: bool
    """Whether the output head is the embedding."""
    experts: int = 1
    """Feed-forward experts of a layer."""

    def attention_width(self) -> int:
        """Columns of the query, key and value projections together."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    def parameters(self) -> int:
        """Weights of the model, norms included, biases not."""
        attention = self.hidden * (self.attention_width() + self.heads * self.head_dim)
        feed_forward = 3 * self.hidden * self.intermediate * self.experts
        embeddings = self.vocab * self.hidden * (1 if self.is_tied else 2)
        norms = 2 * self.hidden
        return self.layers * (attention + feed_forward + norms) + embeddings + self.hidden

    def lora_parameters(self, rank: int) -> int:
        """Weights of an adapter of this rank on every linear layer."""
        wide = self.heads * self.head_dim
        narrow = self.kv_heads * self.head_dim
        ends = 2 * (self.hidden + wide) + 2 * (self.hidden + narrow)
        ends += 3 * (self.hidden + self.intermediate)
        return self.layers * rank * ends

    def kv_bytes_per_token(self, width: int) -> int:
        """Keys and values of one token over all layers, `width` bytes a number."""
        return 2 * self.layers * self.kv_heads * self.head_dim * width


def read_shape(model: Model) -> ModelShape | None:
    """The shape of `model.path`, or None when its config is not on this machine."""
    found = _config_file(model.path)
    if found is None:
        return None
    raw: dict[str, Any] = json.loads(found)
    raw |= raw.get("text_config", {})
    return shape_from({**raw, **model.override_config})


def shape_from(raw: dict[str, Any]) -> ModelShape | None:
    """The shape a Hugging Face config describes; None when it names its sizes otherwise."""
    if not {"num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size"} <= raw.keys():
        return None
    heads = raw["num_attention_heads"]
    return ModelShape(
        layers=raw["num_hidden_layers"],
        hidden=raw["hidden_size"],
        heads=heads,
        kv_heads=raw.get("num_key_value_heads") or heads,
        head_dim=raw.get("head_dim") or raw["hidden_size"] // heads,
        intermediate=raw.get("intermediate_size") or 4 * raw["hidden_size"],
        vocab=raw["vocab_size"],
        is_tied=bool(raw.get("tie_word_embeddings", False)),
        experts=raw.get("num_local_experts") or raw.get("num_experts") or 1,
    )


def _config_file(path: str) -> str | None:
    """Text of the model's config: built in, in a directory, or in the hub's cache."""
    if path.startswith("builtin://"):
        name = path.removeprefix("builtin://")
        inside = resources.files("luyen") / "builtin" / name / "config.json"
        return inside.read_text() if inside.is_file() else None
    local = Path(path).expanduser() / "config.json"
    if local.is_file():
        return local.read_text(encoding="utf-8")
    cached = sorted(_HUB_CACHE.glob(f"models--{path.replace('/', '--')}/snapshots/*/config.json"))
    return cached[-1].read_text(encoding="utf-8") if cached else None


def builtin_models() -> list[str]:
    """Names that `builtin://` knows."""
    home = resources.files("luyen") / "builtin"
    return sorted(entry.name for entry in home.iterdir() if (entry / "config.json").is_file())
