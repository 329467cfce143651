"""An optimizer in host memory: the numbers of AdamW beside the weights, bit for bit."""

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from luyen.config.optimizer_memory import OFFLOAD_PIECE, OFFLOAD_SLOTS, offload_bytes
from luyen.config.schema.actor_rollout_ref import OptimConfig
from luyen.engine import host_optimizer
from luyen.engine.optim import MasterOptimizer
from tests.tiny_models import DEVICE

OPTIM = OptimConfig(lr=0.02, betas=(0.8, 0.95), weight_decay=0.1, clip_grad=0.7)
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """A weight of 96 x 64 takes 62 pieces, and the last one is shorter."""
    monkeypatch.setattr(host_optimizer, "OFFLOAD_PIECE", 100)


def weights(dtype: torch.dtype) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((96, 64), (40, 128), (8,))
    drawn = [torch.randn(s, generator=generator) for s in shapes]
    return [nn.Parameter(one.to(DEVICE, dtype)) for one in drawn]


def advance(own: Sequence[nn.Parameter], optimizer: MasterOptimizer, step: int) -> float:
    """An update from two micro-batches; the last weight has no gradient in the first step."""
    for part in range(2):
        generator = torch.Generator().manual_seed(10 * step + part)
        for index, p in enumerate(own):
            gradient = torch.randn(p.shape, generator=generator).to(p.device, p.dtype)
            if step > 0 or index < 2:
                (p * gradient).sum().backward()
    return optimizer.step(0.02 / (1 + step)).grad_norm


def flat(state: Any) -> list[Tensor]:
    """All tensors of a state, in order."""
    if isinstance(state, torch.Tensor):
        return [state]
    parts = state.values() if isinstance(state, dict) else state
    return [t for part in parts if isinstance(part, torch.Tensor | dict | list) for t in flat(part)]


def demand_same(a: Sequence[Tensor], b: Sequence[Tensor]) -> None:
    assert len(a) == len(b)
    for mine, theirs in zip(a, b, strict=True):
        assert torch.equal(mine.cpu(), theirs.cpu())


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_number_is_that_of_an_optimizer_beside_the_weights(dtype: torch.dtype):
    own, other = weights(dtype), weights(dtype)
    moved = MasterOptimizer(own, OPTIM, offload=True)
    near = MasterOptimizer(other, OPTIM)
    for step in range(5):
        assert advance(own, moved, step) == advance(other, near, step)
        demand_same(own, other)
        demand_same(flat(moved.state_dict()), flat(near.state_dict()))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offloads", [(True, False), (False, True), (True, True)])
def test_either_continues_a_checkpoint_of_the_other(
    dtype: torch.dtype, offloads: tuple[bool, bool]
):
    before, after = offloads
    own = weights(dtype)
    first = MasterOptimizer(own, OPTIM, offload=before)
    for step in range(3):
        advance(own, first, step)
    again = [nn.Parameter(p.detach().clone()) for p in own]
    second = MasterOptimizer(again, OPTIM, offload=after)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for step in range(3, 6):
        assert advance(own, first, step) == advance(again, second, step)
        demand_same(own, again)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gradient_that_is_not_finite_changes_nothing(dtype: torch.dtype):
    own = weights(dtype)
    optimizer = MasterOptimizer(own, OPTIM, offload=True)
    advance(own, optimizer, 0)
    kept, state = [p.detach().clone() for p in own], copy.deepcopy(flat(optimizer.state_dict()))
    (own[0] * float("nan")).sum().backward()
    assert not optimizer.step(0.02).is_applied
    demand_same(own, kept)
    demand_same(flat(optimizer.state_dict()), state)


def test_masters_and_moments_are_in_host_memory():
    own = weights(torch.bfloat16)
    optimizer = MasterOptimizer(own, OPTIM, offload=True)
    advance(own, optimizer, 1)
    state = flat(optimizer.state_dict())
    assert len(state) == 3 * 4  # a step, two moments and a master for each weight
    assert {t.device.type for t in state} == {"cpu"}
    assert {p.device.type for p in own} == {torch.device(DEVICE).type}


def test_a_step_needs_as_much_of_the_device_as_is_planned(monkeypatch: pytest.MonkeyPatch):
    if DEVICE != "cuda":
        pytest.skip("only a GPU counts its memory")
    own = [nn.Parameter(torch.ones(OFFLOAD_PIECE * 5, device=DEVICE, dtype=torch.bfloat16))]
    monkeypatch.setattr(host_optimizer, "OFFLOAD_PIECE", OFFLOAD_PIECE)
    optimizer = MasterOptimizer(own, OPTIM, offload=True)
    (own[0] * 2).sum().backward()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    optimizer.step(0.02)
    used = torch.cuda.max_memory_allocated() - before
    planned = offload_bytes(own[0].numel())
    assert planned == 3 * 4 * OFFLOAD_SLOTS * OFFLOAD_PIECE
    assert 0.95 * planned < used < 1.15 * planned
