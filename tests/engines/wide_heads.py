"""The built-in model of tools with heads of 32 dimensions, which vLLM's CPU kernels need.

Zeros are put between the dimensions of every head, at places where rotary angles stay the same:
angle i of 16 dimensions is angle 2i of 32. Queries grow by √2, since attention divides by the root
of the dimension. The function of the model is the same, and gradients leave the zeros alone.
"""

import json
import shutil
from math import sqrt
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from luyen.models.load import model_directory


def widen(folder: Path, source: str = "builtin://tools") -> Path:
    """Write the model into a folder."""
    given = Path(model_directory(source))
    config = json.loads((given / "config.json").read_text())
    old = config["head_dim"]
    for file in given.iterdir():
        if file.is_file() and file.suffix != ".safetensors":
            folder.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, folder / file.name)
    (folder / "config.json").write_text(json.dumps({**config, "head_dim": 2 * old}))
    tensors = load_file(next(given.glob("*.safetensors")))
    wide = {name: _wide(name, tensor, old) for name, tensor in tensors.items()}
    save_file(wide, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _wide(name: str, tensor: Tensor, old: int) -> Tensor:
    if name.endswith("o_proj.weight"):
        return _spread(tensor.T.contiguous(), old).T.contiguous()
    if name.endswith(("k_proj.weight", "v_proj.weight")):
        return _spread(tensor, old)
    return sqrt(2) * _spread(tensor, old) if name.endswith("q_proj.weight") else tensor


def _spread(rows: Tensor, old: int) -> Tensor:
    """Rows of each head, each followed by a row of zeros."""
    heads = rows.view(-1, old, 1, rows.shape[1])
    return torch.cat([heads, torch.zeros_like(heads)], 2).reshape(-1, rows.shape[1])
