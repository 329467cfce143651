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


Plain: TypeAlias = tuple[str, tuple[int, ...], Any]
"""A tensor as its type, its shape and an array of bytes."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Parcel:
    """Some parameters as bytes.

    Example:
        >>> unpack(pack({"w": torch.ones(2, dtype=torch.bfloat16)}))["w"].dtype
        torch.bfloat16
    """

    contents: Mapping[str, Plain]
    """Tensors by name."""


Part: TypeAlias = Parcel | Path
"""What a replica loads from: a parcel, or a file of safetensors."""


def pack(tensors: Mapping[str, Tensor]) -> Parcel:
    """Tensors of any device as bytes."""
    return Parcel(contents={name: as_plain(tensor) for name, tensor in tensors.items()})


def as_plain(tensor: Tensor) -> Plain:
    """A tensor of any device as bytes."""
    flat = tensor.detach().reshape(-1).contiguous().cpu().view(torch.uint8)
    return str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), flat.numpy()


def from_plain(plain: Plain) -> Tensor:
    """The tensor, over the very bytes."""
    dtype, shape, array = plain
    if not array.size:
        return torch.empty(shape, dtype=getattr(torch, dtype))
    return torch.from_numpy(array).view(getattr(torch, dtype)).reshape(shape)


def unpack(part: Part) -> dict[str, Tensor]:
    """The tensors of a part, on the CPU, to be read only: a parcel's lie where it lies."""
    if isinstance(part, Path):
        return load_file(part)
    return {name: from_plain(plain) for name, plain in part.contents.items()}


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
