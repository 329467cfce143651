"""Two holders of weights are compared by memory first, and by digests only where they differ."""

import copy

import pytest
import torch
from torch import nn

from luyen.models import weights as model_weights
from luyen.models.weights import Fingerprint, tensor_digests, trained_parameters


def test_the_same_memory_is_never_digested(monkeypatch: pytest.MonkeyPatch):
    seen: list[int] = []
    monkeypatch.setattr(
        model_weights, "tensor_digests", lambda t: seen.append(len(t)) or tensor_digests(t)
    )
    net = nn.Linear(3, 2)
    assert Fingerprint.of(net).first_difference(Fingerprint.of(net)) is None
    assert sum(seen) == 0
    twin = copy.deepcopy(net)
    assert Fingerprint.of(twin).first_difference(Fingerprint.of(net)) is None
    assert sum(seen) == 4


def test_a_copy_is_equal_until_one_bit_changes():
    net = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    twin = copy.deepcopy(net)
    with torch.no_grad():
        net[1].bias[0] += 1e-3
    held = Fingerprint.of(twin)
    assert held.first_difference(Fingerprint.of(net)) == "1.bias has other values"
    assert held.text() != Fingerprint.of(net).text()


def test_a_view_of_the_same_memory_in_another_shape_is_not_the_same():
    weight = torch.arange(6.0)
    flat, square = Fingerprint(weights={"w": weight}), Fingerprint(weights={"w": weight.view(2, 3)})
    assert square.first_difference(flat) == "w is float32 [2, 3] instead of float32 [6]"


def test_weights_elsewhere_are_compared_by_their_digests():
    net = nn.Linear(3, 2)
    told = Fingerprint(weights=dict(tensor_digests(trained_parameters(net))))
    assert told.first_difference(Fingerprint.of(net)) is None
    assert told.text() == Fingerprint.of(net).text()
    with torch.no_grad():
        net.weight.mul_(2.0)
    assert told.first_difference(Fingerprint.of(net)) == "weight has other values"


def test_a_parameter_that_was_not_delivered_is_named():
    net = nn.Linear(3, 2)
    weights = trained_parameters(net)
    without = Fingerprint(weights={n: w for n, w in weights.items() if n != "bias"})
    more = Fingerprint(weights={**weights, "lora_A": torch.zeros(1)})
    assert without.first_difference(Fingerprint.of(net)) == "bias is missing"
    assert more.first_difference(Fingerprint.of(net)) == "lora_A is not one of the trainer's"


def test_what_is_frozen_is_not_looked_at():
    net = nn.Linear(3, 2)
    net.weight.requires_grad_(False)
    assert list(Fingerprint.of(net).weights) == ["bias"]
