"""Tensors in messages as plain bytes: a record with twenty numbers is not twenty little files.

PyTorch pickles a tensor as a file with its storage inside, which takes a fifth of a millisecond at
either end. What arrives here has memory of its own: what lies in the object store is nobody's to
write to.
"""

import pickle
from typing import Any, TypeAlias

import torch
from ray.util import register_serializer
from torch import Tensor

Plain: TypeAlias = tuple[str, tuple[int, ...], Any] | bytes
"""Type, shape and bytes; or, of a tensor that is more than that, what PyTorch makes of it."""


def send_tensors_as_arrays() -> None:
    """From now on, tensors that this process sends with Ray are plain bytes."""
    register_serializer(Tensor, serializer=as_plain, deserializer=as_tensor)


def as_plain(tensor: Tensor) -> Plain:
    """A tensor for a message.

    Example:
        >>> as_tensor(as_plain(torch.tensor([1.5], dtype=torch.bfloat16)))
        tensor([1.5000], dtype=torch.bfloat16)
    """
    is_plain = tensor.device.type == "cpu" and tensor.layout == torch.strided
    if not is_plain or tensor.requires_grad or tensor.is_complex():
        return pickle.dumps(tensor)
    flat = tensor.reshape(-1).contiguous().view(torch.uint8)
    return str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), flat.numpy()


def as_tensor(plain: Plain) -> Tensor:
    """The tensor of a message, in memory of its own."""
    if isinstance(plain, bytes):
        return pickle.loads(plain)
    dtype, shape, array = plain
    if not array.size:
        return torch.empty(shape, dtype=getattr(torch, dtype))
    return torch.from_numpy(array.copy()).view(getattr(torch, dtype)).reshape(shape)
