"""Whether the numbers in `config.json` can be those of a decoder."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from luyen.config.model_folder.files import UnsoundFile, read_object, shown

NAME = "config.json"
_SIZES = (
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
_MEND = "mend the file, or fetch it again"


def read_config(folder: Path) -> dict[str, Any]:
    """The object in `config.json`; UnsoundFile where there is none."""
    found = read_object(folder, NAME)
    if found is not None:
        return found
    if (folder / "adapter_config.json").is_file():
        why = "it is not there: the folder holds an adapter, not a model"
        fix = "name the model, and this folder in actor_rollout_ref.model.lora_adapter_path"
        raise UnsoundFile(NAME, why, fix)
    raise UnsoundFile(NAME, "it is not there", "give the folder of a Hugging Face model")


def text_config(config: Mapping[str, Any], override: Mapping[str, Any]) -> dict[str, Any]:
    """What concerns the decoder, with what the run overrides."""
    inner = config.get("text_config")
    text = cast(dict[str, Any], inner) if isinstance(inner, dict) else {}
    return {**config, **text, **override}


def size_faults(config: Mapping[str, Any]) -> Iterator[UnsoundFile]:
    """What cannot be, first what is no size at all."""
    wrong = False
    for name in _SIZES:
        value = config.get(name)
        if name not in config or (name in _VARYING and (value is None or isinstance(value, list))):
            continue
        if type(value) is not int or not 1 <= value < _LARGEST:
            wrong = True
            yield UnsoundFile(NAME, f"{name} is {shown(value)}; a whole number > 0 is due", _MEND)
    for name, most in _COUNTS.items():
        value = config.get(name)
        if type(value) is int and value > most:
            wrong = True
            yield UnsoundFile(NAME, f"{name} is {shown(value)}; at most {most:,} are known", _MEND)
    if not wrong:
        yield from _head_faults(config)
    yield from _kind_faults(config)
    yield from _kernel_faults(config)


def _head_faults(config: Mapping[str, Any]) -> Iterator[UnsoundFile]:
    heads, groups = config.get("num_attention_heads"), config.get("num_key_value_heads")
    hidden = config.get("hidden_size")
    if isinstance(heads, int) and isinstance(groups, int) and heads % groups:
        why = f"num_attention_heads {heads} is no multiple of num_key_value_heads {groups}"
        yield UnsoundFile(NAME, why, _MEND)
    has_own = config.get("head_dim") is not None or "kv_lora_rank" in config
    if isinstance(heads, int) and isinstance(hidden, int) and not has_own and hidden % heads:
        why = f"hidden_size {hidden} is no multiple of num_attention_heads {heads}"
        yield UnsoundFile(NAME, f"{why}, and there is no head_dim", _MEND)


def _kind_faults(config: Mapping[str, Any]) -> Iterator[UnsoundFile]:
    """Values of another kind than the key's."""
    for name in ("rope_parameters", "rope_scaling", "quantization_config", "text_config"):
        if not isinstance(config.get(name), dict | None):
            yield UnsoundFile(NAME, f"{name} is {shown(config[name])}, not an object", _MEND)
    for name in ("model_type", "hidden_act", "hidden_activation"):
        if not isinstance(config.get(name), str | None):
            yield UnsoundFile(NAME, f"{name} is {shown(config[name])}, not a name", _MEND)
    for name in ("rope_theta", "rms_norm_eps"):
        value = config.get(name)
        if value is not None and (type(value) not in (int, float) or not value > 0):
            yield UnsoundFile(NAME, f"{name} is {shown(value)}; a number > 0 is due", _MEND)
    for name in ("torch_dtype", "dtype"):
        value = config.get(name)
        if isinstance(value, dict | None) or config.get("quantization_config") is not None:
            continue  # one for each part of the model, or what its quantisation says
        if not isinstance(value, str) or value.removeprefix("torch.") not in _DTYPES:
            why = f"{name} is {shown(value)}, which is no type of weights that can be trained"
            yield UnsoundFile(NAME, why, "set it to float32, float16 or bfloat16")
    is_tied = config.get("tie_word_embeddings")
    if not isinstance(is_tied, bool | None):
        yield UnsoundFile(
            NAME, f"tie_word_embeddings is {shown(is_tied)}; true or false is due", _MEND
        )


def _kernel_faults(config: Mapping[str, Any]) -> Iterator[UnsoundFile]:
    """Attention and the like by a repository: a library would fetch its machine code and run it.

    No key asks for it: `trust_remote_code` is about the code of the model itself.
    """
    for name, value in config.items():
        if name.endswith("_implementation"):
            for word in _words(value):
                if "/" in word:
                    why = (
                        f"{name} is {shown(word)}: code of that repository would be fetched and run"
                    )
                    yield UnsoundFile(NAME, why, "remove the key; attention is chosen here")
        elif isinstance(value, dict):
            yield from _kernel_faults(cast(dict[str, Any], value))


def _words(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [word for inner in cast(dict[str, Any], value).values() for word in _words(inner)]
    return [value] if isinstance(value, str) else []
