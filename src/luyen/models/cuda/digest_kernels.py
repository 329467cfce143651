"""Digests of many tensors in one launch: `digest_sum` of each, with the same constants.

A launch for every tensor, let alone for every part of one, costs more than reading all of them.
"""
# pyright: reportMissingImports=false, reportIndexIssue=false

from collections.abc import Sequence
from itertools import accumulate

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE = 4096
"""Words of a program; a row of constants is a multiple of it."""
_TYPES = {torch.int8: tl.int8, torch.int16: tl.int16, torch.int32: tl.int32}


@triton.jit
def _position_constant(place, GOLDEN: tl.constexpr, MIX: tl.constexpr):
    """The odd constant of a position in its row; shifts keep the sign."""
    mixed = (place + 1) * GOLDEN
    mixed = (mixed ^ (mixed >> 32)) * MIX
    return (mixed ^ (mixed >> 29)) | 1


@triton.jit
def _row_constant(row, GOLDEN: tl.constexpr, MIX: tl.constexpr):
    """The odd constant of a row, 1 for the first; the masks take the sign out of the shifts."""
    mixed = row * GOLDEN
    mixed = (mixed ^ ((mixed >> 29) & 0x7FFFFFFFF)) * MIX
    return tl.where(row == 0, 1, (mixed ^ ((mixed >> 32) & 0xFFFFFFFF)) | 1)


@triton.jit
def _sum_kernel(
    addresses, counts, firsts, owners, sums,
    WORD: tl.constexpr, TABLE: tl.constexpr, TILE: tl.constexpr,
    GOLDEN: tl.constexpr, MIX: tl.constexpr,
):  # fmt: skip
    """A tile of one tensor's words, times their constants."""
    program = tl.program_id(0).to(tl.int64)
    tensor = tl.load(owners + program)
    start = (program - tl.load(firsts + tensor)) * TILE
    place = start + tl.arange(0, TILE)
    words = tl.load(addresses + tensor).to(tl.pointer_type(WORD))
    word = tl.load(words + place, mask=place < tl.load(counts + tensor), other=0).to(tl.int64)
    total = tl.sum(word * _position_constant(place % TABLE, GOLDEN, MIX), axis=0)
    tl.atomic_add(sums + tensor, total * _row_constant(start // TABLE, GOLDEN, MIX))


def digest_sums(
    tensors: Sequence[Tensor], word: torch.dtype, *, table: int, golden: int, mix: int
) -> Tensor:
    """The sum over the words of each tensor, `[tensors]` in int64; all contiguous, on one device.

    `table` is the positions of a row of constants, `golden` and `mix` are what makes them.
    """
    assert table % _TILE == 0, "a tile must not cross a row of constants"
    assert all(tensor.is_contiguous() for tensor in tensors)
    counts = [tensor.numel() * tensor.element_size() // word.itemsize for tensor in tensors]
    tiles = [triton.cdiv(count, _TILE) for count in counts]
    starts = [0, *accumulate(tiles)]
    addresses = [tensor.data_ptr() for tensor in tensors]
    device = tensors[0].device
    rows = torch.tensor([addresses, counts, starts[:-1], tiles]).to(device)
    owners = torch.repeat_interleave(rows[3], output_size=starts[-1])
    sums = torch.zeros(len(tensors), dtype=torch.int64, device=device)
    if starts[-1]:
        _sum_kernel[(starts[-1],)](
            *rows[:3], owners, sums,
            WORD=_TYPES[word], TABLE=table, TILE=_TILE, GOLDEN=golden, MIX=mix, num_warps=8,
        )  # fmt: skip
    return sums
