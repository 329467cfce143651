"""Tensors in a folder: boxes of them in safetensors files, and an index that says where each lies.

A tensor may be one box or many, written by one process or by many. `index.json` holds type, shape
and boxes of every tensor; names that were one tensor (tied weights) are stored once.
"""

import math
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, final

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from luyen.base.errors import UserError
from luyen.base.files import json_line, read_json

INDEX = "index.json"
SCHEMA = 1
"""Version of the index; a reader refuses a later one."""
_OS_ERROR = re.compile(r"os error (\d+)")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """A part of a tensor and the place where it is stored.

    Example:
        >>> Box(offsets=(2, 0), sizes=(2, 3), file="rank_00001.safetensors", key="w@2,0").span
        (slice(2, 4, None), slice(0, 3, None))
    """

    offsets: tuple[int, ...]
    """Where it begins in the whole tensor."""
    sizes: tuple[int, ...]
    """Its own shape."""
    file: str
    """Name of the file, in the folder of the index."""
    key: str
    """Its name in that file."""

    @property
    def span(self) -> tuple[slice, ...]:
        """The part as an index into the whole tensor."""
        pairs = zip(self.offsets, self.sizes, strict=True)
        return tuple(slice(offset, offset + size) for offset, size in pairs)

    @property
    def inside(self) -> tuple[slice, ...]:
        """All of the part as an index into itself."""
        return tuple(slice(size) for size in self.sizes)


Part: TypeAlias = tuple[Box, tuple[slice, ...], Tensor]
"""A box, the part of it that is wanted (counted inside the box), and where it goes."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """A whole tensor as the index describes it.

    Example:
        >>> StoredTensor(dtype=torch.bfloat16, shape=(4, 3), boxes=()).shape
        (4, 3)
    """

    dtype: torch.dtype
    """Type of its elements."""
    shape: tuple[int, ...]
    """Shape of the whole."""
    boxes: tuple[Box, ...]
    """Its parts, which do not overlap; those without elements may be left out."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ShardIndex:
    """What a folder holds.

    Example:
        >>> kept = StoredTensor(dtype=torch.float32, shape=(), boxes=())
        >>> sorted(ShardIndex(stored={"a": kept}, aliases={"b": "a"}).names())
        ['a', 'b']
    """

    stored: Mapping[str, StoredTensor]
    """Tensors by name."""
    aliases: Mapping[str, str]
    """Further names of tensors that are stored under another one."""

    def names(self) -> dict[str, StoredTensor]:
        """Every name with what it stands for."""
        also = {name: self.stored[first] for name, first in self.aliases.items()}
        return {**self.stored, **also}


def shard_name(rank: int) -> str:
    """The file that a rank writes; one process alone is rank 0."""
    return f"rank_{rank:05d}.safetensors"


