"""State as files: tensors in safetensors, the rest in JSON; any number of ranks can load it.

A state is any nesting of dicts, lists and tuples over tensors, numbers, strings, booleans and
None: what `state_dict()` gives for a model, an optimizer, a scheduler or a controller. No pickle is
read or written, so loading a checkpoint runs no code.
"""

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor

from luyen.base.errors import UserError
from luyen.base.files import read_json
from luyen.checkpoint.file_writers import FileWriter, ImmediateWriter
from luyen.checkpoint.shards import (
    INDEX,
    Box,
    ShardIndex,
    StoredTensor,
    index_text,
    read_boxes,
    read_index,
    read_whole,
    shard_name,
    tied_names,
)

# Sharded tensors: saved by one process or many, loaded by any number of processes.
#
# Ranks of a process group work out who writes and who reads which part with torch's distributed
# checkpoint (DCP); the files are those of `luyen.checkpoint.shards`. DCP's own files hold a
# pickle, and a checkpoint must run no code.

_WRITE_NOW = ImmediateWriter()


def save_sharded(
    folder: Path,
    tensors: Mapping[str, Tensor],
    *,
    group: dist.ProcessGroup | None = None,
    writes: FileWriter = _WRITE_NOW,
) -> None:
    """Write tensors and DTensors by name into a folder that exists.

    Every rank of the group calls it with the same names; a plain tensor is the same on all of them.
    Without a process group one process writes alone. Tied tensors are stored once. An OSError of
    any rank is raised on all, unless `writes` puts the writing off: no rank hears of another then.
    """
    if not dist.is_initialized():
        _save_alone(folder, tensors, writes)
        return
    from luyen.checkpoint.dcp import save_together  # DCP takes a while to load

    save_together(folder, tensors, group, writes)


def load_sharded(
    folder: Path, into: Mapping[str, Tensor], *, group: dist.ProcessGroup | None = None
) -> None:
    """Fill tensors and DTensors with what was saved under their names, bit by bit.

    Names that are not requested are left alone. A name that is missing, or that has another shape
    or type, is a UserError; nothing is filled then.
    """
    index = read_index(folder)
    _demand_fit(folder, index, into)
    tensors = {name: tensor.detach() for name, tensor in into.items()}
    if not dist.is_initialized():
        _load_alone(folder, index, tensors)
        return
    from luyen.checkpoint.dcp import load_together

    load_together(folder, index, tensors, group)


def _save_alone(folder: Path, tensors: Mapping[str, Tensor], writes: FileWriter) -> None:
    tied, file = tied_names(tensors), shard_name(0)
    own = {name: tensor for name, tensor in tensors.items() if name not in tied}
    stored: dict[str, StoredTensor] = {}
    for name, tensor in own.items():
        shape = tuple(tensor.shape)
        box = Box(offsets=(0,) * len(shape), sizes=shape, file=file, key=name)
        stored[name] = StoredTensor(dtype=tensor.dtype, shape=shape, boxes=(box,))
    writes.tensors(folder / file, own)
    writes.text(folder / INDEX, index_text(ShardIndex(stored=stored, aliases=tied)))


def _load_alone(folder: Path, index: ShardIndex, tensors: Mapping[str, Tensor]) -> None:
    known = index.names()
    wanted = [(box, tensors[name][box.span]) for name in tensors for box in known[name].boxes]
    with torch.no_grad():
        read_boxes(folder, ((box, box.inside, into) for box, into in wanted))


def _demand_fit(folder: Path, index: ShardIndex, into: Mapping[str, Tensor]) -> None:
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


_ALIASES = "luyen.aliases"
_MARK = "$"


def save_state(folder: Path, name: str, state: Any, *, writes: FileWriter = _WRITE_NOW) -> None:
    """Write a state as `<name>.json`, with its tensors in the folder `<name>` if it has any.

    In a process group every rank calls it with the same state, whose tensors may be shards.
    """
    tensors: dict[str, Tensor] = {}
    tree = _encode(state, "", tensors)
    if not dist.is_initialized() or dist.get_rank() == 0:
        text = json.dumps({"state": tree}, ensure_ascii=False, allow_nan=False)
        writes.text(folder / f"{name}.json", text + "\n")
        if tensors:
            (folder / name).mkdir(exist_ok=True)
    if tensors:
        if dist.is_initialized():
            dist.barrier()  # the folder is there
        save_sharded(folder / name, tensors, writes=writes)


