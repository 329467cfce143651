"""Checks by safetensors headers that the weights are those that `config.json` describes."""

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path, PurePath
from typing import Any, cast, final

from luyen.config.model_folder.files import InvalidFile, read_object, short_repr, size_of

# The header of a safetensors file, read and checked in plain Python: no tensor is loaded.

_HEADER_BYTES = 100_000_000
"""Most bytes of a header, as the library that loads tensors has it."""
_BITS = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0"), 8),
    **dict.fromkeys(("F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 64),
    **{"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6},
}
_FETCH_FILE = "fetch the file again"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TensorFacts:
    """What a header says of a tensor.

    Example:
        >>> TensorFacts(file="model.safetensors", dtype="F32", shape=(2, 3)).dtype
        'F32'
    """

    file: str
    """Name of the file that holds it."""
    dtype: str
    """Type of its numbers, in the words of safetensors."""
    shape: tuple[int, ...]
    """Sizes."""


def read_header(folder: Path, name: str) -> dict[str, TensorFacts]:
    """Tensors of a file by name; InvalidFile where the file is not whole or contradicts itself."""
    size = size_of(folder, name)
    if size is None:
        raise InvalidFile(name, "it is not there", _FETCH_FILE)
    entries, start = _entries(folder, name, size)
    entries.pop("__metadata__", None)
    found: dict[str, TensorFacts] = {}
    ranges: list[tuple[int, int, str]] = []
    for tensor, entry in entries.items():
        dtype, shape, begin, end = _entry(name, tensor, entry)
        found[tensor] = TensorFacts(file=name, dtype=dtype, shape=shape)
        ranges.append((begin, end, tensor))
    _demand_whole(name, sorted(ranges), size - start)
    return found


def _entries(folder: Path, name: str, size: int) -> tuple[dict[str, Any], int]:
    """The header as an object, and where the numbers begin."""
    try:
        with (folder / name).open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > size - 8 or length > _HEADER_BYTES:
                why = f"it is no safetensors file: {size:,} bytes, a header of {length:,} claimed"
                raise InvalidFile(name, why, _FETCH_FILE)
            text = file.read(length)
    except OSError as error:
        why = f"it cannot be read: {error.strerror or error}"
        raise InvalidFile(name, why, "check the folder") from error
    try:
        found = json.loads(text, object_pairs_hook=_once)
    except (RecursionError, ValueError) as error:
        raise InvalidFile(name, f"its header is no JSON: {error}", _FETCH_FILE) from error
    if not isinstance(found, dict):
        raise InvalidFile(name, f"its header is {short_repr(found)}, not an object", _FETCH_FILE)
    return cast(dict[str, Any], found), 8 + length


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        raise ValueError("a name occurs twice")
    return made


def _entry(file: str, tensor: str, entry: Any) -> tuple[str, tuple[int, ...], int, int]:
    """Type, shape and place of a tensor, after they were found to fit each other."""
    known = cast(dict[str, Any], entry) if isinstance(entry, dict) else {}
    shape, place = _sizes(known.get("shape")), _sizes(known.get("data_offsets"))
    dtype = known.get("dtype")
    if shape is None or place is None or len(place) != 2:
        raise InvalidFile(file, f"its header does not say what {tensor} is", _FETCH_FILE)
    if not isinstance(dtype, str) or dtype not in _BITS:
        raise InvalidFile(file, f"{tensor} is of an unknown type, {short_repr(dtype)}", _FETCH_FILE)
    begin, end = place
    if (end - begin) * 8 != prod(shape) * _BITS[dtype]:
        why = f"{tensor} is {dtype} {list(shape)} and has {end - begin:,} bytes"
        raise InvalidFile(file, why, _FETCH_FILE)
    return dtype, tuple(shape), begin, end


def _sizes(value: Any) -> list[int] | None:
    """A list of whole numbers from 0 on; None for anything else."""
    if not isinstance(value, list):
        return None
    sizes = cast(list[Any], value)
    return sizes if all(type(size) is int and size >= 0 for size in sizes) else None


def _demand_whole(name: str, ranges: list[tuple[int, int, str]], size: int) -> None:
    """Raise InvalidFile unless tensors fill the file without gap, overlap or truncation."""
    at = 0
    for begin, end, tensor in ranges:
        if begin != at:
            raise InvalidFile(name, f"{tensor} does not begin where another ends", _FETCH_FILE)
        at = end
    if at > size:
        why = f"it is cut off: its tensors take {at:,} bytes, and {size:,} are there"
        raise InvalidFile(name, why, _FETCH_FILE)
    if at < size:
        why = f"{size - at:,} bytes after its tensors belong to none"
        raise InvalidFile(name, why, _FETCH_FILE)


# Names and shapes of the weights of common architectures.

_KNOWN = ("llama", "mistral", "qwen2", "qwen3")
"""Model types whose layers have exactly these names."""
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


# Tensors in checkpoints that a decoder does not read, and why each may be left out.
#
# Any other tensor without a place in the model is refused: it would be dropped
# silently.

HARMLESS: tuple[tuple[str, str], ...] = (
    (r"(^|\.)rotary_emb\.inv_freq$", "rotary frequencies, which follow from config.json"),
    (r"(^|\.)(attn|attention|self_attn)\.(bias|masked_bias)$", "causal masks of older GPT files"),
    (r"(^|\.)position_ids$", "a count from 0, which older files keep"),
    (r"(^|\.)(mtp|mtp_layers|mtp_block|nextn|eagle)\.", "heads that predict several tokens"),
    (
        r"(^|\.)(visual|vision_tower|vision_model|vision_embed_tokens|embed_vision|"
        r"image_newline|multi_modal_projector|mm_projector|audio_tower|embed_audio|"
        r"speech_encoder|talker|token2wav)(\.|$)",
        "parts that see or hear: rows are text",
    ),
    (r"^(score|classifier|v_head|value_head)\.", "the head of a reward model or a critic"),
    (
        r"^(lm_head|embed_out)\.(weight|bias)$",
        "an output layer where nothing is written, or a tied copy",
    ),
)
"""Pattern of a name, and why it may be left out."""
_PATTERN = re.compile("|".join(f"(?:{pattern})" for pattern, _ in HARMLESS))
_LAYER = re.compile(r"^(.*?)\.(\d+)\.")
_STEMS = ("layers", "h", "blocks", "block")
"""What the list of decoder layers is called."""


def is_harmless(name: str) -> bool:
    """Whether a tensor may be left out.

    Example:
        >>> is_harmless("visual.blocks.0.norm1.weight"), is_harmless("model.layers.9.mlp.weight")
        (True, False)
    """
    return _PATTERN.search(name) is not None


def layers_in(names: Iterable[str]) -> dict[str, set[int]]:
    """Numbers of decoder layers by the name of their list.

    Example:
        >>> layers_in(["model.layers.0.mlp.up_proj.weight", "visual.blocks.4.norm1.weight"])
        {'model.layers': {0}}
    """
    found: dict[str, set[int]] = {}
    for name in names:
        match = _LAYER.match(name)
        if match and match[1].rpartition(".")[2] in _STEMS and not is_harmless(name):
            found.setdefault(match[1], set()).add(int(match[2]))
    return found


def is_predicting_ahead(name: str, layers: int, ahead: int) -> bool:
    """Whether a tensor belongs to layers after the last, which predict several tokens.

    Example:
        >>> is_predicting_ahead("model.layers.61.eh_proj.weight", 61, 1)
        True
    """
    match = _LAYER.match(name)
    return match is not None and layers <= int(match[2]) < layers + ahead


WHOLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")
FLOATS = ("F64", "F32", "F16", "BF16")
"""Types that weights are read from as they are."""
_FETCH_MODEL = "fetch the model again"


def read_tensors(folder: Path) -> dict[str, TensorFacts] | None:
    """Tensors of the model by name; None where they are pickled, which only torch reads."""
    if size_of(folder, WHOLE) is not None:
        return read_header(folder, WHOLE)
    index = read_object(folder, INDEX)
    if index is not None:
        return _read_shards(folder, index_files(index, INDEX))
    pickled = pickle_files(folder)
    if pickled:
        return None
    stray = sorted(file.name for file in folder.glob("*.safetensors"))
    unread = f"; {', '.join(stray[:3])} is not read" if stray else ""
    raise InvalidFile(WHOLE, f"it is not there{unread}", "give a folder with the model's weights")


def pickle_files(folder: Path) -> list[str]:
    """Names of the files of pickled weights; none where there are none."""
    whole, index = PICKLES
    if size_of(folder, whole) is not None:
        return [whole]
    listed = read_object(folder, index)
    names = sorted(set(index_files(listed, index).values())) if listed is not None else []
    for name in names:
        if size_of(folder, name) is None:
            raise InvalidFile(index, f"it names {name}, which is not there", _FETCH_MODEL)
    return names


def index_files(index: Mapping[str, Any], name: str) -> dict[str, str]:
    """Tensor -> file, as an index has it; every file is a plain name in the same folder."""
    listed = index.get("weight_map")
    if not isinstance(listed, dict) or not listed:
        raise InvalidFile(
            name, f"its weight_map is {short_repr(listed)}, not a list of files", _FETCH_MODEL
        )
    files = cast(dict[str, Any], listed)
    for tensor, file in files.items():
        if not isinstance(file, str) or not file or PurePath(file).name != file or "\0" in file:
            why = (
                f"it says {tensor} is in {short_repr(file)}, "
                "which is no name of a file in the folder"
            )
            raise InvalidFile(name, why, _FETCH_MODEL)
    return files


def _read_shards(folder: Path, listed: Mapping[str, str]) -> dict[str, TensorFacts]:
    found: dict[str, TensorFacts] = {}
    for file in sorted(set(listed.values())):
        if size_of(folder, file) is None:
            raise InvalidFile(INDEX, f"it names {file}, which is not there", _FETCH_MODEL)
        for tensor, facts in read_header(folder, file).items():
            if tensor in found:
                why = f"{tensor} is in {found[tensor].file} and in {file}"
                raise InvalidFile(INDEX, why, _FETCH_MODEL)
            found[tensor] = facts
    lost = sorted(tensor for tensor, file in listed.items() if _file_of(found, tensor) != file)
    if lost:
        raise InvalidFile(INDEX, f"{lost[0]} is not in {listed[lost[0]]}", _FETCH_MODEL)
    return found


def _file_of(found: Mapping[str, TensorFacts], tensor: str) -> str | None:
    return found[tensor].file if tensor in found else None


def tensor_faults(
    tensors: Mapping[str, TensorFacts], config: Mapping[str, Any], *, has_head: bool, is_cut: bool
) -> Iterator[InvalidFile]:
    """What the headers and the config say differently.

    `has_head`: the model writes tokens. `is_cut`: the run overrides the number of layers.
    """
    if config.get("quantization_config") is not None:
        return  # names, types and shapes are those of the quantisation
    yield from _type_faults(tensors)
    dropped = [*_layer_faults(tensors, config, is_cut=is_cut)]
    yield from dropped
    shapes = expected_shapes(config, tensors.keys(), has_head=has_head)
    if shapes is None:
        return
    lacking = [name for name in shapes if name not in tensors]
    if lacking:
        yield missing_weights(lacking)
    odd = [name for name in shapes if name in tensors and tensors[name].shape != shapes[name]]
    if odd:
        first = tensors[odd[0]]
        yield other_shapes(odd, first.file, first.shape, shapes[odd[0]])
    extra = [
        name
        for name in tensors
        if not (name in shapes or is_harmless(name) or is_predicting_ahead(name, *_counts(config)))
    ]
    if extra and not (is_cut or lacking or dropped):
        yield extra_weights(extra, tensors[extra[0]].file)


def missing_weights(names: Iterable[str]) -> InvalidFile:
    """Weights that config.json promises and no file holds: they would be random."""
    found = sorted(names)
    why = f"{_count(found)} in no file of the folder: {_listed(found)}"
    fix = "give the folder of a whole model; an untied config.json of a tied model also shows so"
    return InvalidFile("weights", why, fix)


def extra_weights(names: Iterable[str], file: str = "weights") -> InvalidFile:
    """Weights that a file holds and the model has no place for: they would be dropped."""
    found = sorted(names)
    why = f"{_count(found)} not in the model of config.json: {_listed(found)}"
    return InvalidFile(file, why, "correct config.json, or give the model of these weights")


def other_shapes(
    names: Iterable[str], file: str, actual: Iterable[int], wanted: Iterable[int]
) -> InvalidFile:
    """Weights of another shape than config.json says; the shapes are those of the first."""
    found = [*names]
    more = f" ({len(found) - 1} more differ)" if len(found) > 1 else ""
    why = f"{found[0]} is {[*actual]}, and {[*wanted]} by config.json{more}"
    return InvalidFile(file, why, "correct config.json, or give the model of these weights")


def _type_faults(tensors: Mapping[str, TensorFacts]) -> Iterator[InvalidFile]:
    odd = [n for n, facts in tensors.items() if facts.dtype not in FLOATS and not is_harmless(n)]
    if odd:
        first = tensors[odd[0]]
        more = f" ({len(odd) - 1} more)" if len(odd) > 1 else ""
        why = f"{odd[0]} holds {first.dtype}{more}, which would be read as if they were weights"
        fix = "give weights in float32, float16 or bfloat16; quantised ones cannot be trained"
        yield InvalidFile(first.file, why, fix)


def _layer_faults(
    tensors: Mapping[str, TensorFacts], config: Mapping[str, Any], *, is_cut: bool
) -> Iterator[InvalidFile]:
    """Layers that the file holds and the config does not count."""
    (layers, ahead), found = _counts(config), layers_in(tensors)
    if layers < 1 or len(found) != 1 or is_cut:
        return
    ((stem, numbers),) = found.items()
    dropped = [number for number in numbers if number >= layers + ahead]
    if dropped:
        why = f"it holds {max(numbers) + 1} layers, and num_hidden_layers is {layers}"
        first = next(t for name, t in tensors.items() if name.startswith(f"{stem}.{dropped[0]}."))
        yield InvalidFile(first.file, why, "set num_hidden_layers in config.json")


def _counts(config: Mapping[str, Any]) -> tuple[int, int]:
    """Decoder layers, and those after them that predict several tokens; 0 where nothing says so."""
    given = config.get("num_hidden_layers"), config.get("num_nextn_predict_layers")
    layers, ahead = (value if type(value) is int else 0 for value in given)
    return layers, ahead


def _count(names: list[str]) -> str:
    return f"{len(names)} weights are" if len(names) != 1 else "1 weight is"


def _listed(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
