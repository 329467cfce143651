"""`config.json` of a model: valid sizes and names, architecture, and shape for the plan."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast, final

from luyen.base.errors import did_you_mean
from luyen.config.model_folder.files import InvalidFile, folder_of, read_object, short_repr
from luyen.config.schema.model import ModelConfig

CONFIG_NAME = "config.json"
_SIZE_KEYS = (
    *("num_hidden_layers", "n_layer", "num_layers", "hidden_size", "n_embd", "d_model"),
    *("num_attention_heads", "n_head", "vocab_size", "max_position_embeddings"),
    *("num_key_value_heads", "head_dim", "intermediate_size"),
)
_VARYING = ("num_key_value_heads", "head_dim", "intermediate_size", "num_attention_heads")
"""Sizes that some architectures leave open, or list for each layer."""
_COUNTS = {
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers"), 10_000),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts"), 100_000),
    **{"num_labels": 100_000, "num_nextn_predict_layers": 1_000},
}
"""Most of what a library makes one by one: more would keep it busy for ever."""
_LARGEST = 1 << 31
_DTYPES = {"auto", "float64", "float32", "float16", "bfloat16", "half", "float", "double"}
"""Types of weights that can be trained."""
_FIX = "correct the file, or fetch it again"


def read_config(folder: Path) -> dict[str, Any]:
    """The object in `config.json`; InvalidFile where there is none."""
    found = read_object(folder, CONFIG_NAME)
    if found is not None:
        return found
    if (folder / "adapter_config.json").is_file():
        why = "it is not there: the folder holds an adapter, not a model"
        fix = "name the model, and this folder in actor_rollout_ref.model.lora_adapter_path"
        raise InvalidFile(CONFIG_NAME, why, fix)
    raise InvalidFile(CONFIG_NAME, "it is not there", "give the folder of a Hugging Face model")


def text_config(config: Mapping[str, Any], override: Mapping[str, Any]) -> dict[str, Any]:
    """What concerns the decoder, with what the run overrides."""
    inner = config.get("text_config")
    text = cast(dict[str, Any], inner) if isinstance(inner, dict) else {}
    return {**config, **text, **override}


def size_faults(config: Mapping[str, Any]) -> Iterator[InvalidFile]:
    """What cannot be, first what is no size at all."""
    wrong = False
    for name in _SIZE_KEYS:
        value = config.get(name)
        if name not in config or (name in _VARYING and (value is None or isinstance(value, list))):
            continue
        if type(value) is not int or not 1 <= value < _LARGEST:
            wrong = True
            yield InvalidFile(
                CONFIG_NAME, f"{name} is {short_repr(value)}; a whole number > 0 is due", _FIX
            )
    for name, most in _COUNTS.items():
        value = config.get(name)
        if type(value) is int and value > most:
            wrong = True
            yield InvalidFile(
                CONFIG_NAME, f"{name} is {short_repr(value)}; at most {most:,} are known", _FIX
            )
    if not wrong:
        yield from _head_faults(config)
    yield from _kind_faults(config)
    yield from _kernel_faults(config)


def _head_faults(config: Mapping[str, Any]) -> Iterator[InvalidFile]:
    heads, groups = config.get("num_attention_heads"), config.get("num_key_value_heads")
    hidden = config.get("hidden_size")
    if isinstance(heads, int) and isinstance(groups, int) and heads % groups:
        why = f"num_attention_heads {heads} is no multiple of num_key_value_heads {groups}"
        yield InvalidFile(CONFIG_NAME, why, _FIX)
    has_own = config.get("head_dim") is not None or "kv_lora_rank" in config
    if isinstance(heads, int) and isinstance(hidden, int) and not has_own and hidden % heads:
        why = f"hidden_size {hidden} is no multiple of num_attention_heads {heads}"
        yield InvalidFile(CONFIG_NAME, f"{why}, and there is no head_dim", _FIX)


def _kind_faults(config: Mapping[str, Any]) -> Iterator[InvalidFile]:
    """Values of another kind than the key's."""
    for name in ("rope_parameters", "rope_scaling", "quantization_config", "text_config"):
        if not isinstance(config.get(name), dict | None):
            yield InvalidFile(
                CONFIG_NAME, f"{name} is {short_repr(config[name])}, not an object", _FIX
            )
    for name in ("model_type", "hidden_act", "hidden_activation"):
        if not isinstance(config.get(name), str | None):
            yield InvalidFile(
                CONFIG_NAME, f"{name} is {short_repr(config[name])}, not a name", _FIX
            )
    for name in ("rope_theta", "rms_norm_eps"):
        value = config.get(name)
        if value is not None and (type(value) not in (int, float) or not value > 0):
            yield InvalidFile(
                CONFIG_NAME, f"{name} is {short_repr(value)}; a number > 0 is due", _FIX
            )
    for name in ("torch_dtype", "dtype"):
        value = config.get(name)
        if isinstance(value, dict | None) or config.get("quantization_config") is not None:
            continue  # one for each part of the model, or what its quantisation says
        if not isinstance(value, str) or value.removeprefix("torch.") not in _DTYPES:
            why = f"{name} is {short_repr(value)}, which is no type of weights that can be trained"
            yield InvalidFile(CONFIG_NAME, why, "set it to float32, float16 or bfloat16")
    is_tied = config.get("tie_word_embeddings")
    if not isinstance(is_tied, bool | None):
        yield InvalidFile(
            CONFIG_NAME, f"tie_word_embeddings is {short_repr(is_tied)}; true or false is due", _FIX
        )