def load_state(folder: Path, name: str, *, into: Any = None) -> Any:
    """What `save_state` wrote: the same types, the same bits; tensors on the CPU, and whole.

    With `into`, a state of the same form, its tensors (or shards) are filled where they are, and
    stand in the result; every rank calls it then.
    """
    tree = read_json(folder / f"{name}.json")["state"]
    if into is None:
        return _decode(tree, _tensors(folder, name))
    own: dict[str, Tensor] = {}
    _encode(into, "", own)
    if own:
        load_sharded(folder / name, own)
    return _decode(tree, own)


def _tensors(folder: Path, name: str) -> dict[str, Tensor]:
    if (folder / name / INDEX).is_file():
        return read_whole(folder / name)
    file = folder / f"{name}.safetensors"
    return _read_single(file) if file.is_file() else {}


def _read_single(file: Path) -> dict[str, Tensor]:
    """Tensors of a checkpoint of layout 1, which has one file for each state."""
    with safe_open(file, framework="pt", device="cpu") as opened:
        names = list(opened.keys())  # no dict
        found = {name: opened.get_tensor(name).clone() for name in names}
        aliases: dict[str, str] = json.loads((opened.metadata() or {}).get(_ALIASES, "{}"))
    return found | {name: found[first] for name, first in aliases.items()}


def _encode(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """JSON for a state. A single-key dict whose key begins with `$` stands for what JSON lacks."""
    if isinstance(value, Tensor):
        name = path or "value"
        while name in tensors:  # the keys 0 and "0", or "a/b" and "b" below "a", read the same
            name += "~2"
        tensors[name] = value
        return {"$tensor": name}
    if value is None or isinstance(value, bool | str | int):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$float": str(float(value))}
    if isinstance(value, list | tuple):
        items = [_encode(inner, _below(path, i), tensors) for i, inner in enumerate(value)]
        return items if isinstance(value, list) else {"$tuple": items}
    if isinstance(value, Mapping):
        pairs = [(k, _encode(inner, _below(path, k), tensors)) for k, inner in value.items()]
        if all(isinstance(k, str) and not k.startswith(_MARK) for k, _ in pairs):
            return dict(pairs)
        return {"$items": [[_encode(k, "", {}), inner] for k, inner in pairs]}
    why = f"a {type(value).__name__} cannot be kept in a checkpoint"
    fix = "hold tensors, numbers, strings, booleans, None, and lists, tuples and dicts of them"
    raise UserError("state", path or "<root>", why, fix)


def _decode(tree: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(tree, list):
        return [_decode(inner, tensors) for inner in tree]
    if not isinstance(tree, dict):
        return tree
    match tree:
        case {"$tensor": str(name)}:
            return tensors[name]
        case {"$float": str(text)}:
            return float(text)
        case {"$tuple": list(items)}:
            return tuple(_decode(inner, tensors) for inner in items)
        case {"$items": list(pairs)}:
            return {_decode(k, tensors): _decode(inner, tensors) for k, inner in pairs}
    return {name: _decode(inner, tensors) for name, inner in tree.items()}


def _below(path: str, key: object) -> str:
    return f"{path}/{key}" if path else str(key)


# NaN check: the tensors of a state with invalid numbers, found on their own device.


def not_finite(parts: Mapping[str, Any]) -> list[str]:
    """Names of the tensors that hold NaN or infinity; one answer a device goes to the host.

    Example:
        >>> not_finite({"actor": {"w": torch.tensor([1.0, float("nan")]), "v": torch.ones(2)}})
        ['actor/w']
    """
    ends: dict[torch.device, dict[str, Tensor]] = {}
    for name, tensor in _walk_tensors(parts, ""):
        if tensor.is_floating_point() and tensor.numel():
            # Both ends are NaN when any element is, and finite when all are.
            both = torch.stack(torch.aminmax(tensor)).float()
            ends.setdefault(tensor.device, {})[name] = both
    broken: list[str] = []
    for found in ends.values():
        sound = torch.isfinite(torch.stack(list(found.values()))).all(dim=1).tolist()
        broken += [name for name, is_sound in zip(found, sound, strict=True) if not is_sound]
    return broken


def _walk_tensors(state: Any, path: str) -> Iterator[tuple[str, Tensor]]:
    """Every tensor; of a sharded one what is here."""
    if isinstance(state, Tensor):
        here: Any = state.detach()
        # A DTensor of torch, whose class is slow to import.
        yield path, here.to_local() if "to_local" in dir(type(here)) else here
    elif isinstance(state, Mapping):
        for name, inner in state.items():
            yield from _walk_tensors(inner, f"{path}/{name}" if path else str(name))
    elif isinstance(state, list | tuple):
        for index, inner in enumerate(state):
            yield from _walk_tensors(inner, f"{path}/{index}")
