"""Weights on their way are the same to the bit when they arrive."""

import torch

from luyen.models.weights import tensor_digests
from luyen.runtime.weights import copy_into, pack, unpack


def test_weights_are_the_same_to_the_bit_in_parcels():
    base = torch.randn(6, 4)
    weights = {
        "view": base[1:3],
        "column": base[:, 1],
        "half": torch.randn(5).bfloat16(),
        "scalar": torch.tensor(0.1),
        "whole": torch.arange(4),
    }
    parcel = pack(weights)
    (_, _, array), names = parcel.stretches[0]
    assert names == (("view", (2, 4)),)
    assert array.nbytes == 32, "a view does not take its storage along"
    assert tensor_digests(unpack(parcel)) == tensor_digests(weights)
    own = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
    places = {name: tensor.data_ptr() for name, tensor in own.items()}
    copy_into(own, unpack(parcel))
    assert tensor_digests(own) == tensor_digests(weights)
    assert places == {name: tensor.data_ptr() for name, tensor in own.items()}


def test_only_neighbours_in_memory_travel_as_one_stretch():
    base = torch.randn(12)
    a, b, c, d = base.split([2, 4, 3, 3])
    cases = {
        "all in order": ({"a": a, "b": b.view(2, 2), "c": c, "d": d}, 1),
        "in another order": ({"b": b, "a": a, "c": c, "d": d}, 3),
        "with a hole": ({"a": a, "c": c}, 2),
        "of another type": ({"a": a, "b": b.view(torch.int32), "c": c}, 3),
        "turned": ({"a": a, "b": b.view(2, 2).T, "c": c}, 3),
        "empty": ({"a": a, "none": base[2:2], "b": b}, 3),
        "nothing": ({}, 0),
    }
    for name, (tensors, stretches) in cases.items():
        parcel = pack(tensors)
        assert len(parcel.stretches) == stretches, name
        found = unpack(parcel)
        assert list(found) == list(tensors), name
        assert tensor_digests(found) == tensor_digests(tensors), name
