"""8-bit AdamW and Muon: update rules against float64, exact state, and planned bytes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from luyen.base.errors import UserError
from luyen.checkpoint.tensors import load_state, save_state
from luyen.config.model_folder.config_json import shape_from
from luyen.config.optimizer_memory import adapter_tensors, moment_bytes, whole_tensors
from luyen.config.schema.actor_rollout_ref import OptimConfig
from luyen.config.schema.model import ModelConfig
from luyen.engine.optim import MasterOptimizer, build_optimizer
from luyen.models.lora import add_adapter
from luyen.models.weights import tensor_digests
from luyen.runtime.worker import split_learned_state
from tests.tiny_models import tiny_net

NAMES = ("adamw_8bit", "muon")
RATE = 0.02


def optim(name: str) -> OptimConfig:
    return OptimConfig(name=name, lr=RATE, betas=(0.8, 0.95), weight_decay=0.1, clip_grad=1e9)


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((96, 64), (40, 128), (8,))
    return [nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in shapes]


def gradients(step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return [torch.randn(p.shape, generator=generator) for p in parameters()]


def made(own: list[nn.Parameter], name: str) -> MasterOptimizer:
    return MasterOptimizer(own, optim(name), hidden=own[:2])


def advance(own: list[nn.Parameter], optimizer: MasterOptimizer, step: int) -> None:
    for p, gradient in zip(own, gradients(step), strict=True):
        (p * gradient.to(p.dtype)).sum().backward()
    assert optimizer.step(RATE).is_applied


def orthogonalised(matrix: Tensor) -> Tensor:
    """Five Newton-Schulz steps as they act on singular values, in float64."""
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    values = values / matrix.norm()
    for _ in range(5):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    return left @ torch.diag(values) @ right


def test_muon_is_its_update_rule_in_float64():
    own = parameters()
    optimizer = made(own, "muon")
    expected = [p.detach().double() for p in own[:2]]
    buffers = [torch.zeros_like(p) for p in expected]
    for step in range(3):
        advance(own, optimizer, step)
        for index, (gradient, buffer) in enumerate(zip(gradients(step), buffers, strict=False)):
            buffer.mul_(0.95).add_(0.05 * gradient.double())
            direction = orthogonalised(0.05 * gradient.double() + 0.95 * buffer)
            scale = 0.2 * max(expected[index].shape) ** 0.5
            expected[index] = expected[index] * (1 - RATE * 0.1) - RATE * scale * direction
    for p, wanted in zip(own, expected, strict=False):
        moved = RATE * 0.2 * max(p.shape) ** 0.5 * 3
        # The iteration itself runs in bf16.
        assert (p.detach() - wanted).abs().max() < 0.02 * moved


def test_an_update_of_muon_is_as_large_as_one_of_adamw():
    own = parameters()
    before = [p.detach().clone() for p in own]
    quiet = OptimConfig(name="muon", lr=RATE, weight_decay=0.0, clip_grad=1e9)
    advance(own, MasterOptimizer(own, quiet, hidden=own[:2]), 0)
    for p, old in zip(own[:2], before, strict=False):
        size = (p.detach() - old).square().mean().sqrt() / RATE
        assert 0.1 < float(size) < 0.4  # AdamW's settles between 0.2 and 0.4
    assert ((own[2].detach() - before[2]).abs() / RATE).allclose(torch.ones(8), atol=1e-4)


def test_8_bit_adamw_stays_close_to_adamw_and_keeps_bytes():
    own, plain = parameters(), parameters()
    optimizer, reference = made(own, "adamw_8bit"), made(plain, "adamw")
    for step in range(5):
        advance(own, optimizer, step)
        advance(plain, reference, step)
    for p, wanted in zip(own[:2], plain, strict=False):
        assert not torch.equal(p, wanted)
        assert (p - wanted).abs().mean() < 0.1 * 5 * RATE
    assert torch.equal(own[2], plain[2]), "small tensors have fp32 moments"
    state = optimizer.optimizers["adamw_8bit"].state[own[0]]
    assert state["state1"].dtype == state["state2"].dtype == torch.uint8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", NAMES)
def test_a_checkpoint_restores_every_bit(name: str, dtype: torch.dtype, tmp_path: Path):
    own = parameters(dtype)
    optimizer = made(own, name)
    for step in range(3):
        advance(own, optimizer, step)
    save_state(tmp_path, "optimizer", optimizer.state_dict())
    again = [nn.Parameter(p.detach().clone()) for p in own]
    restored = made(again, name)
    restored.load_state_dict(load_state(tmp_path, "optimizer"))
    assert digests(restored) == digests(optimizer)
    for step in range(3, 6):
        advance(own, optimizer, step)
        advance(again, restored, step)
    assert all(torch.equal(a, b) for a, b in zip(own, again, strict=True))
    assert digests(restored) == digests(optimizer)


def digests(optimizer: MasterOptimizer) -> dict[str, str]:
    moments, weights = split_learned_state({"actor_optimizer": optimizer.state_dict()})
    assert moments
    return tensor_digests({**moments, **weights})


@pytest.mark.parametrize("name", NAMES)
def test_digests_see_the_moments_of_every_optimizer(name: str):
    own = parameters()
    optimizer = made(own, name)
    advance(own, optimizer, 0)
    first = digests(optimizer)
    assert len(first) == {"adamw_8bit": 5, "muon": 3}[name]
    advance(own, optimizer, 1)
    second = digests(optimizer)
    assert all(first[key] != second[key] for key in first)


def test_the_state_of_another_optimizer_is_refused():
    own = parameters()
    optimizer = made(own, "adamw")
    with pytest.raises(UserError, match="made with another optimizer"):
        made(own, "muon").load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize("name", NAMES)
def test_adamw_does_not_take_the_moments_of_a_few_tensors_for_those_of_all(name: str):
    own = parameters()
    optimizer = made(own, name)
    advance(own, optimizer, 0)
    assert "adamw" in optimizer.optimizers, "it has the tensors that the other one leaves"
    with pytest.raises(UserError, match=f"the state of adamw and {name}: .* another optimizer"):
        made(parameters(), "adamw").load_state_dict(optimizer.state_dict())


def test_muon_gets_the_matrices_of_decoder_layers():
    net = tiny_net()
    optimizer = build_optimizer(net, optim("muon"))
    matrices = {id(p) for p in optimizer.optimizers["muon"].param_groups[0]["params"]}
    names = {n for n, p in net.named_parameters() if id(p) in matrices}
    assert len(names) == 2 * 7
    assert all(".layers." in n and n.endswith("_proj.weight") for n in names)


@pytest.mark.parametrize("rank", [0, 4])
@pytest.mark.parametrize("name", ["adamw", *NAMES])
def test_planned_bytes_are_those_of_the_moments(name: str, rank: int):
    net = tiny_net()
    raw: dict[str, Any] = net.config.to_dict()
    shape = shape_from(raw)
    assert shape is not None
    if rank:
        add_adapter(net, ModelConfig(lora_rank=rank))
    optimizer = build_optimizer(net, optim(name))
    for p in net.parameters():
        p.grad = torch.randn_like(p) if p.requires_grad else None
    optimizer.step(RATE)
    states = [s for one in optimizer.optimizers.values() for s in one.state.values()]
    kept = {k: v for s in states for k, v in s.items() if isinstance(v, Tensor)}
    assert kept
    real = sum(
        value.numel() * value.element_size()
        for state in states
        for key, value in state.items()
        if isinstance(value, Tensor) and value.dim() and not key.startswith("qmap")
    )
    tensors = [*(adapter_tensors(shape, rank) if rank else whole_tensors(shape))]
    assert moment_bytes(optim(name), tensors) == real
    total = shape.lora_parameters(rank) if rank else shape.parameters()
    assert sum(one.total for one in tensors) == total
