"""An index that somebody wrote: what it leaves out, or has elsewhere, is no weight."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from luyen.base.errors import UserError
from luyen.checkpoint.shards import INDEX, read_whole
from luyen.checkpoint.tensors import load_sharded, save_sharded

FILE = "rank_00000.safetensors"
ODD: dict[str, Callable[[dict[str, Any]], object]] = {
    "a tensor without parts": lambda e: e.update(boxes=[]),
    "half a tensor": lambda e: e.update(boxes=[[[0, 0], [1, 2], FILE, "w"]]),
    "another folder": lambda e: e.update(boxes=[[[0, 0], [3, 2], f"../other/{FILE}", "w"]]),
    "the root": lambda e: e.update(boxes=[[[0, 0], [3, 2], "/etc/passwd", "w"]]),
    "before its beginning": lambda e: e.update(boxes=[[[-1, 0], [3, 2], FILE, "w"]]),
    "another name": lambda e: e.update(boxes=[[[0, 0], [3, 2], FILE, "v"]]),
    "another shape": lambda e: e.update(shape=[2, 3], boxes=[[[0, 0], [2, 3], FILE, "w"]]),
    "far too large": lambda e: e.update(shape=[10**9, 10**9]),
    "no number": lambda e: e.update(shape=["3", 2]),
    "no boxes": lambda e: e.update(boxes="abc"),
    "no type": lambda e: e.update(dtype="nn"),
    "an unknown type": lambda e: e.update(dtype="float33"),
    "nothing": lambda e: e.clear(),
}


@pytest.mark.parametrize("name", ODD)
def test_what_describes_no_tensor_is_refused(tmp_path: Path, name: str):
    for folder in ("here", "other"):
        (tmp_path / folder).mkdir()
        save_sharded(tmp_path / folder, {"w": torch.ones(3, 2)})
    file = tmp_path / "here" / INDEX
    index = json.loads(file.read_text())
    ODD[name](index["tensors"]["w"])
    file.write_text(json.dumps(index))
    with pytest.raises(UserError, match="it describes no tensors"):
        read_whole(tmp_path / "here")
    with pytest.raises(UserError):
        load_sharded(tmp_path / "here", {"w": torch.zeros(3, 2)})
