"""One rank of a world that saves an FSDP2 model with AdamW, and loads those of other worlds.

Several worlds save at the same time, and every one of them loads what all have saved.
"""

import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

from luyen.checkpoint.tensors import load_state, save_sharded, save_state

WAIT_S = 120


class Tied(nn.Module):
    """Rows that no world size divides, a bf16 part, and a head that is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.inner = nn.Linear(3, 3).bfloat16()
        self.norm = nn.LayerNorm(3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.inner(self.embed(tokens).bfloat16()).float()
        return self.head(self.norm(hidden))


def trained(seed: int, steps: int, world: int | None) -> dict[str, Any]:
    """The state of a model and its AdamW after some steps; sharded unless `world` is None."""
    torch.manual_seed(seed)
    model = Tied()
    if world is not None:
        mesh = init_device_mesh("cpu", (world,))
        fully_shard(model.inner, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(steps):
        model(torch.tensor([0, 1, 4])).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    weights = dict(model.named_parameters(remove_duplicate=False))
    extra = {
        "count": torch.tensor(2**40 + seed),
        "empty": torch.empty(0, 3),
        "odd": torch.tensor([float("nan"), -0.0, float("inf")]),
    }
    return {"weights": weights, "optimizer": optimizer.state_dict(), "extra": extra, "seed": seed}


def whole(state: Any) -> Any:
    """The state with every shard gathered."""
    if isinstance(state, dict):
        return {name: whole(inner) for name, inner in state.items()}
    if isinstance(state, list):
        return [whole(inner) for inner in state]
    if isinstance(state, DTensor):
        return state.full_tensor().detach().clone()
    return state


def flat(state: Any, path: str = "") -> dict[str, Any]:
    """Leaves by path, tensors as bytes: equal states give equal dicts."""
    if isinstance(state, dict | list | tuple):
        pairs = state.items() if isinstance(state, dict) else enumerate(state)
        return {k: v for name, inner in pairs for k, v in flat(inner, f"{path}/{name}").items()}
    if isinstance(state, Tensor):
        data = state.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return {path: (str(state.dtype), tuple(state.shape), data)}
    return {path: state}


def save(folder: Path, state: Any, *, is_first: bool) -> None:
    """A checkpoint, and beside it the whole tensors as plain torch writes them."""
    if is_first:
        folder.mkdir()
    if dist.is_initialized():
        dist.barrier()
    save_state(folder, "state", state)
    gathered = whole(state)
    if is_first:
        torch.save(gathered, folder / "expected.pt")
        (folder / "done").touch()


def expected(folder: Path) -> dict[str, Any]:
    """The leaves that a checkpoint must give."""
    return flat(torch.load(folder / "expected.pt", weights_only=True))


def fails_together(root: Path, world: int, rank: int) -> None:
    """A disk that refuses one rank is an OSError on every rank."""
    if rank == world - 1:
        (root / f"refused_{world}" / f"rank_{rank:05d}.safetensors").mkdir(parents=True)
    dist.barrier()
    mesh = init_device_mesh("cpu", (world,))
    shards = DTensor.from_local(torch.ones(2), mesh, [Shard(0)])
    try:
        save_sharded(root / f"refused_{world}", {"a": shards})
    except OSError:
        return
    raise AssertionError("nobody was told")


def main(root: Path, world: int, rank: int, worlds: list[int]) -> None:
    """Save as one world, then load what every world saved."""
    torch.set_num_threads(1)
    meeting = f"file://{root}/meeting_{world}"
    dist.init_process_group("gloo", init_method=meeting, world_size=world, rank=rank)
    save(root / f"world_{world}", trained(world, 2, world), is_first=rank == 0)
    deadline = time.monotonic() + WAIT_S
    for other in worlds:
        while not (root / f"world_{other}" / "done").exists():
            assert time.monotonic() < deadline, f"world {other} saved nothing"
            time.sleep(0.05)
        folder = root / f"world_{other}"
        loaded = load_state(folder, "state", into=trained(9, 1, world))
        assert loaded["seed"] == other
        found = flat(whole(loaded))
        assert found == expected(folder), f"{other} ranks saved, {world} ranks load otherwise"
    fails_together(root, world, rank)
    dist.destroy_process_group()
