"""Few rows that are multiplied have the bits they have among many, where that takes our help."""

import pytest
import torch
from torch import nn

from luyen.base import process_setup
from luyen.models import batch_invariant_linear
from luyen.models.batch_invariant_linear import (
    PRODUCT,
    batch_invariant_few_rows,
    few_rows_linear,
    product_of,
)


@pytest.mark.skipif(not process_setup.is_promised("float32"), reason="nothing is promised here")
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("depth", "columns"), [(16, 8), (72, 100), (341, 64), (2048, 512)])
def test_every_number_of_rows_gives_the_same_bits(depth: int, columns: int, bias: bool):
    net = nn.Sequential(nn.Linear(depth, columns, bias=bias))
    batch_invariant_few_rows(net)
    x = torch.randn(33, depth)
    with torch.no_grad():
        whole = net(x)
        for count in (1, 2, 3, 4, 5, 8, 9, 32):
            assert torch.equal(net(x[:count]), whole[:count])


@pytest.mark.parametrize("least", [1, 2, 4])
@pytest.mark.parametrize("shape", [(4,), (1, 4), (1, 1, 4), (0, 4), (3, 4), (2, 3, 4)])
def test_shapes_and_gradients_are_those_of_a_linear_layer(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], least: int
):
    monkeypatch.setattr(batch_invariant_linear, "least_rows", lambda: least)
    layer = nn.Linear(4, 5).double()
    x = torch.randn(*shape, dtype=torch.float64, requires_grad=True)
    ours = few_rows_linear(x, layer.weight, layer.bias)
    theirs = layer(x)
    assert ours.shape == theirs.shape
    torch.testing.assert_close(ours, theirs)
    weights = torch.randn_like(theirs)
    given = [x, layer.weight, layer.bias]
    for a, b in zip(
        torch.autograd.grad((ours * weights).sum(), given),
        torch.autograd.grad((theirs * weights).sum(), given),
        strict=True,
    ):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(
    ("least", "dtype", "expected"),
    [
        (2, torch.float32, True),
        (4, torch.float32, True),
        (1, torch.float32, False),
        (4, torch.bfloat16, False),
    ],
)
def test_only_fp32_is_changed_where_few_rows_differ(
    monkeypatch: pytest.MonkeyPatch, least: int, dtype: torch.dtype, expected: bool
):
    monkeypatch.setattr(batch_invariant_linear, "least_rows", lambda: least)
    monkeypatch.setattr(batch_invariant_linear, "is_promised", lambda name: name == "float32")
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", torch.backends.mkldnn.enabled)
    layer = nn.Linear(2, 2, dtype=dtype)
    batch_invariant_few_rows(nn.Sequential(layer))
    assert (PRODUCT in vars(layer)) is expected
    assert (product_of(layer) is few_rows_linear) is expected
