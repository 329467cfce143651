"""Our matrix product is right, and gives a row the same bits in every company."""

from typing import Any

import pytest
import torch
from torch import Tensor

from luyen.models.batch_invariant_linear import (
    ProductShape,
    batch_invariant_linear,
    batch_invariant_product,
    choose_products,
    is_uneven,
)
from luyen.models.fused.patch import fuse_layers
from luyen.models.policy import Policy
from tests.tiny_models import VOCABULARY, tiny_net

pytestmark = pytest.mark.gpu

ODD = [(1, 1, 1), (3, 5, 7), (17, 33, 65), (65, 40, 130), (130, 129, 64)]
"""Rows, columns, depth."""
REAL = [
    (960, 576),
    (576, 576),
    (3072, 576),
    (576, 1536),
    (1152, 896),
    (9728, 896),
    (896, 4864),
    (1024, 3072),
    (1024, 2048),
    (8, 1024),
    (1001, 333),
]
"""Columns, depth of models that people train, of an adapter, and of nobody."""
COUNTS = (1, 2, 3, 7, 15, 16, 17, 31, 64, 65, 128, 200, 257, 511, 1024, 1777, 2048, 4095, 4096)


def kinds(device: str) -> list[torch.dtype]:
    wide = [torch.float32, torch.float16]
    return [*wide, torch.bfloat16] if device == "cuda" else wide


def made(device: str, *shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    make = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=make).to(device, dtype)


def tiles(dtype: torch.dtype) -> tuple[dict[str, int], ...]:
    from luyen.models.cuda.linear_kernels import TILES_FLOAT, TILES_HALF

    return TILES_FLOAT if dtype == torch.float32 else TILES_HALF


