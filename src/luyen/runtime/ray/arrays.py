"""Tensors in messages as plain bytes: a record with twenty numbers is not twenty little files.

PyTorch pickles a tensor as a file with its storage inside, which takes a fifth of a millisecond at
either end. What arrives here has memory of its own: what lies in the object store is nobody's to
write to.
"""

import pickle

import torch
from ray.util import register_serializer
from torch import Tensor

from luyen.runtime.ray.weights import Plain, as_plain, from_plain


def send_tensors_as_arrays() -> None:
    """From now on, tensors that this process sends with Ray are plain bytes."""
    register_serializer(Tensor, serializer=packed, deserializer=unpacked)


def packed(tensor: Tensor) -> Plain | bytes:
    """A tensor for a message: bytes, or what PyTorch makes of one that is more than that.

    Example:
        >>> unpacked(packed(torch.tensor([1.5], dtype=torch.bfloat16)))
        tensor([1.5000], dtype=torch.bfloat16)
    """
    is_plain = tensor.device.type == "cpu" and tensor.layout == torch.strided
    if not is_plain or tensor.requires_grad or tensor.is_complex():
        return pickle.dumps(tensor)
    return as_plain(tensor)


def unpacked(message: Plain | bytes) -> Tensor:
    """The tensor of a message, in memory of its own."""
    if isinstance(message, bytes):
        return pickle.loads(message)
    dtype, shape, array = message
    return from_plain((dtype, shape, array.copy()))
