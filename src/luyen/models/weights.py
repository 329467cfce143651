"""Weights of a module: their digests, those that learn, and fingerprints that processes compare.

A digest is computed on the tensor's own device, and every bit counts. The bits of an element are
multiplied with an odd constant of its flat position, and the products are added modulo 2^64.
Addition knows no order, so the sum is the same on every device, for every number of threads and for
every split: the digest of a tensor is the sum of the digests of its shards. An odd constant loses
no bit, so one changed element always changes the sum; and elements that change places meet other
constants.
"""

import functools
import sys
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
from torch import Tensor, nn

from luyen.base.digests import hash_value
from luyen.base.errors import UserError

_TABLE = 1 << 20
"""Positions with a constant of their own; further ones multiply these with a constant of a row."""
_PASS = 1 << 16
"""Words that a CPU takes at once: they and their constants stay in the cache of a core."""
_GOLDEN = -0x61C8864680B583EB
_MIX = -0x4B47D0C5A1A6AD2D
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int32, 16: torch.int32}
_MASK = (1 << 64) - 1


def digest_sum(tensor: Tensor, *, offset: int = 0) -> Tensor:
    """The digest of a tensor's elements in row-major order: one int64, on the tensor's device.

    For a shard, `offset` is the flat index of its first element in the whole. Nothing is sent to
    the host. Shape and type are not part of it; `tensor_digests` adds them.

    Example:
        >>> whole = torch.arange(6.0)
        >>> parts = digest_sum(whole[:4]) + digest_sum(whole[4:], offset=4)
        >>> bool(parts == digest_sum(whole)), bool(digest_sum(whole.flip(0)) == parts)
        (True, False)
    """
    assert offset >= 0, f"offset {offset} is negative"
    bits, per_element = _bits(tensor)
    if not bits.is_cuda:
        return torch.tensor(_sum_on_cpu(bits, offset * per_element))
    constants = _constants(bits.device)
    parts = [torch.zeros((), dtype=torch.int64, device=bits.device)]
    for row, inside, start, end in _pieces(offset * per_element, len(bits), _TABLE):
        part = (bits[start:end] * constants[inside : inside + end - start]).sum()
        parts.append(part * _row_constant(row) if row else part)
    return torch.stack(parts).sum()


def digest_number(tensor: Tensor, *, offset: int = 0) -> int:
    """The same as a number, on the host."""
    if tensor.is_cuda:
        return int(digest_sum(tensor, offset=offset))
    bits, per_element = _bits(tensor)
    return _sum_on_cpu(bits, offset * per_element)


