"""Packed weights multiply like plain ones, are never stale, and are seen by nobody else."""

from typing import Any

import pytest
import torch
from torch import nn

from luyen.models.prepacked_linear import PrepackedLinears, _has_operators
from tests.generation import holds_copies

pytestmark = pytest.mark.skipif(not _has_operators(), reason="this PyTorch packs no bf16 weights")

MANY = 100


def model(dtype: torch.dtype = torch.bfloat16) -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Linear(256, 512), nn.Linear(512, 256, bias=False), nn.Linear(256, 8)
    return nn.Sequential(*layers).to(dtype).requires_grad_(True)


@torch.no_grad()
def test_products_are_those_of_the_plain_layers():
    net = model()
    packed = PrepackedLinears(net)
    for shape in [(1, 256), (7, 256), (2, 3, 256)]:
        x = torch.randn(shape, dtype=torch.bfloat16)
        with packed.in_use(steps=MANY):
            found = net(x)
        assert found.shape == net(x).shape
        assert torch.allclose(found.float(), net(x).float(), atol=0.02, rtol=0.02)


@torch.no_grad()
@pytest.mark.parametrize("write", ["in place", "another tensor", "foreach"])
def test_a_weight_that_changed_is_packed_anew(write):
    net = model()
    packed, x = PrepackedLinears(net), torch.randn(4, 256, dtype=torch.bfloat16)
    with packed.in_use(steps=MANY):
        net(x)
    layer: Any = net[1]
    functions: Any = torch
    if write == "in place":
        layer.weight.mul_(-2)
    elif write == "foreach":
        functions._foreach_copy_([layer.weight], [layer.weight.float() * -2])
    else:
        layer.weight.data = layer.weight * -2
    with packed.in_use(steps=MANY):
        found = net(x)
    assert torch.allclose(found.float(), net(x).float(), atol=0.05, rtol=0.05)


@torch.no_grad()
def test_no_other_weight_takes_the_address_of_a_packed_one():
    net = model()
    packed, x = PrepackedLinears(net), torch.randn(4, 256, dtype=torch.bfloat16)
    layer: Any = net[1]
    # A new parameter may have the version of the old one: only their addresses tell them apart.
    for _ in range(8):
        with packed.in_use(steps=MANY):
            net(x)
        size, layer.weight = layer.weight.shape, None
        layer.weight = nn.Parameter(torch.randn(size, dtype=torch.bfloat16), requires_grad=False)
        with packed.in_use(steps=MANY):
            found = net(x)
        assert torch.allclose(found.float(), net(x).float(), atol=0.05, rtol=0.05)


@torch.no_grad()
def test_layers_are_as_before_outside_even_after_an_error():
    net = model()
    packed = PrepackedLinears(net)
    with packed.in_use(steps=MANY):
        # The last one is too small to be worth it.
        assert ["forward" in layer.__dict__ for layer in net] == [True, True, False]
    with pytest.raises(RuntimeError), packed.in_use(steps=MANY):
        net(torch.zeros(1, 3, dtype=torch.bfloat16))
    assert all("forward" not in layer.__dict__ for layer in net)
    assert holds_copies(packed)
    packed.drop()
    assert not holds_copies(packed)
    with torch.enable_grad():
        net(torch.randn(4, 256, dtype=torch.bfloat16)).sum().backward()
    assert all(parameter.grad is not None for parameter in net.parameters())


@torch.no_grad()
def test_few_steps_and_other_dtypes_are_left_alone():
    net = model()
    packed = PrepackedLinears(net)
    with packed.in_use(steps=1):
        assert "forward" not in net[0].__dict__
    assert not holds_copies(packed)
    with packed.in_use(steps=MANY), packed.in_use(steps=1):
        assert "forward" in net[0].__dict__
    plain = PrepackedLinears(model(torch.float32))
    with plain.in_use(steps=MANY):
        assert not holds_copies(plain)


def test_gradients_must_be_off():
    with pytest.raises(AssertionError), PrepackedLinears(model()).in_use(steps=MANY):
        pass
