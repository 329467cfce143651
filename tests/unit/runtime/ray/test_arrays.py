"""Tensors travel as bytes, and arrive as what they were."""

import pytest
import torch
from torch import Tensor

from luyen.runtime.ray.ranks import pack_tensors, unpack_tensors

TENSORS = {
    "scalar": torch.tensor(2.5, dtype=torch.float64),
    "empty": torch.empty(0, 3),
    "view": torch.arange(12).view(3, 4)[:, 1::2],
    "transposed": torch.arange(6.0).view(2, 3).t(),
    "bfloat16": torch.tensor([1.5, float("nan")], dtype=torch.bfloat16),
    "bool": torch.tensor([True, False]),
    "complex": torch.tensor([1j]),
    "sparse": torch.eye(3).to_sparse(),
    "learns": torch.ones(2, requires_grad=True),
}


# PyTorch 2.11 says so whenever a sparse tensor is made; later ones do not.
@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled:UserWarning")
@pytest.mark.parametrize("name", TENSORS)
def test_what_arrives_is_what_was_sent(name: str):
    sent = TENSORS[name]
    found = unpack_tensors(pack_tensors(sent))
    assert (found.dtype, found.shape, found.layout) == (sent.dtype, sent.shape, sent.layout)
    assert found.requires_grad == sent.requires_grad
    assert torch.equal(_dense(found), _dense(sent))


def test_what_arrives_may_be_written_to_and_nobody_else_sees_it():
    sent = torch.zeros(3)
    plain = pack_tensors(sent)
    assert isinstance(plain, tuple)
    plain[2].flags.writeable = False  # as the object store gives it
    found = unpack_tensors(plain)
    found += 1
    assert unpack_tensors(plain).tolist() == sent.tolist() == [0.0, 0.0, 0.0]


def _dense(tensor: Tensor) -> Tensor:
    dense = tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()
    return dense.nan_to_num(nan=-7.0)
