"""State goes to files and comes back to the last bit, with its types."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from luyen.base.errors import UserError
from luyen.checkpoint.shards import read_whole
from luyen.checkpoint.store import CheckpointStore
from luyen.checkpoint.tensors import load_sharded, load_state, save_sharded, save_state


def bits(tensor: Tensor) -> tuple[torch.dtype, tuple[int, ...], bytes]:
    flat = tensor.detach().contiguous().reshape(-1)
    return tensor.dtype, tuple(tensor.shape), flat.view(torch.uint8).numpy().tobytes()


DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_bit_of_a_tensor_comes_back(tmp_path: Path, dtype: torch.dtype):
    generator = torch.Generator().manual_seed(0)
    noise = torch.randint(0, 2, (64,), generator=generator, dtype=torch.uint8)
    raw = torch.randint(0, 256, (64,), generator=generator, dtype=torch.uint8)
    made = noise.bool() if dtype is torch.bool else raw.view(dtype)
    kept = {"flat": made, "square": made[: made.numel() // 4 * 4].reshape(4, -1), "one": made[0]}
    save_sharded(tmp_path, kept)
    read = read_whole(tmp_path)
    assert {name: bits(t) for name, t in read.items()} == {
        name: bits(t) for name, t in kept.items()
    }


def test_nan_zero_signs_and_empty_tensors_come_back(tmp_path: Path):
    odd = torch.tensor([math.nan, -0.0, math.inf, 1e-45])
    kept = {"odd": odd, "none": torch.empty(0, 3), "none too": torch.empty(0, 3)}
    save_sharded(tmp_path, kept)
    read = read_whole(tmp_path)
    assert bits(read["odd"]) == bits(odd)
    assert read["none"].shape == (0, 3)


def test_tied_tensors_are_stored_once_and_are_one_again(tmp_path: Path):
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(100, 64)
            self.head = nn.Linear(64, 100, bias=False)
            self.head.weight = self.embed.weight

    model = Tied()
    save_sharded(tmp_path, model.state_dict())
    assert (tmp_path / "rank_00000.safetensors").stat().st_size < 100 * 64 * 4 + 1000
    read = read_whole(tmp_path)
    assert read["head.weight"].data_ptr() == read["embed.weight"].data_ptr()
    fresh = Tied()
    fresh.load_state_dict(read)
    assert torch.equal(fresh.head.weight, model.embed.weight)


def test_views_of_one_storage_stay_apart_and_small(tmp_path: Path):
    base = torch.arange(10_000.0)
    kept = {
        "head": base[:4],
        "tail": base[-4:],
        "same length": base[:10_000].view(100, 100),
        "turned": base.view(100, 100).T,
        "whole": base,
    }
    save_sharded(tmp_path, kept)
    read = read_whole(tmp_path)
    assert {name: bits(t) for name, t in read.items()} == {
        name: bits(t) for name, t in kept.items()
    }
    assert read["head"].untyped_storage().nbytes() < 40_000
    read["whole"].zero_()
    assert read["turned"][1, 1] == 101


def test_equal_state_gives_equal_bytes(tmp_path: Path):
    for name in ("a", "b"):
        torch.manual_seed(1)
        save_state(tmp_path, name, nn.Linear(7, 5).state_dict())
    ends = (".json", "/index.json", "/rank_00000.safetensors")
    one, other = ([(tmp_path / f"{name}{end}").read_bytes() for end in ends] for name in "ab")
    assert one == other


def same(a: Any, b: Any) -> bool:
    """Whether two states agree in types and bits."""
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        return bits(a) == bits(b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return repr(a) == repr(b)


def test_numbers_names_and_nesting_keep_their_types(tmp_path: Path):
    state = {
        "step": 2**70,
        "none": None,
        "flags": [True, False, 1, 0],
        "pair": (1, (2.0, "x")),
        "floats": [0.1, -0.0, math.nan, math.inf, 1e-320],
        "by number": {0: {"exp_avg": torch.ones(2)}, "0": {"exp_avg": torch.zeros(2)}},
        "a/b": torch.tensor(1),
        "a": {"b": torch.tensor(2)},
        "$tensor": "not a mark",
        "empty": [{}, [], ()],
        "text": "chữ\u2028",
    }
    save_state(tmp_path, "loop", state)
    assert same(load_state(tmp_path, "loop"), state)


def test_a_state_without_tensors_is_one_json_file(tmp_path: Path):
    save_state(tmp_path, "loop", {"step": 3, "cursor": (1, 2)})
    assert [p.name for p in tmp_path.iterdir()] == ["loop.json"]
    assert load_state(tmp_path, "loop") == {"step": 3, "cursor": (1, 2)}


def test_a_lone_tensor_is_a_state(tmp_path: Path):
    save_state(tmp_path, "x", torch.tensor(3))
    assert load_state(tmp_path, "x") == torch.tensor(3)


def test_what_cannot_be_kept_is_refused_with_its_place(tmp_path: Path):
    with pytest.raises(UserError, match=r"state = 'controllers/1/odd'.*a set cannot be kept"):
        save_state(tmp_path, "loop", {"controllers": [0, {"odd": {1, 2}}]})


def test_a_file_that_cannot_be_written_is_an_error_of_the_disk(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match=r"gone/rank_00000\.safetensors"):
        save_sharded(tmp_path / "gone", {"a": torch.ones(1)})
    (tmp_path / "rank_00000.safetensors").mkdir()
    with pytest.raises(IsADirectoryError, match=r"rank_00000\.safetensors"):
        save_sharded(tmp_path, {"a": torch.ones(1)})


def test_tensors_are_filled_where_they_are_and_what_does_not_fit_is_refused(tmp_path: Path):
    state = {"layers": [torch.arange(6.0).view(2, 3), torch.tensor(7)], "step": 3}
    save_state(tmp_path, "a", state)
    into = {"layers": [torch.zeros(2, 3), torch.tensor(0)], "step": 0}
    loaded = load_state(tmp_path, "a", into=into)
    assert same(loaded, state)
    assert loaded["layers"][0] is into["layers"][0]
    for name, tensor, said in (
        ("other", torch.zeros(1), "holds no tensor `other`"),
        ("layers/0", torch.zeros(3, 2), r"float32 of \(2, 3\) there.*\(3, 2\) is wanted"),
        ("layers/0", torch.zeros(2, 3).bfloat16(), "bfloat16 of .* is wanted"),
    ):
        with pytest.raises(UserError, match=said):
            load_sharded(tmp_path / "a", {name: tensor})
        assert not tensor.any()


def test_the_one_file_of_an_earlier_layout_is_still_read(tmp_path: Path):
    state = {"weight": torch.arange(4.0), "tied": torch.arange(4.0), "rest": (1, 2.0)}
    tree = {
        "weight": {"$tensor": "weight"},
        "tied": {"$tensor": "tied"},
        "rest": {"$tuple": [1, 2.0]},
    }
    (tmp_path / "a.json").write_text(json.dumps({"state": tree}))
    aliases = {"luyen.aliases": '{"tied": "weight"}'}
    save_file({"weight": state["weight"]}, tmp_path / "a.safetensors", metadata=aliases)
    read = load_state(tmp_path, "a")
    assert same(read, state)
    assert read["tied"].data_ptr() == read["weight"].data_ptr()


def test_a_file_may_be_read_by_whoever_may_read_the_others(tmp_path: Path):
    save_state(tmp_path, "a", torch.ones(1))
    modes = {path.stat().st_mode for path in tmp_path.rglob("*") if path.is_file()}
    assert len(modes) == 1


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        x = torch.sin(torch.arange(12.0) + step).view(3, 4)
        model(x).pow(2).sum().backward()
        optimizer.step()


def test_training_goes_on_to_the_same_bits_after_a_checkpoint(tmp_path: Path):
    def fresh() -> tuple[nn.Module, torch.optim.Optimizer, Any]:
        torch.manual_seed(0)
        model = nn.Linear(4, 2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95))
        return model, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)

    model, optimizer, schedule = fresh()
    train(model, optimizer, range(5))
    schedule.step()

    def writer(folder: Path) -> None:
        save_state(folder, "model", model.state_dict())
        save_state(folder, "optimizer", optimizer.state_dict())
        save_state(folder, "loop", {"step": 5, "scheduler": schedule.state_dict()})

    CheckpointStore(tmp_path).save(5, writer)
    train(model, optimizer, range(5, 9))

    saved = CheckpointStore(tmp_path).load(5).path
    model_2, optimizer_2, schedule_2 = fresh()
    model_2.load_state_dict(load_state(saved, "model"))
    optimizer_2.load_state_dict(load_state(saved, "optimizer"))
    schedule_2.load_state_dict(load_state(saved, "loop")["scheduler"])
    train(model_2, optimizer_2, range(5, 9))
    assert same(dict(model.state_dict()), dict(model_2.state_dict()))
    assert same(optimizer.state_dict(), optimizer_2.state_dict())


def test_what_was_loaded_does_not_change_with_the_file(tmp_path: Path):
    file = tmp_path / "rank_00000.safetensors"
    save_sharded(tmp_path, {"weight": torch.arange(4096.0)})
    loaded = read_whole(tmp_path)["weight"]
    with file.open("r+b") as opened:  # the same inode, as an editor or a copy would write it
        size = file.stat().st_size
        opened.write(b"\xff" * size)
    assert torch.equal(loaded, torch.arange(4096.0))
