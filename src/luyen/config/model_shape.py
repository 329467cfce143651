"""The size of a model from its `config.json`, without loading it."""

from dataclasses import dataclass
from typing import Any, final

from luyen.config.architectures import plain_type, read_raw
from luyen.config.schema.model import Model


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

    def layer_parameters(self) -> int:
        """Weights of one decoder layer, norms included, biases not."""
        attention = self.hidden * (self.attention_width() + self.heads * self.head_dim)
        feed_forward = 3 * self.hidden * self.intermediate * self.experts
        return attention + feed_forward + 2 * self.hidden

    def embeddings(self) -> int:
        """Weights outside of the decoder layers: embedding, last norm and head."""
        return self.vocab * self.hidden * (1 if self.is_tied else 2) + self.hidden

    def parameters(self) -> int:
        """Weights of the model, norms included, biases not."""
        return self.layers * self.layer_parameters() + self.embeddings()

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
    """The shape of `model.path`; None when no config here says it, or transformers runs it."""
    config = read_raw(model)
    return None if config is None or plain_type(model) else shape_from(config)


_SIZES = ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size")


def shape_from(raw: dict[str, Any]) -> ModelShape | None:
    """The shape a Hugging Face config describes; None when it names its sizes otherwise.

    Experts have a width of their own (`moe_intermediate_size`) in most mixtures.
    """
    layers, hidden, heads, vocab = (_size(raw, name) for name in _SIZES)
    # OPT has two matrices in a feed-forward layer instead of three.
    if not (layers and hidden and heads and vocab) or "ffn_dim" in raw:
        return None
    experts = next((n for name in _EXPERTS if (n := _size(raw, name))), 1)
    wide = _size(raw, "intermediate_size") or 4 * hidden
    return ModelShape(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=_size(raw, "num_key_value_heads") or heads,
        head_dim=_size(raw, "head_dim") or hidden // heads,
        intermediate=(_size(raw, "moe_intermediate_size") or wide) if experts > 1 else wide,
        vocab=vocab,
        is_tied=bool(raw.get("tie_word_embeddings", False)),
        experts=experts,
    )


_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")


def _size(raw: dict[str, Any], name: str) -> int | None:
    """A positive whole number of the config, or None for anything else."""
    value = raw.get(name)
    return value if isinstance(value, int) and value > 0 else None
