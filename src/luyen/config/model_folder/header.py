"""The header of a safetensors file, read and checked in plain Python: no tensor is loaded."""

import json
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, cast, final

from luyen.config.model_folder.files import UnsoundFile, shown, size_of

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
_AGAIN = "fetch the file again"


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
    """Tensors of a file by name; UnsoundFile where the file is not whole or contradicts itself."""
    size = size_of(folder, name)
    if size is None:
        raise UnsoundFile(name, "it is not there", _AGAIN)
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
                raise UnsoundFile(name, why, _AGAIN)
            text = file.read(length)
    except OSError as error:
        why = f"it cannot be read: {error.strerror or error}"
        raise UnsoundFile(name, why, "mend the folder") from error
    try:
        found = json.loads(text, object_pairs_hook=_once)
    except (RecursionError, ValueError) as error:
        raise UnsoundFile(name, f"its header is no JSON: {error}", _AGAIN) from error
    if not isinstance(found, dict):
        raise UnsoundFile(name, f"its header is {shown(found)}, not an object", _AGAIN)
    return cast(dict[str, Any], found), 8 + length


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        raise ValueError("a name stands in it twice")
    return made


def _entry(file: str, tensor: str, entry: Any) -> tuple[str, tuple[int, ...], int, int]:
    """Type, shape and place of a tensor, after they were found to fit each other."""
    known = cast(dict[str, Any], entry) if isinstance(entry, dict) else {}
    shape, place = _sizes(known.get("shape")), _sizes(known.get("data_offsets"))
    dtype = known.get("dtype")
    if shape is None or place is None or len(place) != 2:
        raise UnsoundFile(file, f"its header does not say what {tensor} is", _AGAIN)
    if not isinstance(dtype, str) or dtype not in _BITS:
        raise UnsoundFile(file, f"{tensor} is of an unknown type, {shown(dtype)}", _AGAIN)
    begin, end = place
    if (end - begin) * 8 != prod(shape) * _BITS[dtype]:
        why = f"{tensor} is {dtype} {list(shape)} and has {end - begin:,} bytes"
        raise UnsoundFile(file, why, _AGAIN)
    return dtype, tuple(shape), begin, end


def _sizes(value: Any) -> list[int] | None:
    """A list of whole numbers from 0 on; None for anything else."""
    if not isinstance(value, list):
        return None
    sizes = cast(list[Any], value)
    return sizes if all(type(size) is int and size >= 0 for size in sizes) else None


def _demand_whole(name: str, ranges: list[tuple[int, int, str]], held: int) -> None:
    """Tensors lie one after the other and fill the file: no hole, no overlap, nothing cut off."""
    at = 0
    for begin, end, tensor in ranges:
        if begin != at:
            raise UnsoundFile(name, f"{tensor} does not begin where another ends", _AGAIN)
        at = end
    if at > held:
        why = f"it is cut off: its tensors take {at:,} bytes, and {held:,} are there"
        raise UnsoundFile(name, why, _AGAIN)
    if at < held:
        why = f"{held - at:,} bytes after its tensors belong to none"
        raise UnsoundFile(name, why, _AGAIN)
