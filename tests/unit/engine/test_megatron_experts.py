"""The routed layer of the engine `megatron`, against that of transformers, on ranks that divide it.

It needs no megatron-core.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from luyen.engine.fsdp import join_ranks, leave_ranks
from luyen.engine.megatron.experts import RoutedExperts
from luyen.engine.tensor_parallel import TensorRanks
from luyen.models.experts import RoutingLog
from tests.tiny_models import tiny_policy
from tests.worlds import run_together

TOKENS = (5, 0, 9)
"""Of each rank; one of none has nothing to send."""
WORLD = len(TOKENS)
SHARED = 4
NAMES = {"gate_up": "gate_up_proj", "down": "down_proj"}


def layer_of(kind: str) -> Any:
    policy = tiny_policy(kind, hidden_size=32, initializer_range=0.2, **experts_of(kind))
    return policy.model.base_model.layers[1].mlp


def experts_of(kind: str) -> dict[str, int]:
    if kind == "mixtral":
        return {"num_local_experts": 6}
    return {"num_experts": 6, "shared_expert_intermediate_size": 2 * SHARED * WORLD}


def inputs(rank: int, *, is_same: bool) -> tuple[Tensor, Tensor]:
    """Hidden states of a rank, and the gradient of what a layer makes of them."""
    generator = torch.Generator().manual_seed(0 if is_same else rank)
    count = TOKENS[0] if is_same else TOKENS[rank]
    x, grad = (torch.randn(count, 32, generator=generator) for _ in range(2))
    return x.requires_grad_(), grad


def divided(block: Any, rank: int, *, is_same: bool) -> tuple[RoutedExperts, slice]:
    """This rank's part of a layer, of all ranks that have the same tokens or other ones."""
    alone = [dist.new_group([other]) for other in range(WORLD)][rank]
    world: Any = dist.group.WORLD
    group, spread = (world, alone) if is_same else (alone, world)
    size = WORLD if is_same else 1
    ranks = TensorRanks(group=group, rank=rank if is_same else 0, size=size, rows=1)
    made = RoutedExperts(block, 0, ranks, spread)
    own = slice(rank * 6 // WORLD, (rank + 1) * 6 // WORLD)
    with torch.no_grad():
        made.router.copy_(block.gate.weight)
        for mine, theirs in NAMES.items():
            made.get_parameter(mine).copy_(block.experts.get_parameter(theirs)[own])
        if made.has_shared:
            shared = block.shared_expert
            part, size = (rank, WORLD) if is_same else (0, 1)
            rows = [p.weight.chunk(size)[part] for p in (shared.gate_proj, shared.up_proj)]
            made.shared_router.copy_(block.shared_expert_gate.weight)
            made.shared_gate_up.copy_(torch.cat(rows))
            made.shared_down.copy_(shared.down_proj.weight.chunk(size, 1)[part])
    return made, own


def demand_the_same(folder: Path, rank: int, kind: str, is_same: bool) -> None:
    join_ranks(rank, WORLD, f"file://{folder}/meeting", timeout_s=60)
    block = layer_of(kind)
    made, own = divided(block, rank, is_same=is_same)
    (x, grad), (y, _) = inputs(rank, is_same=is_same), inputs(rank, is_same=is_same)
    wanted = block(x[None])[0] if len(x) else x * 1.0
    wanted.backward(grad)
    made.log = RoutingLog()
    found, bias = made(y[:, None])
    found.backward(grad[:, None])
    assert bias is None
    torch.testing.assert_close(found[:, 0], wanted, rtol=0, atol=1e-5)
    torch.testing.assert_close(y.grad, x.grad, rtol=0, atol=1e-5)
    assert made.log.counts().sum() == len(y) * block.gate.top_k
    for mine, theirs in NAMES.items():
        parameter = block.experts.get_parameter(theirs)
        total = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        if not is_same:
            dist.all_reduce(total)
        assert total[own].abs().max() > 1e-3
        torch.testing.assert_close(made.get_parameter(mine).grad, total[own], rtol=0, atol=1e-5)
    if len(x):
        torch.testing.assert_close(made.router.grad, block.gate.weight.grad, rtol=0, atol=1e-5)
    if made.has_shared and len(x):
        wanted = block.shared_expert_gate.weight.grad
        torch.testing.assert_close(made.shared_router.grad, wanted, rtol=0, atol=1e-5)
        wanted = block.shared_expert.down_proj.weight.grad
        part = wanted.chunk(WORLD, 1)[rank] if is_same else wanted
        torch.testing.assert_close(made.shared_down.grad, part, rtol=0, atol=1e-5)
    leave_ranks()


@pytest.mark.parametrize("kind", ["mixtral", "qwen2_moe", "qwen3_moe"])
@pytest.mark.parametrize("is_same", [False, True])
def test_ranks_together_compute_what_the_whole_layer_does(tmp_path: Path, kind: str, is_same: bool):
    jobs = [(tmp_path, rank, kind, is_same) for rank in range(WORLD)]
    run_together(demand_the_same, jobs, tmp_path, limit_s=120)