def poisoned(device: str, rows: int, columns: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A result full of NaN, and the numbers around it."""
    around = torch.full(((rows + 2) * columns,), torch.nan, device=device, dtype=dtype)
    return around[columns:-columns].view(rows, columns), around


@pytest.mark.parametrize("shape", ODD)
@pytest.mark.parametrize("has_bias", [False, True])
def test_products_of_odd_shapes_in_every_tile(device: str, shape: Any, has_bias: bool):
    from luyen.models.cuda.linear_kernels import linear_rows

    rows, columns, depth = shape
    for dtype in kinds(device):
        x, weight = (made(device, n, depth, dtype=dtype) for n in (rows, columns))
        bias = made(device, columns, dtype=dtype) if has_bias else None
        expected = x.double() @ weight.double().t() + (0.0 if bias is None else bias.double())
        usual = linear_rows(x, weight, bias)
        assert usual.dtype == dtype
        # Half of the last place of each result, and what the sum itself may round.
        allowed = 0.51 * torch.finfo(dtype).eps * expected.abs() + 2e-6 * max(1.0, depth**0.5)
        assert ((usual.double() - expected).abs() <= allowed).all()
        for tile in tiles(dtype):
            out, around = poisoned(device, rows, columns, dtype)
            linear_rows(x, weight, bias, out=out, tile=tile)
            assert torch.equal(out, usual)
            assert around[:columns].isnan().all()
            assert around[-columns:].isnan().all()


def test_a_row_is_the_same_alone_and_among_others(device: str):
    counts, columns, depth = (1, 2, 16, 17, 65, 150), 70, 100
    for dtype in kinds(device):
        x, weight = (made(device, n, depth, dtype=dtype) for n in (max(counts), columns))
        bias = made(device, columns, dtype=dtype)
        whole = batch_invariant_product(x, weight, bias)
        for count in counts:
            assert torch.equal(batch_invariant_product(x[:count], weight, bias), whole[:count])
            assert torch.equal(batch_invariant_product(x[-count:], weight, bias), whole[-count:])


def test_strides_batches_and_nothing_at_all(device: str):
    both = made(device, 2, 6, 48, dtype=torch.float32)
    weight = made(device, 9, 64, dtype=torch.float32)[:, 10:42]
    x = both[..., 16:]
    found = batch_invariant_product(x, weight, None)
    assert found.shape == (2, 6, 9)
    torch.testing.assert_close(found, x @ weight.t(), atol=1e-4, rtol=1e-5)
    turned = x.transpose(0, 1)
    assert torch.equal(batch_invariant_product(turned, weight, None), found.transpose(0, 1))
    assert batch_invariant_product(x[:0], weight, None).shape == (0, 6, 9)


@pytest.mark.parametrize("has_bias", [False, True])
def test_gradients_are_those_of_float64(device: str, has_bias: bool):
    shapes = [(2, 11, 24), (20, 24), (20,)][: 3 if has_bias else 2]
    given = [made(device, *s, dtype=torch.float32).requires_grad_() for s in shapes]
    exact = [x.detach().double().requires_grad_() for x in given]
    pull = made(device, 2, 11, 20, dtype=torch.float32)
    found = torch.autograd.grad(batch_invariant_linear(*given), given, pull)
    wanted = torch.autograd.grad(torch.nn.functional.linear(*exact), exact, pull.double())
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours.double(), theirs, atol=1e-4, rtol=1e-5)


def test_frozen_weights_keep_no_input_alive(device: str):
    x = made(device, 3, 16, dtype=torch.float32).requires_grad_()
    weight = made(device, 4, 16, dtype=torch.float32)
    out = batch_invariant_linear(x, weight)
    held: Any = out.grad_fn
    assert held.saved_tensors[0] is None
    (found,) = torch.autograd.grad(out.sum(), x)
    torch.testing.assert_close(found, weight.sum(0).expand(3, -1))
    assert not batch_invariant_linear(x.detach(), weight).requires_grad


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_a_policy_with_our_products_is_the_same_policy(device: str, kind: str):
    policy = Policy(tiny_net(kind).to(device), vocabulary=VOCABULARY).eval()
    if device == "cpu":
        fuse_layers(policy.model)
    tokens = torch.arange(3, 27, device=device)
    mask = torch.ones(24, dtype=torch.bool, device=device)
    mask[[0, 7]] = False
    found = []
    for is_ours in (False, True):
        shapes = choose_products(policy.model, is_exact=is_ours, measure=lambda *_: True)
        assert bool(shapes) == is_ours
        logp = policy(tokens, [7, 17], mask).logp
        found.append([logp, *torch.autograd.grad(logp.sum(), list(policy.parameters()))])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=1e-3)


@pytest.fixture
def cuda(device: str) -> str:
    """CUDA, or no test."""
    if device != "cuda":
        pytest.skip("needs CUDA")
    return device


@pytest.mark.parametrize("shape", REAL)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_of_real_shapes_do_not_depend_on_their_number(cuda, shape, dtype):
    from luyen.models.cuda.linear_kernels import linear_rows

    columns, depth = shape
    x = made(cuda, max(COUNTS), depth, dtype=dtype)
    weight = made(cuda, columns, depth, dtype=dtype)
    whole = batch_invariant_product(x, weight, None)
    for count in COUNTS:
        out, around = poisoned(cuda, count, columns, dtype)
        linear_rows(x[:count], weight, None, out=out)
        assert torch.equal(out, whole[:count])
        assert torch.equal(batch_invariant_product(x[-count:], weight, None), whole[-count:])
        assert around[-columns:].isnan().all()
    for tile in tiles(dtype):
        assert torch.equal(linear_rows(x, weight, None, tile=tile), whole)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_our_product_passes_the_measurement_that_chooses_it(cuda, dtype):
    for columns, depth in ((896, 4864), (64, 96), (30000, 64)):
        for has_bias in (False, True):
            shape = ProductShape(columns=columns, depth=depth, dtype=dtype, has_bias=has_bias)
            assert not is_uneven(shape, torch.device(cuda), batch_invariant_product)


def test_a_graph_holds_the_product(cuda):
    layer = torch.nn.Linear(512, 300, device=cuda, dtype=torch.bfloat16)
    choose_products(layer, is_exact=True, measure=lambda *_: True)
    x = made(cuda, 48, 512, dtype=torch.bfloat16)
    with torch.no_grad():
        layer(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = layer(x)
        for seed in range(3):
            x.copy_(made(cuda, 48, 512, dtype=torch.bfloat16, seed=seed))
            graph.replay()
            torch.cuda.synchronize()
            assert torch.equal(out, layer(x))


def test_the_measurement_leaves_random_numbers_alone(cuda):
    before = torch.get_rng_state(), torch.cuda.get_rng_state()
    shape = ProductShape(columns=96, depth=64, dtype=torch.bfloat16, has_bias=False)
    is_uneven(shape, torch.device(cuda))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert torch.equal(torch.cuda.get_rng_state(), before[1])


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_scores_do_not_depend_on_the_company(cuda, kind):
    policy = Policy(tiny_net(kind).to(cuda), vocabulary=VOCABULARY).eval()
    alone = torch.arange(3, 40, device=cuda)
    several = alone.repeat(41)
    for is_exact in (True, False):
        policy.is_exact = is_exact
        found = []
        for tokens in (alone, several):
            mask = torch.arange(len(tokens), device=cuda) % 37 != 0
            lengths = [37] * (len(tokens) // 37)
            with torch.no_grad():
                found.append(policy(tokens, lengths, mask, is_shared=False).logp)
        if is_exact:
            assert torch.equal(found[0].repeat(41), found[1])
    assert all("forward" not in vars(m) for m in policy.modules() if type(m) is torch.nn.Linear)
