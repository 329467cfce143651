"""The optimizer against torch's own, and the learning rate by hand."""

import copy
import math

import pytest
import torch
from torch import nn

from luyen.config.schema.actor_rollout_ref import OptimConfig
from luyen.engine.optim import MasterOptimizer, learning_rate

OPTIM = OptimConfig(lr=0.01, betas=(0.8, 0.95), weight_decay=0.1, clip_grad=0.5)


def rates(total: int | None, steps: int, **options) -> list[float]:
    optim = OptimConfig(lr=1.0, **options)
    return [learning_rate(optim, step=s, total_steps=total) for s in range(steps)]


def test_warm_up_climbs_in_a_line_and_then_stays():
    assert rates(None, 6, lr_warmup_steps=4) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert rates(10, 4, lr_warmup_steps_ratio=0.2) == [0.5, 1.0, 1.0, 1.0]
    assert rates(10, 2, lr_warmup_steps=0, lr_warmup_steps_ratio=0.5) == [1.0, 1.0]


def test_cosine_ends_at_its_floor_and_stays_there():
    found = rates(5, 9, lr_scheduler_type="cosine", min_lr_ratio=0.1)
    expected = [0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * s / 4)) for s in range(5)]
    assert found == pytest.approx([*expected, 0.1, 0.1, 0.1, 0.1])
    assert found[2] == pytest.approx(0.55)


def test_cosine_starts_at_the_top_after_the_warm_up():
    found = rates(6, 6, lr_scheduler_type="cosine", lr_warmup_steps=1)
    half = [0.5 * (1 + math.cos(math.pi * s / 4)) for s in range(5)]
    assert found == pytest.approx([1.0, *half])


def test_linear_comes_down_in_a_line_to_its_floor():
    found = rates(5, 7, lr_scheduler_type="linear", min_lr_ratio=0.2)
    assert found == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2, 0.2, 0.2])
    assert rates(4, 4, lr_scheduler_type="linear", lr_warmup_steps=1) == [1.0, 1.0, 0.5, 0.0]


def test_wsd_is_constant_and_comes_down_in_the_last_tenth():
    found = rates(21, 25, lr_scheduler_type="wsd", min_lr_ratio=0.2)
    assert found[:19] == pytest.approx([1.0] * 19)
    assert found[19:] == pytest.approx([0.6, 0.2, 0.2, 0.2, 0.2, 0.2])


def test_a_warm_up_as_long_as_the_run_never_divides_by_zero():
    assert rates(3, 5, lr_scheduler_type="cosine", lr_warmup_steps=3)[:3] == pytest.approx(
        [1 / 3, 2 / 3, 1.0]
    )


def test_a_warm_up_longer_than_the_run_ends_with_it():
    assert rates(3, 3, lr_warmup_steps=10) == pytest.approx([1 / 3, 2 / 3, 1.0])
    assert rates(1, 1, lr_warmup_steps=10) == [1.0]


def parameters(dtype: torch.dtype) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((5, 3), (4,))
    return [nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in shapes]


def backward(own: list[nn.Parameter], seed: int, scale: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in own:
        (p * (scale * torch.randn(p.shape, generator=generator)).to(p.dtype)).sum().backward()


def test_it_is_torchs_adamw_with_clipping():
    own, theirs = parameters(torch.float32), parameters(torch.float32)
    optimizer = MasterOptimizer(own, OPTIM)
    plain = torch.optim.AdamW(theirs, lr=0.01, betas=(0.8, 0.95), weight_decay=0.1)
    for step in range(4):
        backward(own, step)
        backward(theirs, step)
        norm = nn.utils.clip_grad_norm_(theirs, 0.5)
        plain.param_groups[0]["lr"] = 0.01 * (step + 1)
        plain.step()
        plain.zero_grad()
        done = optimizer.step(0.01 * (step + 1))
        assert done.grad_norm == pytest.approx(float(norm))
        assert done.lr == 0.01 * (step + 1)
        assert all(torch.equal(a, b) for a, b in zip(own, theirs, strict=True))
        assert all(p.grad is None for p in own)


def test_gradients_of_bf16_weights_add_up_in_fp32():
    [weight] = [nn.Parameter(torch.ones(1, dtype=torch.bfloat16))]
    optimizer = MasterOptimizer([weight], OPTIM)
    # In bf16, 256 + 1 is 256: a thousand ones would never arrive.
    (weight * 256).sum().backward()
    for _ in range(1000):
        weight.sum().backward()
    assert weight.grad is None
    assert optimizer.masters[0].grad.tolist() == [1256.0]
    assert optimizer.masters[0].grad.dtype == torch.float32


def test_bf16_weights_follow_masters_that_do_not_round():
    half, full = parameters(torch.bfloat16), parameters(torch.bfloat16)
    full = [nn.Parameter(p.detach().float()) for p in full]
    ours, reference = MasterOptimizer(half, OPTIM), MasterOptimizer(full, OPTIM)
    for step in range(30):
        backward(half, step)
        generator = torch.Generator().manual_seed(step)
        for p in full:
            grad = torch.randn(p.shape, generator=generator).bfloat16().float()
            (p * grad).sum().backward()
        ours.step(1e-4)
        reference.step(1e-4)
    for master, p, expected in zip(ours.masters, half, full, strict=True):
        assert (master - expected).abs().max() < 1e-6
        assert torch.equal(p, master.bfloat16())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_is_never_applied(dtype: torch.dtype, bad: float):
    own, clean = parameters(dtype), parameters(dtype)
    optimizer, reference = MasterOptimizer(own, OPTIM), MasterOptimizer(clean, OPTIM)
    for step in range(3):
        backward(own, step)
        backward(clean, step)
        assert optimizer.step(0.01).is_applied
        reference.step(0.01)
        backward(own, 7, scale=bad)
        done = optimizer.step(0.01)
        assert not done.is_applied
        assert not math.isfinite(done.grad_norm)
    assert all(torch.equal(a, b) for a, b in zip(own, clean, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_restored_optimizer_goes_on_as_if_nothing_had_happened(dtype: torch.dtype):
    own = parameters(dtype)
    optimizer = MasterOptimizer(own, OPTIM)
    for step in range(3):
        backward(own, step)
        optimizer.step(0.01)
    again = [nn.Parameter(p.detach().clone()) for p in own]
    restored = MasterOptimizer(again, OPTIM)
    restored.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for step in range(3, 6):
        for parameters_, one in ((own, optimizer), (again, restored)):
            backward(parameters_, step)
            one.step(0.02)
    assert all(torch.equal(a, b) for a, b in zip(own, again, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(optimizer.masters, restored.masters, strict=True))


def test_frozen_parameters_are_left_alone():
    own = parameters(torch.float32)
    own[0].requires_grad_(False)
    optimizer = MasterOptimizer(own, OPTIM)
    assert optimizer.parameters == [own[1]]