def _kernel_faults(config: Mapping[str, Any]) -> Iterator[InvalidFile]:
    """Attention and the like by a repository: a library would fetch its machine code and run it.

    No key enables it: `trust_remote_code` is about the code of the model itself.
    """
    for name, value in config.items():
        if name.endswith("_implementation"):
            for word in _words(value):
                if "/" in word:
                    why = (
                        f"{name} is {short_repr(word)}: code of that repository would be "
                        "fetched and run"
                    )
                    yield InvalidFile(CONFIG_NAME, why, "remove the key; attention is chosen here")
        elif isinstance(value, dict):
            yield from _kernel_faults(cast(dict[str, Any], value))


def _words(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [word for inner in cast(dict[str, Any], value).values() for word in _words(inner)]
    return [value] if isinstance(value, str) else []


# Keys that `config.json` of a common architecture has; an override of any other key has no effect.
#
# A test holds them equal to those of transformers, which a check does not import.

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
"""Further keys that are read into other ones, such as `rope_parameters` and `dtype`."""


def unknown_names(raw: Mapping[str, Any], override: Mapping[str, Any]) -> Iterator[InvalidFile]:
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
        yield InvalidFile("config.json", why, "drop model_type")
    for name in override:
        if name not in known:
            why = f"the configuration of a {kind} model has no `{name}`"
            yield InvalidFile("config.json", why, did_you_mean(name, known))


# Architectures that only transformers runs, by `model_type`.

PLAIN = frozenset(
    {
        *("bamba", "bloom", "codegen", "falcon", "falcon_h1", "falcon_mamba", "jamba"),
        *("mamba", "mpt", "qwen3_next", "rwkv"),
    }
)
"""Types of models whose sequences cannot be packed: they keep a running state, or attend on their
own. Other types are detected when they are loaded."""

_LEARNED = frozenset({"gpt2", "gpt_bigcode", "gpt_neo", "openai-gpt", "opt"})


def read_raw(model: ModelConfig) -> dict[str, Any] | None:
    """What the config of `model.path` says of its decoder; None when none is on this machine.

    The model may be built in, in a directory, or in the hub's cache.
    """
    folder = folder_of(model.path)
    try:
        config = None if folder is None else read_object(folder, "config.json")
    except InvalidFile:
        return None  # a rule says why
    return None if config is None else text_config(config, model.override_config)


def plain_type(model: ModelConfig) -> str | None:
    """The type of a model that only transformers runs; None: it is not known to be one."""
    kind = (read_raw(model) or {}).get("model_type")
    return kind if isinstance(kind, str) and kind in PLAIN else None


def most_positions(model: ModelConfig) -> int | None:
    """Tokens of a sequence for which a model has learned positions; None: it can read on."""
    raw = read_raw(model) or {}
    positions: Any = raw.get("max_position_embeddings") or raw.get("n_positions")
    return positions if raw.get("model_type") in _LEARNED and isinstance(positions, int) else None


def brings_code(model: ModelConfig) -> bool:
    """Whether the model's folder names code of its own that the run trusts."""
    named: Any = (read_raw(model) or {}).get("auto_map")
    is_model = isinstance(named, dict) and "AutoModelForCausalLM" in named
    return is_model and model.trust_remote_code


def unplanned(model: ModelConfig) -> str:
    """Why the memory of a model is not known, as a clause, with what is known."""
    folder = folder_of(model.path)
    if read_raw(model) is None or folder is None:
        return "since no config.json of the model can be read on this machine"
    why = "since its config.json names its sizes otherwise than the decoders that are planned for"
    kind = plain_type(model)
    if kind is not None:
        why = f"since transformers itself runs a {kind} model"
    elif brings_code(model):
        why = "since the model brings its own code"
    size = sum(file.stat().st_size for file in _weights(folder))
    return f"{why}; the files of its weights have {size / 1024**2:.1f} MiB"


def _weights(folder: Path) -> list[Path]:
    return [file for end in ("safetensors", "bin") for file in folder.glob(f"*.{end}")]


# The size of a model from its `config.json`, without loading it.


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
    experts_per_token: int = 1
    """Experts that compute each token."""
    shared: int = 0
    """Width of the expert that computes every token, where a mixture has one."""

    @property
    def active_intermediate(self) -> int:
        """Width of the feed-forward layers that compute a token, together."""
        return self.intermediate * self.experts_per_token + self.shared

    def attention_width(self) -> int:
        """Columns of the query, key and value projections together."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    def layer_parameters(self) -> int:
        """Weights of one decoder layer, norms included, biases not."""
        attention = self.hidden * (self.attention_width() + self.heads * self.head_dim)
        feed_forward = 3 * self.hidden * (self.intermediate * self.experts + self.shared)
        return attention + feed_forward + 2 * self.hidden

    def active_layer_parameters(self) -> int:
        """Weights of one decoder layer that a token is multiplied with."""
        idle = 3 * self.hidden * self.intermediate * (self.experts - self.experts_per_token)
        router = self.hidden * self.experts if self.experts > 1 else 0
        return self.layer_parameters() - idle + router

    def embeddings(self) -> int:
        """Weights outside of the decoder layers: embedding, last norm and head."""
        return self.vocab * self.hidden * (1 if self.is_tied else 2) + self.hidden

    def parameters(self) -> int:
        """Weights of the model, norms included, biases not."""
        return self.layers * self.layer_parameters() + self.embeddings()

    def lora_parameters(self, rank: int, *, has_norms: bool = False) -> int:
        """Weights of an adapter of this rank on every linear layer; `has_norms`: of DoRA.

        The experts of a mixture are stacked in tensors, which are no linear layers.
        """
        wide = self.heads * self.head_dim
        narrow = self.kv_heads * self.head_dim
        ends = 2 * (self.hidden + wide) + 2 * (self.hidden + narrow)
        inner = self.shared if self.experts > 1 else self.intermediate
        ends += 3 * (self.hidden + inner) if inner else 0
        outputs = wide + 2 * narrow + 2 * self.hidden + 2 * inner
        return self.layers * (rank * ends + (outputs if has_norms else 0))

    def kv_bytes_per_token(self, width: int) -> int:
        """Keys and values of one token over all layers, `width` bytes a number."""
        return 2 * self.layers * self.kv_heads * self.head_dim * width


def read_shape(model: ModelConfig) -> ModelShape | None:
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
        experts_per_token=min(experts, _size(raw, "num_experts_per_tok") or 1),
        shared=(_size(raw, "shared_expert_intermediate_size") or 0) if experts > 1 else 0,
    )


_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")


def has_dense_layers(raw: Mapping[str, Any]) -> bool:
    """Whether a mixture has layers without experts, too.

    Example:
        >>> has_dense_layers({"mlp_only_layers": [0]}), has_dense_layers({"num_experts": 8})
        (True, False)
    """
    return bool(raw.get("mlp_only_layers")) or raw.get("decoder_sparse_step", 1) != 1


def has_experts(raw: dict[str, Any]) -> bool:
    """Whether a config describes a mixture of experts.

    Example:
        >>> has_experts({"num_local_experts": 8}), has_experts({"model_type": "llama"})
        (True, False)
    """
    return any((_size(raw, name) or 1) > 1 for name in _EXPERTS)


def _size(raw: dict[str, Any], name: str) -> int | None:
    """A positive whole number of the config, or None for anything else."""
    value = raw.get(name)
    return value if isinstance(value, int) and value > 0 else None
