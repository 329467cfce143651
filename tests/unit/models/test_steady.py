"""Element-wise functions give a number the same bits wherever it stands."""

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from luyen.models.batch_invariant import batch_invariant, batch_invariant_modules, is_whole
from tests.tiny_models import tiny_net


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(1)


@pytest.mark.parametrize("function", [torch.tanh, nn.functional.silu, torch.cos])
def test_a_number_does_not_depend_on_its_place(threads: int, function):
    torch.manual_seed(0)
    numbers = torch.randn(40_000) * 3
    alone = torch.cat([function(part) for part in numbers.split(32)])
    for first, count in ((0, 31), (5, 341), (7, 33_001), (1, 39_999), (3, 1)):
        part = numbers[first : first + count].clone()
        assert torch.equal(batch_invariant(function, part), alone[first : first + count])


def test_rows_of_a_wider_tensor_are_steady_too(threads: int):
    torch.manual_seed(0)
    wide = torch.randn(700, 200)
    gate, _ = wide.split(100, -1)
    whole = batch_invariant(torch.tanh, gate)
    single = torch.stack([batch_invariant(torch.tanh, row[None])[0] for row in gate[:50]])
    assert torch.equal(whole[:50], single)
    assert (whole.double() - gate.double().tanh()).abs().max() < 1e-6


def test_the_gradient_is_that_of_the_function(threads: int):
    x = torch.randn(3, 341, dtype=torch.float64, requires_grad=True)
    batch_invariant(torch.tanh, x).sum().backward()
    assert torch.allclose(x.grad, 1 - x.detach().tanh() ** 2)


def test_shares_are_whole_vectors():
    assert [n for n in range(1, 100) if is_whole(n)] == [32, 64, 96]
    torch.set_num_threads(2)
    found = is_whole(32 * 1024), is_whole(32 * 1025), is_whole(64 * 1025)
    torch.set_num_threads(1)
    assert found == (True, False, True)


@pytest.mark.parametrize("kind", ["llama", "phi3", "gpt_neox", "gemma3_text"])
def test_steadied_modules_compute_what_they_did(kind: str):
    net = tiny_net(kind)
    tokens = torch.arange(3, 40)[None]
    names = set(net.state_dict())
    with torch.no_grad():
        before = net(input_ids=tokens).logits
        batch_invariant_modules(net)
        after = net(input_ids=tokens).logits
    assert (before - after).abs().max() < 1e-4
    assert set(net.state_dict()) == names
    inner = [type(m).__name__ for m in net.modules()]
    assert inner.count("_Activation") == 2
    assert inner.count("_Rotary") == 1