def tied_names(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Names of tensors that are the same memory as an earlier one, and the earlier name."""
    first: dict[tuple[Any, ...], str] = {}
    aliases: dict[str, str] = {}
    for name, tensor in tensors.items():
        same = memory_of(tensor)
        if same is not None and first.setdefault(same, name) != name:
            aliases[name] = first[same]
    return aliases


def memory_of(tensor: Tensor) -> tuple[Any, ...] | None:
    """What two names share when they hold the same memory; None where there is none to share."""
    if tensor.numel() == 0:
        return None
    place = (str(tensor.device), tensor.data_ptr(), tensor.dtype)
    return (*place, tuple(tensor.shape), tensor.stride())


def write_shard(file: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors by name into one file; an OSError when the disk refuses."""
    plain: dict[str, Tensor] = {}
    homes: set[int] = set()
    for name, tensor in tensors.items():
        # A view into a storage becomes a tensor of its own: its neighbours are not its state.
        whole = tensor.detach().cpu().contiguous()
        home = whole.untyped_storage().data_ptr()
        plain[name] = whole.clone() if _is_view(whole) or home in homes else whole
        homes.add(home)
    file.touch()
    mode = file.stat().st_mode  # safetensors makes a file for its owner alone
    try:
        save_file(plain, file)
    except SafetensorError as error:
        number = _OS_ERROR.search(str(error))
        if number is None:
            raise
        code = int(number.group(1))
        raise OSError(code, os.strerror(code), str(file)) from error
    file.chmod(mode)


def _is_view(tensor: Tensor) -> bool:
    """Whether its storage holds more than it."""
    return tensor.untyped_storage().nbytes() != tensor.numel() * tensor.element_size()


def index_text(index: ShardIndex) -> str:
    """The index of a folder as its file holds it."""
    tensors = {
        name: {
            "dtype": str(stored.dtype).removeprefix("torch."),
            "shape": stored.shape,
            "boxes": [[box.offsets, box.sizes, box.file, box.key] for box in stored.boxes],
        }
        for name, stored in index.stored.items()
    }
    return json_line({"schema": SCHEMA, "tensors": tensors, "aliases": index.aliases})


def read_index(folder: Path) -> ShardIndex:
    """The index of a folder; a UserError when it is missing or of a later version."""
    read = read_json(folder / INDEX)
    schema = read.get("schema")
    if not isinstance(schema, int) or schema > SCHEMA:
        why = f"its index follows layout {schema!r}, and this version reads up to {SCHEMA}"
        raise UserError("checkpoint", str(folder), why, "install a newer luyen")
    try:
        stored = {name: _stored(entry) for name, entry in read["tensors"].items()}
        index = ShardIndex(stored=stored, aliases=dict(read["aliases"]))
        index.names()
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise _no_index(folder, f"{type(error).__name__}: {error}") from error
    return index


def _no_index(folder: Path, why: str) -> UserError:
    fix = "resume from an earlier checkpoint"
    return UserError("checkpoint", str(folder / INDEX), f"it describes no tensors: {why}", fix)


def _stored(entry: Mapping[str, Any]) -> StoredTensor:
    dtype = getattr(torch, entry["dtype"])
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{entry['dtype']} is no type of tensors")
    boxes = tuple(
        Box(offsets=tuple(offsets), sizes=tuple(sizes), file=file, key=key)
        for offsets, sizes, file, key in entry["boxes"]
    )
    stored = StoredTensor(dtype=dtype, shape=tuple(entry["shape"]), boxes=boxes)
    _demand_whole(stored)
    return stored


def _demand_whole(stored: StoredTensor) -> None:
    """A ValueError unless boxes in files of this folder cover it: the rest would be chance."""
    for box in stored.boxes:
        ranges = zip(box.offsets, box.sizes, stored.shape, strict=True)
        if not all(offset >= 0 and 0 <= size <= most - offset for offset, size, most in ranges):
            raise ValueError(f"{box.key} lies outside of its tensor")
        if Path(box.file).name != box.file:
            raise ValueError(f"{box.file} is no file of this folder")
    stored_size, needed = sum(math.prod(box.sizes) for box in stored.boxes), math.prod(stored.shape)
    if stored_size != needed or min(stored.shape, default=0) < 0:
        raise ValueError(f"{stored_size} of {needed} numbers are there")


def read_boxes(folder: Path, wanted: Iterable[Part]) -> None:
    """Copy parts of boxes into tensors, file by file."""
    by_file: dict[str, list[Part]] = {}
    for item in wanted:
        by_file.setdefault(item[0].file, []).append(item)
    for file, items in by_file.items():
        try:
            with safe_open(folder / file, framework="pt", device="cpu") as opened:
                for box, part, into in items:
                    into.copy_(_checked(opened.get_tensor(box.key), box)[part])
        except (SafetensorError, ValueError) as error:
            raise _no_index(folder, f"{file}: {error}") from error


def _checked(found: Tensor, box: Box) -> Tensor:
    if tuple(found.shape) != box.sizes:
        raise ValueError(f"{box.key} has the shape {list(found.shape)}, not {list(box.sizes)}")
    return found


def read_whole(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a folder, on the CPU; names that were one tensor are one again.

    They lie in memory of their own: what happens to the files later does not reach them.
    """
    index = read_index(folder)
    found = {name: torch.empty(s.shape, dtype=s.dtype) for name, s in index.stored.items()}
    read_boxes(
        folder,
        (
            (box, box.inside, found[name][box.span])
            for name, stored in index.stored.items()
            for box in stored.boxes
        ),
    )
    return found | {name: found[first] for name, first in index.aliases.items()}
