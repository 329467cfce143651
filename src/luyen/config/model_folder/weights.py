"""Whether the weights in a folder are those that its `config.json` describes, by their headers."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePath
from typing import Any, cast

from luyen.config.model_folder.expected import expected_shapes
from luyen.config.model_folder.extras import is_harmless, is_predicting_ahead, layers_in
from luyen.config.model_folder.files import UnsoundFile, read_object, shown, size_of
from luyen.config.model_folder.header import TensorFacts, read_header

WHOLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")
FLOATS = ("F64", "F32", "F16", "BF16")
"""Types that weights are read from as they are."""
_AGAIN = "fetch the model again"


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
    others = sorted(file.name for file in folder.glob("*.safetensors"))
    held = f"; {', '.join(others[:3])} is not read" if others else ""
    raise UnsoundFile(WHOLE, f"it is not there{held}", "give a folder with the model's weights")


def pickle_files(folder: Path) -> list[str]:
    """Names of the files of pickled weights; none where there are none."""
    whole, index = PICKLES
    if size_of(folder, whole) is not None:
        return [whole]
    listed = read_object(folder, index)
    names = sorted(set(index_files(listed, index).values())) if listed is not None else []
    for name in names:
        if size_of(folder, name) is None:
            raise UnsoundFile(index, f"it names {name}, which is not there", _AGAIN)
    return names


def index_files(index: Mapping[str, Any], name: str) -> dict[str, str]:
    """Tensor -> file, as an index has it; every file is a plain name in the same folder."""
    listed = index.get("weight_map")
    if not isinstance(listed, dict) or not listed:
        raise UnsoundFile(name, f"its weight_map is {shown(listed)}, not a list of files", _AGAIN)
    files = cast(dict[str, Any], listed)
    for tensor, file in files.items():
        if not isinstance(file, str) or not file or PurePath(file).name != file or "\0" in file:
            why = f"it says {tensor} is in {shown(file)}, which is no name of a file in the folder"
            raise UnsoundFile(name, why, _AGAIN)
    return files


def _read_shards(folder: Path, listed: Mapping[str, str]) -> dict[str, TensorFacts]:
    found: dict[str, TensorFacts] = {}
    for file in sorted(set(listed.values())):
        if size_of(folder, file) is None:
            raise UnsoundFile(INDEX, f"it names {file}, which is not there", _AGAIN)
        for tensor, facts in read_header(folder, file).items():
            if tensor in found:
                why = f"{tensor} is in {found[tensor].file} and in {file}"
                raise UnsoundFile(INDEX, why, _AGAIN)
            found[tensor] = facts
    lost = sorted(tensor for tensor, file in listed.items() if _file_of(found, tensor) != file)
    if lost:
        raise UnsoundFile(INDEX, f"{lost[0]} is not in {listed[lost[0]]}", _AGAIN)
    return found


def _file_of(found: Mapping[str, TensorFacts], tensor: str) -> str | None:
    return found[tensor].file if tensor in found else None


def tensor_faults(
    tensors: Mapping[str, TensorFacts], config: Mapping[str, Any], *, has_head: bool, is_cut: bool
) -> Iterator[UnsoundFile]:
    """What the headers and the config say differently.

    `has_head`: the model writes tokens. `is_cut`: the run itself asks for other layers.
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


def missing_weights(names: Iterable[str]) -> UnsoundFile:
    """Weights that config.json promises and no file holds: they would be random."""
    found = sorted(names)
    why = f"{_count(found)} in no file of the folder: {_listed(found)}"
    fix = "give the folder of a whole model; an untied config.json of a tied model also shows so"
    return UnsoundFile("weights", why, fix)


def extra_weights(names: Iterable[str], file: str = "weights") -> UnsoundFile:
    """Weights that a file holds and the model has no place for: they would be dropped."""
    found = sorted(names)
    why = f"{_count(found)} not in the model of config.json: {_listed(found)}"
    return UnsoundFile(file, why, "mend config.json, or give the model that the weights are of")


def other_shapes(
    names: Iterable[str], file: str, held: Iterable[int], wanted: Iterable[int]
) -> UnsoundFile:
    """Weights of another shape than config.json says; the shapes are those of the first."""
    found = [*names]
    more = f" ({len(found) - 1} more differ)" if len(found) > 1 else ""
    why = f"{found[0]} is {[*held]}, and {[*wanted]} by config.json{more}"
    return UnsoundFile(file, why, "mend config.json, or give the model that the weights are of")


def _type_faults(tensors: Mapping[str, TensorFacts]) -> Iterator[UnsoundFile]:
    odd = [n for n, facts in tensors.items() if facts.dtype not in FLOATS and not is_harmless(n)]
    if odd:
        first = tensors[odd[0]]
        more = f" ({len(odd) - 1} more)" if len(odd) > 1 else ""
        why = f"{odd[0]} holds {first.dtype}{more}, which would be read as if they were weights"
        fix = "give weights in float32, float16 or bfloat16; quantised ones cannot be trained"
        yield UnsoundFile(first.file, why, fix)


def _layer_faults(
    tensors: Mapping[str, TensorFacts], config: Mapping[str, Any], *, is_cut: bool
) -> Iterator[UnsoundFile]:
    """Layers that the file holds and the config does not count."""
    (layers, ahead), found = _counts(config), layers_in(tensors)
    if layers < 1 or len(found) != 1 or is_cut:
        return
    ((stem, numbers),) = found.items()
    dropped = [number for number in numbers if number >= layers + ahead]
    if dropped:
        why = f"it holds {max(numbers) + 1} layers, and num_hidden_layers is {layers}"
        first = next(t for name, t in tensors.items() if name.startswith(f"{stem}.{dropped[0]}."))
        yield UnsoundFile(first.file, why, "set num_hidden_layers in config.json")


def _counts(config: Mapping[str, Any]) -> tuple[int, int]:
    """Decoder layers, and those after them that predict several tokens; 0 where nothing says so."""
    given = config.get("num_hidden_layers"), config.get("num_nextn_predict_layers")
    layers, ahead = (value if type(value) is int else 0 for value in given)
    return layers, ahead


def _count(names: list[str]) -> str:
    return f"{len(names)} weights are" if len(names) != 1 else "1 weight is"


def _listed(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
