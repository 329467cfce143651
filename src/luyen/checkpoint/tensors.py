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

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from luyen.base.errors import UserError
from luyen.base.files import read_json

_ALIASES = "luyen.aliases"
_MARK = "$"


def save_tensors(file: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors by name. Tensors that are one (tied weights) are stored once."""
    stored: dict[str, Tensor] = {}
    first: dict[tuple[Any, ...], str] = {}
    aliases: dict[str, str] = {}
    homes: set[int] = set()
    for name, tensor in tensors.items():
        same = _identity(tensor)
        if same is not None and first.setdefault(same, name) != name:
            aliases[name] = first[same]
            continue
        # A view into a storage becomes a tensor of its own: its neighbours are not its state.
        whole = tensor.detach().cpu().contiguous()
        home = whole.untyped_storage().data_ptr()
        stored[name] = whole.clone() if _is_view(whole) or home in homes else whole
        homes.add(home)
    try:
        file.touch()
        mode = file.stat().st_mode  # safetensors makes a file for its owner alone
        save_file(stored, file, metadata={_ALIASES: json.dumps(aliases)})
        file.chmod(mode)
    except (OSError, SafetensorError) as error:
        why, fix = f"it could not be written: {error}", "make room or mend the permissions"
        raise UserError("checkpoint file", str(file), why, fix) from error


def load_tensors(file: Path) -> dict[str, Tensor]:
    """Tensors by name, on the CPU; names that were one tensor are one again.

    They lie in memory of their own: what happens to the file later does not reach them.
    """
    with safe_open(file, framework="pt", device="cpu") as opened:
        names = list(opened.keys())  # no dict
        found = {name: opened.get_tensor(name).clone() for name in names}
        aliases: dict[str, str] = json.loads((opened.metadata() or {}).get(_ALIASES, "{}"))
    return found | {name: found[first] for name, first in aliases.items()}


def _identity(tensor: Tensor) -> tuple[Any, ...] | None:
    """What two names share when they hold the same memory; None where there is none to share."""
    if tensor.numel() == 0:
        return None
    place = (str(tensor.device), tensor.data_ptr(), tensor.dtype)
    return (*place, tuple(tensor.shape), tensor.stride())


def _is_view(tensor: Tensor) -> bool:
    """Whether its storage holds more than it."""
    return tensor.untyped_storage().nbytes() != tensor.numel() * tensor.element_size()


def save_state(folder: Path, name: str, state: Any) -> None:
    """Write a state as `<name>.json`, with its tensors in `<name>.safetensors` if it has any."""
    tensors: dict[str, Tensor] = {}
    tree = _encode(state, "", tensors)
    text = json.dumps({"state": tree}, ensure_ascii=False, allow_nan=False)
    (folder / f"{name}.json").write_text(text + "\n")
    if tensors:
        save_tensors(folder / f"{name}.safetensors", tensors)


def load_state(folder: Path, name: str) -> Any:
    """What `save_state` wrote: the same types, the same bits; tensors on the CPU."""
    file = folder / f"{name}.safetensors"
    tensors = load_tensors(file) if file.is_file() else {}
    return _decode(read_json(folder / f"{name}.json")["state"], tensors)


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
