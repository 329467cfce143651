"""Weights on their way: tensors as plain bytes, and back.

A tensor that is a view would take its whole storage along if it were pickled; here only its own
elements travel, and what arrives is the same to the bit, whatever the type.
"""

import warnings
from collections.abc import Generator, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, final

import torch
from safetensors.torch import load_file, save
from torch import Tensor

from luyen.base.files import write_whole

# Arrays of the object store are read-only, and PyTorch knows no such tensor.
warnings.filterwarnings("ignore", message="The given NumPy array is not writable")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Parcel:
    """Some parameters as bytes.

    Example:
        >>> unpack(pack({"w": torch.ones(2, dtype=torch.bfloat16)}))["w"].dtype
        torch.bfloat16
    """

    contents: Mapping[str, tuple[str, tuple[int, ...], Any]]
    """Type, shape and an array of bytes, by name."""


Part: TypeAlias = Parcel | Path
"""What a replica loads from: a parcel, or a file of safetensors."""


def pack(tensors: Mapping[str, Tensor]) -> Parcel:
    """Tensors of any device as bytes."""
    contents: dict[str, tuple[str, tuple[int, ...], Any]] = {}
    for name, tensor in tensors.items():
        flat = tensor.detach().reshape(-1).contiguous().cpu().view(torch.uint8)
        dtype = str(tensor.dtype).removeprefix("torch.")
        contents[name] = dtype, tuple(tensor.shape), flat.numpy()
    return Parcel(contents=contents)


def unpack(part: Part) -> dict[str, Tensor]:
    """The tensors of a part, on the CPU, to be read only: a parcel's lie where it lies."""
    if isinstance(part, Path):
        return load_file(part)
    return {
        name: torch.from_numpy(array).view(getattr(torch, dtype)).reshape(shape)
        for name, (dtype, shape, array) in part.contents.items()
    }


def write_part(file: Path, tensors: Mapping[str, Tensor]) -> Path:
    """Tensors as a file that is whole or absent."""
    write_whole(file, save({name: t.detach().contiguous().cpu() for name, t in tensors.items()}))
    return file


def in_buckets(
    tensors: Mapping[str, Tensor], *, most_bytes: int = 256 << 20
) -> Generator[dict[str, Tensor]]:
    """The tensors in their order, a few at a time; a larger one goes alone.

    Example:
        >>> both = {"a": torch.zeros(2), "b": torch.zeros(2)}
        >>> [list(some) for some in in_buckets(both, most_bytes=8)]
        [['a'], ['b']]
    """
    bucket: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if bucket and size_of((*bucket.values(), tensor)) > most_bytes:
            yield bucket
            bucket = {}
        bucket[name] = tensor
    if bucket:
        yield bucket


def size_of(tensors: Iterable[Tensor]) -> int:
    """Bytes of the elements."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
