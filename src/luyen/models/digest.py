"""Digests of tensors: sums that every bit counts in, made where the tensors lie.

The bits of an element are multiplied with an odd constant of its flat position, and the products
are added modulo 2^64. Addition knows no order, so the sum is the same on every device, for every
number of threads and for every split: the digest of a tensor is the sum of the digests of its
shards. An odd constant loses no bit, so one changed element always changes the sum; and elements
that change places meet other constants.
"""

import functools
from collections.abc import Mapping

import torch
from torch import Tensor

_TABLE = 1 << 20
"""Positions with a constant of their own; further ones multiply these with a constant of a row."""
_PASS = 1 << 15
"""Words that a CPU takes at once: with constants and products they stay in the cache of a core.

PyTorch gives so few to a single thread, which costs less than waking the others."""
_GOLDEN = -0x61C8864680B583EB
_MIX = -0x4B47D0C5A1A6AD2D
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int32, 16: torch.int32}
_MASK = (1 << 64) - 1


def digest_sum(tensor: Tensor, *, offset: int = 0) -> Tensor:
    """The digest of a tensor's elements in row-major order: one int64, on the tensor's device.

    For a shard, `offset` is the flat index of its first element in the whole. Nothing is sent to
    the host. Shape and type are not part of it; `describe` adds them.

    Example:
        >>> whole = torch.arange(6.0)
        >>> parts = digest_sum(whole[:4]) + digest_sum(whole[4:], offset=4)
        >>> bool(parts == digest_sum(whole)), bool(digest_sum(whole.flip(0)) == parts)
        (True, False)
    """
    assert offset >= 0, f"offset {offset} is negative"
    bits, per_element = _bits(tensor)
    constants = _constants(bits.device)
    most = _TABLE if bits.is_cuda else _PASS
    parts: list[Tensor] = []
    start, end, first = 0, len(bits), offset * per_element
    while start < end:
        row, inside = divmod(first + start, _TABLE)
        count = min(end - start, most, _TABLE - inside)
        words = bits if count == end else bits[start : start + count]
        part = (words * constants[inside : inside + count]).sum()
        parts.append(part * _row_constant(row) if row else part)
        start += count
    return parts[0] if len(parts) == 1 else _added(parts, bits.device)


def describe(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Type, shape and digest of each tensor, as text; one transfer to the host for all of them.

    Example:
        >>> describe({"w": torch.zeros(2, 3)})
        {'w': 'float32 [2, 3] 0000000000000000'}
    """
    numbers: dict[str, int] = {}
    for device in {tensor.device for tensor in tensors.values()}:
        here = {name: tensor for name, tensor in tensors.items() if tensor.device == device}
        numbers |= _numbers_on_gpu(here) if device.type == "cuda" else _numbers(here)
    return {
        name: f"{_type(tensor)} {list(tensor.shape)} {numbers[name] & _MASK:016x}"
        for name, tensor in tensors.items()
    }


def _numbers(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """The digests as integers, a tensor at a time; one transfer for all."""
    sums = torch.stack([digest_sum(tensor) for tensor in tensors.values()])
    return dict(zip(tensors, sums.tolist(), strict=True))


def _numbers_on_gpu(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """The same in one launch for each size of words."""
    from luyen.models.cuda.digest_kernels import digest_sums

    groups: dict[torch.dtype, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        groups.setdefault(_WORDS[tensor.element_size()], {})[name] = tensor.contiguous()
    sums = [
        digest_sums([*group.values()], word, table=_TABLE, golden=_GOLDEN, mix=_MIX)
        for word, group in groups.items()
    ]
    names = [name for group in groups.values() for name in group]
    return dict(zip(names, torch.cat(sums).tolist(), strict=True))


def _added(parts: list[Tensor], device: torch.device) -> Tensor:
    if not parts:
        return torch.zeros((), dtype=torch.int64, device=device)
    return torch.stack(parts).sum()


def _bits(tensor: Tensor) -> tuple[Tensor, int]:
    """The elements as words of at most 32 bits, and how many words make one.

    With 64 bits in a word its top bit would weigh the same at every position.
    """
    flat = tensor.detach().reshape(-1).contiguous()
    size = flat.element_size()
    return flat.view(_WORDS[size]), 1 if size <= 4 else size // 4


@functools.cache
def _constants(device: torch.device) -> Tensor:
    """Odd constants of the positions of a row: multiply, shift, and again."""
    mixed = torch.arange(1, _TABLE + 1, dtype=torch.int64, device=device) * _GOLDEN
    mixed = (mixed ^ (mixed >> 32)) * _MIX
    return (mixed ^ (mixed >> 29)) | 1


@functools.cache
def _row_constant(row: int) -> int:
    """The odd constant of a row as a signed number; rows are hashed as positions are."""
    mixed = (row * (_GOLDEN & _MASK)) & _MASK
    mixed = ((mixed ^ (mixed >> 29)) * (_MIX & _MASK)) & _MASK
    odd = (mixed ^ (mixed >> 32)) | 1
    return odd - (1 << 64) if odd >> 63 else odd


def _type(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
