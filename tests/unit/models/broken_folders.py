"""Model folders that are broken in one place each, and the words that an error must have."""

import json
import os
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Break = Callable[[Path], None]
WEIGHTS = "model.safetensors"
NORM = "model.norm.weight"
UP = "model.layers.1.mlp.up_proj.weight"


class Bomb:
    """What an attacker would pickle."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, ("/tmp/luyen-was-executed",))


def text(name: str, content: str) -> Break:
    return lambda folder: (folder / name).write_text(content) and None


def edited(name: str, **changes: Any) -> Break:
    """Values of a JSON file replaced; `...` removes one."""

    def apply(folder: Path) -> None:
        page = json.loads((folder / name).read_text()) | changes
        page = {key: value for key, value in page.items() if value is not ...}
        (folder / name).write_text(json.dumps(page))

    return apply


def config(**changes: Any) -> Break:
    return edited("config.json", **changes)


def template(source: str) -> Break:
    return edited("tokenizer_config.json", chat_template=source)


def tensors(change: Callable[[dict[str, torch.Tensor]], None], name: str = WEIGHTS) -> Break:
    """The weights loaded, changed and saved again."""

    def apply(folder: Path) -> None:
        held = load_file(folder / name)
        change(held)
        save_file(held, folder / name, metadata={"format": "pt"})

    return apply


def put(name: str, make: Callable[[torch.Tensor], torch.Tensor]) -> Break:
    return tensors(lambda held: held.update({name: make(held[name])}))


def header(change: Callable[[dict[str, Any]], Any]) -> Break:
    """The header of the weights changed, and the numbers left as they are."""

    def apply(folder: Path) -> None:
        whole = (folder / WEIGHTS).read_bytes()
        (length,) = struct.unpack("<Q", whole[:8])
        page = json.loads(whole[8 : 8 + length])
        made = change(page)
        new = json.dumps(page if made is None else made).encode()
        (folder / WEIGHTS).write_bytes(struct.pack("<Q", len(new)) + new + whole[8 + length :])

    return apply


def binary(content: bytes) -> Break:
    return lambda folder: (folder / WEIGHTS).write_bytes(content) and None


def cut(folder: Path) -> None:
    file = folder / WEIGHTS
    os.truncate(file, file.stat().st_size // 2)


def padded(folder: Path) -> None:
    with (folder / WEIGHTS).open("ab") as file:
        file.write(b"more")


def replaced(name: str, make: Callable[[Path], Any]) -> Break:
    """Something else in the place of a file."""

    def apply(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        make(folder / name)

    return apply


def removed(*names: str) -> Break:
    def apply(folder: Path) -> None:
        for name in names:
            (folder / name).unlink()

    return apply


def linked(folder: Path) -> None:
    """The weights elsewhere, as in the cache of the hub."""
    (folder / WEIGHTS).rename(folder.parent / "blob")
    (folder / WEIGHTS).symlink_to(folder.parent / "blob")


def without(name: str) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(held: dict[str, torch.Tensor]) -> None:
        del held[name]

    return change


def sharded(listed: Any) -> Break:
    """An index instead of one file; the file is still there under another name."""

    def apply(folder: Path) -> None:
        names = [*load_file(folder / WEIGHTS)]
        (folder / WEIGHTS).rename(folder / "a.safetensors")
        index = listed(names) if callable(listed) else listed
        (folder / f"{WEIGHTS}.index.json").write_text(json.dumps(index))

    return apply


def mapped(file: Any) -> Break:
    return sharded(lambda names: {"weight_map": dict.fromkeys(names, file)})


def unknown_tensor(names: list[str]) -> dict[str, Any]:
    return {"weight_map": dict.fromkeys([*names, "model.more"], "a.safetensors")}


def twice(folder: Path) -> None:
    held = load_file(folder / WEIGHTS)
    save_file({NORM: held[NORM]}, folder / "b.safetensors")
    listed = {**dict.fromkeys(held, "a.safetensors"), NORM: "b.safetensors"}
    sharded({"weight_map": listed})(folder)


def pickled(content: Callable[[dict[str, torch.Tensor]], Any]) -> Break:
    """A pickle in the place of safetensors."""

    def apply(folder: Path) -> None:
        held = load_file(folder / WEIGHTS)
        (folder / WEIGHTS).unlink()
        made = content(held)
        file = folder / "pytorch_model.bin"
        if isinstance(made, bytes):
            file.write_bytes(made)
        else:
            torch.save(made, file)

    return apply


def untied(folder: Path) -> None:
    """A head of other numbers under a config that says tied."""
    embedding = "model.embed_tokens.weight"
    tensors(lambda held: held.update({"lm_head.weight": held[embedding] + 1}))(folder)


def layer(number: int) -> Break:
    """Another layer at the end, a copy of the first."""

    def add(held: dict[str, torch.Tensor]) -> None:
        first = {n: t for n, t in held.items() if n.startswith("model.layers.0.")}
        for name, tensor in first.items():
            held[name.replace("layers.0.", f"layers.{number}.")] = tensor.clone()

    return tensors(add)


def filled(value: float, count: int) -> Callable[[torch.Tensor], torch.Tensor]:
    def make(tensor: torch.Tensor) -> torch.Tensor:
        made = tensor.clone()
        made.view(-1)[:count] = value
        return made

    return make


def short_offsets(page: dict[str, Any]) -> None:
    page[NORM]["data_offsets"][1] -= 4


def pickle_bomb(_: dict[str, torch.Tensor]) -> bytes:
    return pickle.dumps(Bomb())
