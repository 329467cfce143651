"""Which products depend on the number of rows is measured, and the layers follow the finding."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn

from luyen.models import batch_invariant_linear
from luyen.models.attention import use_our_attention
from luyen.models.batch_invariant_linear import ProductShape, choose_products, is_uneven, product_of
from luyen.models.fused.patch import fuse_layers
from luyen.models.head import fused_scores
from tests.tiny_models import tiny_net

CPU = torch.device("cpu")
SHAPE = ProductShape(columns=5, depth=8, dtype=torch.float32, has_bias=True)


def even(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A product whose rows depend on themselves only: one column of `x` after the other."""
    total = torch.zeros(x.shape[0], weight.shape[0]) if bias is None else bias.expand(len(x), -1)
    for k in range(x.shape[1]):
        total = total + x[:, k, None] * weight[:, k]
    return total


def nudged(y: Tensor, which: slice) -> Tensor:
    y[which] = torch.nextafter(y[which], torch.tensor(torch.inf))
    return y


FAULTS = {
    "one row alone": lambda y: nudged(y, slice(None)) if len(y) == 1 else y,
    "few rows": lambda y: nudged(y, slice(None)) if len(y) == 48 else y,
    "many rows": lambda y: nudged(y, slice(None)) if len(y) > 4096 else y,
    "the last row of many": lambda y: nudged(y, slice(8191, None)),
    "rows at a certain place": lambda y: nudged(y, slice(256, 320)),
}


def test_rows_that_never_change_are_even():
    assert not is_uneven(SHAPE, CPU, even)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_last_bit_that_changes_is_found(fault):
    assert is_uneven(SHAPE, CPU, lambda *given: FAULTS[fault](even(*given)))


def test_rows_that_start_anywhere_are_not_trusted():
    odd = ProductShape(columns=5, depth=7, dtype=torch.float32, has_bias=False)
    assert is_uneven(odd, CPU, even)


def test_the_measurement_leaves_random_numbers_alone_and_repeats():
    state = torch.get_rng_state()
    seen: list[Tensor] = []

    def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        seen.append(weight)
        return even(x, weight, bias)

    for _ in range(2):
        is_uneven(SHAPE, CPU, product)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(seen[0], seen[-1])


def test_results_stay_small(monkeypatch):
    monkeypatch.setattr(batch_invariant_linear, "_MOST_BYTES", 5 * 4 * 300)
    counts: list[int] = []

    def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        counts.append(len(x))
        return even(x, weight, bias)

    assert not is_uneven(SHAPE, CPU, product)
    assert max(counts) == 257


def fused_net(**changes: Any) -> Any:
    net = tiny_net("qwen2", **changes)
    use_our_attention(net)
    fuse_layers(net)
    return net


@pytest.fixture
def calls(monkeypatch) -> list[tuple[int, int]]:
    """Shapes of weights that our product was called with; it is PyTorch's here."""
    seen: list[tuple[int, int]] = []

    def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        seen.append((weight.shape[0], weight.shape[1]))
        return F.linear(x, weight, bias)

    monkeypatch.setattr(batch_invariant_linear, "batch_invariant_product", product)
    return seen


def wide(shape: ProductShape, device: torch.device) -> bool:
    """Down projections and gate with up, in the tiny models."""
    return shape.depth == 96 or shape.columns == 192


def test_layers_take_our_product_where_it_is_needed_and_lose_it_again(calls):
    net = fused_net()
    x = torch.randn(1, 3, 64)
    mlp = net.model.layers[1].mlp
    expected = mlp(x)
    assert calls == []
    found = choose_products(net, is_exact=True, measure=wide)
    assert [(s.columns, s.depth) for s in found] == [(192, 64), (64, 96)]
    for is_learning in (False, True):
        with torch.set_grad_enabled(is_learning):
            assert torch.equal(mlp(x), expected)
        assert calls == [(192, 64), (64, 96)]
        calls.clear()
    assert torch.equal(copy.deepcopy(mlp)(x), expected)
    calls.clear()
    assert choose_products(net, is_exact=False, measure=wide) == []
    assert torch.equal(mlp(x), expected)
    assert calls == []
    assert "forward" not in vars(mlp.down_proj)


def test_each_shape_is_measured_on_the_packed_layers_not_on_their_parts():
    measured: dict[tuple[int, int, bool], int] = {}

    def measure(shape: ProductShape, device: torch.device) -> bool:
        key = (shape.columns, shape.depth, shape.has_bias)
        measured[key] = measured.get(key, 0) + 1
        return False

    choose_products(fused_net(), is_exact=True, measure=measure)
    packed = {(128, 64, True): 2, (192, 64, False): 2}
    assert measured == {**packed, (64, 64, False): 3, (64, 96, False): 2}


def test_gradients_are_those_of_the_vendors_product(calls):
    found = []
    for is_exact in (False, True):
        net = fused_net()
        choose_products(net, is_exact=is_exact, measure=lambda *_: True)
        torch.manual_seed(0)
        x = torch.randn(1, 3, 64, requires_grad=True)
        mlp = net.model.layers[0].mlp
        out = net.lm_head(mlp(x)).square().sum()
        out.backward()
        found.append([x.grad, *(p.grad for p in mlp.parameters()), net.lm_head.weight.grad])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)
    assert set(calls) == {(192, 64), (64, 96), (64, 64)}


def test_adapters_take_our_product_too(calls):
    net = tiny_net("llama")
    inject_adapter_in_model(LoraConfig(r=4, target_modules=["down_proj"]), net)
    use_our_attention(net)
    fuse_layers(net)
    choose_products(net, is_exact=True, measure=lambda *_: True)
    net.model.layers[0].mlp.down_proj(torch.randn(2, 96))
    assert sorted(calls) == [(4, 96), (64, 4), (64, 96)]


def test_scores_take_the_product_of_the_output_layer(calls):
    linear = nn.Linear(8, 11)
    assert product_of(linear) is F.linear
    choose_products(linear, is_exact=True, measure=lambda *_: True)
    hidden = torch.randn(3, 8, requires_grad=True)
    targets = torch.tensor([0, 5, 10])
    given = (hidden, linear.weight, linear.bias, targets)
    logp, *_ = fused_scores(*given, vocabulary=11, product=product_of(linear))
    plain, *_ = fused_scores(*given, vocabulary=11)
    assert torch.equal(logp, plain)
    assert calls == [(11, 8)]
    logp.sum().backward()
    assert calls == [(11, 8)] * 2
