"""Weights on their way: tensors as plain bytes, and back.

A tensor that is a view would take its whole storage along if it were pickled; here only its own
elements travel, and what arrives is the same to the bit, whatever the type.
"""

import warnings
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
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


Stretch: TypeAlias = tuple[Plain, tuple[tuple[str, tuple[int, ...]], ...]]
"""Tensors of one type that lie side by side, as one flat one; names and shapes in order."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Parcel:
    """Some parameters as bytes.

    Example:
        >>> unpack(pack({"w": torch.ones(2, dtype=torch.bfloat16)}))["w"].dtype
        torch.bfloat16
    """

    stretches: tuple[Stretch, ...]
    """All of them; the fewer they are, the quicker is the way."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class GatheredWeights:
    """What ranks hold, on its way to those that draw with it.

    Example:
        >>> GatheredWeights(parts=[], bytes=0, seconds=0.1, digests={}).bytes
        0
    """

    parts: Sequence[Any]
    """Whole parameters of the policy, a few in each object of the store."""
    bytes: int
    """Their size."""
    seconds: float
    """How long ranks took."""
    digests: Mapping[str, str]
    """Type, shape and digest of everything that learns, from the shards of each rank."""


Gathering: TypeAlias = Callable[[], GatheredWeights]
"""Waits for the ranks that gather."""


Part: TypeAlias = Parcel | Path
"""What a replica loads from: a parcel, or a file of safetensors."""


def pack(tensors: Mapping[str, Tensor]) -> Parcel:
    """Tensors of any device as bytes; neighbours in memory become one stretch.

    Example:
        >>> first, second = torch.arange(6.0).split([2, 4])
        >>> len(pack({"a": first, "b": second}).stretches), len(pack({"b": second}).stretches)
        (1, 1)
    """
    stretches: list[list[tuple[str, Tensor]]] = []
    before: Tensor | None = None
    for name, tensor in tensors.items():
        if before is None or not _follows(tensor, before):
            stretches.append([])
        stretches[-1].append((name, tensor))
        before = tensor
    return Parcel(stretches=tuple(_stretch(one) for one in stretches))


def _follows(tensor: Tensor, before: Tensor) -> bool:
    """Whether a tensor begins where another one ends, in the same memory."""
    return (
        tensor.dtype == before.dtype
        and tensor.data_ptr() == before.data_ptr() + before.numel() * before.element_size()
        and tensor.untyped_storage().data_ptr() == before.untyped_storage().data_ptr()
        and tensor.is_contiguous()
        and before.is_contiguous()
    )


def _stretch(named: Sequence[tuple[str, Tensor]]) -> Stretch:
    first = named[0][1].detach()
    if len(named) > 1:
        first = first.as_strided((sum(tensor.numel() for _, tensor in named),), (1,))
    return as_plain(first), tuple((name, tuple(tensor.shape)) for name, tensor in named)


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
    found: dict[str, Tensor] = {}
    for plain, contents in part.stretches:
        flat = from_plain(plain).reshape(-1)
        sizes = [prod(shape) for _, shape in contents]
        for (name, shape), own in zip(contents, flat.split(sizes), strict=True):
            found[name] = own.view(shape)
    return found


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
