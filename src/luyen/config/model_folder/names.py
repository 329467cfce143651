"""Names that the configuration of a common architecture has: others replace nothing.

A test holds them equal to those of transformers, which a check does not import.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from luyen.base.suggest import did_you_mean
from luyen.config.model_folder.files import UnsoundFile

_COMMON = (
    *("architectures", "attention_dropout", "bos_token_id", "chunk_size_feed_forward", "dtype"),
    *("eos_token_id", "hidden_act", "hidden_size", "id2label", "initializer_range"),
    *("intermediate_size", "is_encoder_decoder", "label2id", "max_position_embeddings"),
    *("num_attention_heads", "num_hidden_layers", "num_key_value_heads", "output_hidden_states"),
    *("pad_token_id", "problem_type", "return_dict", "rms_norm_eps", "rope_parameters"),
    *("tie_word_embeddings", "transformers_version", "use_cache", "vocab_size"),
)
_WINDOWS = ("layer_types", "max_window_layers", "sliding_window", "use_sliding_window")
NAMES: dict[str, tuple[str, ...]] = {
    "llama": (*_COMMON, "attention_bias", "head_dim", "mlp_bias", "pretraining_tp"),
    "mistral": (*_COMMON, "head_dim", "sliding_window"),
    "qwen2": (*_COMMON, *_WINDOWS),
    "qwen3": (*_COMMON, *_WINDOWS, "attention_bias", "head_dim"),
}
"""Kind of model -> the values of its configuration."""
ACCEPTED = ("rope_scaling", "torch_dtype", "num_labels", "output_attentions", "name_or_path")
"""Names besides that are read into others, such as `rope_parameters` and `dtype`."""


def unknown_names(raw: Mapping[str, Any], override: Mapping[str, Any]) -> Iterator[UnsoundFile]:
    """Values that would replace nothing in a config of a known kind.

    Example:
        >>> [fault.words for fault in unknown_names({"model_type": "qwen3"}, {"hidden": 8})]
        ['config.json: the configuration of a qwen3 model has no `hidden`']
    """
    kind = raw.get("model_type")
    if not isinstance(kind, str) or kind not in NAMES:
        return
    known = {*NAMES[kind], *ACCEPTED, *raw, "model_type"}
    if "model_type" in override and override["model_type"] != kind:
        why = f"the model is a {kind}, and no value makes another of it"
        yield UnsoundFile("config.json", why, "drop model_type")
    for name in override:
        if name not in known:
            why = f"the configuration of a {kind} model has no `{name}`"
            yield UnsoundFile("config.json", why, did_you_mean(name, known))
