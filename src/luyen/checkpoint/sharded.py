"""Tensors of one process or of many, saved so that any number of processes can load them.

Ranks of a process group work out who writes and who reads which part with torch's distributed
checkpoint (DCP); the files are those of `luyen.checkpoint.shards`. DCP's own files hold a pickle,
and a checkpoint must run no code.
"""

from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from luyen.base.errors import UserError
from luyen.checkpoint.shards import (
    INDEX,
    Box,
    Index,
    Stored,
    index_text,
    read_boxes,
    read_index,
    shard_name,
    tied_names,
)
from luyen.checkpoint.writes import AtOnce, Writes

_AT_ONCE = AtOnce()


def save_sharded(
    folder: Path,
    tensors: Mapping[str, Tensor],
    *,
    group: dist.ProcessGroup | None = None,
    writes: Writes = _AT_ONCE,
) -> None:
    """Write tensors and DTensors by name into a folder that exists.

    Every rank of the group calls it with the same names; a plain tensor is the same on all of them.
    Without a process group one process writes alone. Tied tensors are stored once. An OSError of
    any rank is raised on all, unless `writes` puts the writing off: no rank hears of another then.
    """
    if not dist.is_initialized():
        _save_alone(folder, tensors, writes)
        return
    from luyen.checkpoint.ranks import save_together  # DCP takes a while to load

    save_together(folder, tensors, group, writes)


def load_sharded(
    folder: Path, into: Mapping[str, Tensor], *, group: dist.ProcessGroup | None = None
) -> None:
    """Fill tensors and DTensors with what was saved under their names, bit by bit.

    Names that are not asked for are left alone. A name that is missing, or that has another shape
    or type, is a UserError; nothing is filled then.
    """
    index = read_index(folder)
    _demand_fit(folder, index, into)
    tensors = {name: tensor.detach() for name, tensor in into.items()}
    if not dist.is_initialized():
        _load_alone(folder, index, tensors)
        return
    from luyen.checkpoint.ranks import load_together

    load_together(folder, index, tensors, group)


def _save_alone(folder: Path, tensors: Mapping[str, Tensor], writes: Writes) -> None:
    tied, file = tied_names(tensors), shard_name(0)
    own = {name: tensor for name, tensor in tensors.items() if name not in tied}
    stored: dict[str, Stored] = {}
    for name, tensor in own.items():
        shape = tuple(tensor.shape)
        box = Box(offsets=(0,) * len(shape), sizes=shape, file=file, key=name)
        stored[name] = Stored(dtype=tensor.dtype, shape=shape, boxes=(box,))
    writes.tensors(folder / file, own)
    writes.text(folder / INDEX, index_text(Index(stored=stored, aliases=tied)))


def _load_alone(folder: Path, index: Index, tensors: Mapping[str, Tensor]) -> None:
    known = index.names()
    wanted = [(box, tensors[name][box.span]) for name in tensors for box in known[name].boxes]
    with torch.no_grad():
        read_boxes(folder, ((box, box.inside, into) for box, into in wanted))


def _demand_fit(folder: Path, index: Index, into: Mapping[str, Tensor]) -> None:
    known = index.names()
    for name, tensor in into.items():
        stored = known.get(name)
        if stored is None:
            why = f"it holds no tensor `{name}`"
        elif stored.shape != tuple(tensor.shape) or stored.dtype != tensor.dtype:
            wanted = f"{tensor.dtype} of {tuple(tensor.shape)}"
            why = f"`{name}` is {stored.dtype} of {stored.shape} there, and {wanted} is wanted"
        else:
            continue
        fix = "resume with the model and the types that it was saved with"
        raise UserError("checkpoint", str(folder), why, fix)
