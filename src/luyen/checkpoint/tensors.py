"""State as files: tensors in safetensors, everything else in JSON, and back to the last bit.

A state is any nesting of dicts, lists and tuples over tensors, numbers, strings, booleans and
None: what `state_dict()` gives for a model, an optimizer, a scheduler or a controller. No pickle is
read or written, so loading a checkpoint runs no code.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor

from luyen.base.errors import UserError
from luyen.base.files import read_json
from luyen.checkpoint.sharded import load_sharded, save_sharded
from luyen.checkpoint.shards import INDEX, read_whole
from luyen.checkpoint.writes import AtOnce, Writes

_ALIASES = "luyen.aliases"
_MARK = "$"
_AT_ONCE = AtOnce()


def save_state(folder: Path, name: str, state: Any, *, writes: Writes = _AT_ONCE) -> None:
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