def block_digest(block: Tensor, *, offset: int, columns: int) -> int:
    """`digest_number` of a part of a matrix of so many columns; `offset` is its first element.

    Example:
        >>> whole = torch.arange(12.0).view(3, 4)
        >>> parts = [block_digest(whole[:, i : i + 2], offset=i, columns=4) for i in (0, 2)]
        >>> _signed(sum(parts) & _MASK) == digest_number(whole)
        True
    """
    rows, width = block.shape
    bits, per_element = _bits(block)
    assert per_element == 1, "a weight has at most 32 bits"
    constants = _constants(block.device)
    last = (offset + rows * columns) // _TABLE
    of_rows = torch.tensor([_row_constant(row) for row in range(last + 1)], device=block.device)
    inside = torch.arange(width, device=block.device)
    total = torch.zeros((), dtype=torch.int64, device=block.device)
    most = max(1, _TABLE // width)
    for start in range(0, rows, most):
        number = torch.arange(start, min(rows, start + most), device=block.device)
        at = offset + number[:, None] * columns + inside
        words = bits[start * width : (start + len(number)) * width].view(at.shape)
        total += (words * (constants[at % _TABLE] * of_rows[at // _TABLE])).sum()
    return int(total)


def tensor_digests(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Type, shape and digest of each tensor, as text; one transfer to the host for all of them.

    Example:
        >>> tensor_digests({"w": torch.zeros(2, 3)})
        {'w': 'float32 [2, 3] 0000000000000000'}
    """
    numbers = digest_numbers(tensors)
    return {
        name: f"{_type(tensor)} {list(tensor.shape)} {numbers[name] & _MASK:016x}"
        for name, tensor in tensors.items()
    }


def digest_numbers(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """`digest_number` of each tensor, with one transfer to the host for all of a device."""
    numbers: dict[str, int] = {}
    for device in {tensor.device for tensor in tensors.values()}:
        here = {name: tensor for name, tensor in tensors.items() if tensor.device == device}
        numbers |= _numbers_on_gpu(here) if device.type == "cuda" else _numbers(here)
    return numbers


def _numbers(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """The digests as integers, a tensor at a time."""
    return {name: _sum_on_cpu(_bits(tensor)[0], 0) for name, tensor in tensors.items()}


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


def _sum_on_cpu(bits: Tensor, first: int) -> int:
    """The sum of words, the first of which has this position, as 64 bits with a sign."""
    words, constants, total = bits.numpy(), _constants_on_cpu(), 0
    for row, inside, start, end in _pieces(first, len(words), _PASS):
        # Unsigned, where too much is no error and means the same bits.
        piece = words[start:end].astype(np.int64).view(np.uint64)
        part = np.einsum("i,i", piece, constants[inside : inside + end - start])
        total += int(part) * _row_constant(row)
    return _signed(total & _MASK)


def _pieces(first: int, count: int, most: int) -> Iterator[tuple[int, int, int, int]]:
    """Row, position in it, begin and end of pieces of so many words, none of which has two rows."""
    start = 0
    while start < count:
        row, inside = divmod(first + start, _TABLE)
        end = min(count, start + most, start + _TABLE - inside)
        yield row, inside, start, end
        start = end


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
def _constants_on_cpu() -> "np.ndarray[tuple[int], np.dtype[np.uint64]]":
    return _constants(torch.device("cpu")).numpy().view(np.uint64)


@functools.cache
def _row_constant(row: int) -> int:
    """The odd constant of a row as a signed number; rows are hashed as positions are."""
    if row == 0:
        return 1
    mixed = (row * (_GOLDEN & _MASK)) & _MASK
    mixed = ((mixed ^ (mixed >> 29)) * (_MIX & _MASK)) & _MASK
    return _signed((mixed ^ (mixed >> 32)) | 1)


def _signed(number: int) -> int:
    """The same 64 bits with a sign."""
    return number - (1 << 64) if number >> 63 else number


def _type(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


# The parameters that learn: read, restored, and compared as fingerprints. Those of another process
# are shown by digest, and only such a parameter is ever digested here.


def trained_parameters(module: nn.Module) -> dict[str, Tensor]:
    """Parameters that learn, by name; frozen ones come from the model's own files."""
    return {name: p.detach() for name, p in module.named_parameters() if p.requires_grad}


def is_adapter_layer(module: nn.Module) -> bool:
    """Whether a layer has an adapter. None has one before peft is imported."""
    lora: Any = sys.modules.get("peft.tuners.lora")
    return lora is not None and isinstance(module, lora.LoraLayer)


def restore_parameters(module: nn.Module, saved: Mapping[str, Tensor]) -> None:
    """Write saved values into the parameters that learn; they keep their addresses."""
    own = trained_parameters(module)
    _demand_same({n: p.shape for n, p in own.items()}, {n: t.shape for n, t in saved.items()})
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(saved[name])


def _demand_same(own: Mapping[str, tuple[int, ...]], saved: Mapping[str, tuple[int, ...]]) -> None:
    """A UserError that names the first parameter that a checkpoint has not, or has otherwise."""
    for name in [*own, *saved]:
        if own.get(name) == saved.get(name):
            continue
        have, has = (tuple(of[name]) if name in of else "none" for of in (own, saved))
        why = f"it holds other weights than the model: {name} is {has} there and {have} here"
        fix = "give the model and the adapter that the checkpoint was made with"
        raise UserError("checkpoint", name, why, fix)


# The dtype a parameter is exported with (checkpoints, weight sync) if FSDP keeps its shards in
# fp32. A sharded bf16 model keeps fp32 shards, but exports bf16 weights and separate fp32 masters,
# as a model on one device does, so that checkpoints load on any number of ranks.

_EXPORT_DTYPE = "luyen_shown_dtype"


def export_as(module: nn.Module, names: Container[str], dtype: torch.dtype | None) -> None:
    """Set the dtype that these parameters are exported with."""
    for name, parameter in module.named_parameters():
        if name in names and dtype is not None and parameter.dtype != dtype:
            vars(parameter)[_EXPORT_DTYPE] = dtype


def export_dtype(parameter: Tensor) -> torch.dtype:
    """The dtype that a parameter is exported with."""
    return vars(parameter).get(_EXPORT_DTYPE, parameter.dtype)


def export_parameters(module: nn.Module, *, frozen: bool = False) -> dict[str, Tensor]:
    """Trained parameters by name, in their export dtype; shards stay shards.

    With `frozen`, those that do not learn too.
    """
    return dict(iterate_export_parameters(module, frozen=frozen))


def iterate_export_parameters(
    module: nn.Module, *, frozen: bool = False
) -> Iterator[tuple[str, Tensor]]:
    """`export_parameters` one by one, which saves the memory of all converted copies."""
    for name, parameter in module.named_parameters():
        if parameter.requires_grad or frozen:
            # Detaching a shard is slow, and not needed without autograd.
            own = parameter.detach() if torch.is_grad_enabled() else parameter
            dtype = export_dtype(parameter)
            yield name, own if own.dtype == dtype else own.to(dtype)


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Fingerprint:
    """Every parameter that learns, adapters included, as a tensor or as its digest.

    Example:
        >>> import copy
        >>> one, two = nn.Linear(2, 1), nn.Linear(2, 1)
        >>> Fingerprint.of(copy.deepcopy(one)).first_difference(Fingerprint.of(one)) is None
        True
        >>> Fingerprint.of(two).first_difference(Fingerprint.of(one))
        'weight has other values'
    """

    weights: Mapping[str, Tensor | str]
    """By the names of the policy's parameters."""

    @classmethod
    def of(cls, module: nn.Module) -> "Fingerprint":
        """The parameters of a module, none of them copied or looked at."""
        return cls(weights=trained_parameters(module))

    def text(self) -> str:
        """One digest of all of them, which another process can compare."""
        return hash_value(self._texts(self.weights))

    def first_difference(self, wanted: "Fingerprint") -> str | None:
        """The first parameter that is not as wanted, and how it differs; None: all are."""
        mine, theirs = self.weights, wanted.weights
        for name in theirs:
            if name not in mine:
                return f"{name} is missing"
        for name in mine:
            if name not in theirs:
                return f"{name} is not one of the trainer's"
        apart = [name for name in theirs if not _is_same_memory(mine[name], theirs[name])]
        actual = self._texts({name: mine[name] for name in apart})
        expected = self._texts({name: theirs[name] for name in apart})
        return next(
            (_difference(n, actual[n], expected[n]) for n in apart if actual[n] != expected[n]),
            None,
        )

    @staticmethod
    def _texts(weights: Mapping[str, Tensor | str]) -> dict[str, str]:
        here = tensor_digests({n: w for n, w in weights.items() if isinstance(w, Tensor)})
        return {n: w if isinstance(w, str) else here[n] for n, w in weights.items()}


def _is_same_memory(one: Tensor | str, other: Tensor | str) -> bool:
    if isinstance(one, str) or isinstance(other, str):
        return False
    places = [(w.device, w.data_ptr(), w.dtype, w.shape, w.stride()) for w in (one, other)]
    return places[0] == places[1]


def _difference(name: str, actual: str, expected: str) -> str:
    """Digests end in a sum over the values; what stands before it is type and shape."""
    form, wanted = actual.rpartition(" ")[0], expected.rpartition(" ")[0]
    return f"{name} is {form} instead of {wanted}" if form != wanted else f"{name} has other values"
