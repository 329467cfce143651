"""Mixtures of experts on a GPU: grouped products, and layers whose rows depend on no other row."""

from typing import Any

import pytest
import torch
from torch import Tensor

from luyen.base import process_setup
from luyen.config.catalog import ROUTED_MODELS
from luyen.models import experts
from luyen.models.batch_invariant_linear import grouped_linear
from luyen.models.experts import routed_layers
from luyen.models.policy import Policy
from luyen.rollout.protocol import generate
from tests.generation import native, packed_logps, pairs, request, sampled_logps
from tests.tiny_models import DEVICE, VOCABULARY, tiny_net, tiny_policy

COUNTS = ((1,), (3, 0, 5), (0, 0, 17, 1), (40, 2, 0, 0, 23), (0, 64, 16, 1, 0))
"""Rows of each expert."""
SHAPES = ((33, 20), (70, 64))
"""Columns, depth."""


def made(device: str, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    make = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=make).to(device, dtype)


def routed_net(kind: str, device: str) -> Any:
    net: Any = tiny_net(kind, initializer_range=0.1)
    return net.to(device)


def offsets_of(counts: tuple[int, ...], device: str) -> Tensor:
    return torch.tensor([0, *counts]).cumsum(0).to(device)


def kinds(device: str) -> list[torch.dtype]:
    return [torch.float32, torch.float16, *([torch.bfloat16] if device == "cuda" else [])]


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("counts", COUNTS)
def test_a_row_has_the_bits_of_the_plain_product_in_every_tile(
    device: str, counts: tuple[int, ...], shape: tuple[int, int]
):
    from luyen.models.cuda.linear_kernels import TILES_FLOAT, TILES_HALF, grouped_rows, linear_rows

    columns, depth = shape
    for dtype in kinds(device):
        x = made(device, sum(counts), depth, dtype=dtype)
        weight = made(device, len(counts), columns, depth, dtype=dtype)
        offsets = offsets_of(counts, device)
        parts = zip(x.split(counts), weight, strict=True)
        wanted = torch.cat([linear_rows(rows, own, None) for rows, own in parts])
        assert torch.equal(grouped_rows(x, weight, offsets), wanted)
        for tile in TILES_FLOAT if dtype == torch.float32 else TILES_HALF:
            assert torch.equal(grouped_rows(x, weight, offsets, tile=tile), wanted)
        assert grouped_rows(x[:0], weight, torch.zeros_like(offsets)).shape == (0, columns)


@pytest.mark.gpu
def test_gradients_are_those_of_float64(device: str):
    counts = (7, 0, 12, 1)
    given = [made(device, 20, 24).requires_grad_(), made(device, 4, 18, 24).requires_grad_()]
    exact = [x.detach().double().requires_grad_() for x in given]
    pull = made(device, 20, 18)
    found = grouped_linear(given[0], given[1], offsets_of(counts, device))
    parts = zip(exact[0].split(counts), exact[1], strict=True)
    wanted = torch.cat([rows @ own.t() for rows, own in parts])
    torch.testing.assert_close(found.double(), wanted, atol=1e-4, rtol=1e-5)
    ours = torch.autograd.grad(found, given, pull)
    theirs = torch.autograd.grad(wanted, exact, pull.double())
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.double(), other, atol=1e-4, rtol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ROUTED_MODELS)
def test_a_layer_is_that_of_transformers_and_its_rows_depend_on_no_other(
    device: str, kind: str, monkeypatch: pytest.MonkeyPatch
):
    net = routed_net(kind, device)
    net.set_experts_implementation("eager")
    x = made(device, 1, 40, 64)
    name, plain = next((n, m) for n, m in net.named_modules() if m in routed_layers(net))
    wanted = plain(x)
    pull = made(device, 1, 40, 64).cos()
    slopes = torch.autograd.grad((pull * wanted).sum(), [*plain.parameters()])
    # Where triton interprets, the kernels of a GPU compute on the CPU.
    monkeypatch.setattr(experts, "is_grouped", lambda x: True)
    policy = Policy(routed_net(kind, device), vocabulary=VOCABULARY)
    layer: Any = policy.model.get_submodule(name)
    whole = layer(x)
    torch.testing.assert_close(whole, wanted, atol=1e-5, rtol=1e-4)
    ours = torch.autograd.grad((pull * whole).sum(), [*layer.parameters()])
    for mine, other in zip(ours, slopes, strict=True):
        torch.testing.assert_close(mine, other, atol=1e-4, rtol=1e-4)
    with torch.no_grad():
        for count in (1, 2, 7, 33):
            assert torch.equal(layer(x[:, :count]), whole[:, :count])
            assert torch.equal(layer(x[:, -count:]), whole[:, -count:])


@pytest.mark.gpu
@pytest.mark.skipif(
    DEVICE == "cpu" and not process_setup.is_promised("float32"), reason="nothing is promised here"
)
@pytest.mark.parametrize("rows", [2, 8])
@pytest.mark.parametrize("kind", ROUTED_MODELS)
def test_sampler_and_trainer_agree_to_the_bit(kind: str, rows: int):
    policy = tiny_policy(kind, initializer_range=0.1)
    asked = [request(n, 12, samples=3, ignore_stop=True) for n in (3, 40, 70, 5)]
    engine = native(policy, rows=rows)
    answers = pairs(asked, generate(engine, asked))
    engine.close()
    scored = packed_logps(policy, answers)
    assert scored.std() > 0.05
    assert torch.equal(scored.cpu(), sampled_logps(answers).cpu())
    alone = torch.cat([packed_logps(policy, [answer]) for answer in answers])
    assert torch.equal(alone, scored)
