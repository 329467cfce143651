"""One token sampled from each row of logits on CUDA, in two kernels.

Nothing here waits for the device, so a CUDA graph can hold it.
"""
# pyright: reportMissingImports=false, reportIndexIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from luyen.models.cuda.logprob_kernels import (
    CHUNK,
    OPTIONS,
    chunk_count,
    chunk_sums,
    inverse_temperature,
    log_probability,
    merged,
    slot_count,
    values,
    weights,
)

_STEP = tl.constexpr(-7046029254386353131)
_MIX_1 = tl.constexpr(-4658895280553007687)
_MIX_2 = tl.constexpr(-7723592293110705685)
"""The constants of luyen.base.seeds as signed 64-bit integers."""


@triton.jit
def _uniform(key, position):
    """`luyen.base.seeds.uniform` in float64; the masks make shifts of signed numbers logical."""
    z = key + (position + 1) * _STEP
    z = (z ^ ((z >> 30) & 0x3FFFFFFFF)) * _MIX_1
    z = (z ^ ((z >> 27) & 0x1FFFFFFFFF)) * _MIX_2
    z = z ^ ((z >> 31) & 0x1FFFFFFFF)
    return ((z >> 32) & 0xFFFFFFFF).to(tl.float64) * 2.0**-32


@triton.jit
def _place_inside(x, highest, aim, is_greedy):
    """Index inside a chunk: of its maximum, or the first whose running weight exceeds `aim`.

    An `aim` that rounding carried past the end means the last index that has weight.
    """
    index = tl.arange(0, CHUNK)
    weight = weights(x, highest)
    running = tl.cumsum(weight.to(tl.float64), 0)
    sampled = tl.sum((running <= tl.maximum(aim, 0.0)).to(tl.int32), 0)
    sampled = tl.minimum(sampled, tl.max(tl.where(weight > 0, index, 0), 0))
    likeliest = tl.min(tl.where(x == highest, index, CHUNK - 1), 0)
    return tl.where(is_greedy, likeliest, sampled)


@triton.jit
def _sample_kernel(
    logits,
    stride,
    width,
    vocabulary,
    scale,
    softcap,
    temperatures,
    greedy,
    keys,
    positions,
    tops,
    masses,
    tokens,
    logps,
    chunks,
    SLOTS: tl.constexpr,
):
    """One token of one row: the chunk by the running mass of chunks, then the place inside it."""
    row = tl.program_id(0).to(tl.int64)
    is_greedy = tl.load(greedy + row) != 0
    inverse = inverse_temperature(temperatures, 1, greedy, row)
    highest, factor, mass, top = merged(tops, masses, row, chunks, SLOTS)
    slot = tl.arange(0, SLOTS)
    total = tl.sum(mass, 0)
    target = _uniform(tl.load(keys + row), tl.load(positions + row)) * total
    sampled = tl.sum((tl.cumsum(mass, 0) <= target).to(tl.int32), 0)
    likeliest = tl.min(tl.where(highest == top, slot, SLOTS - 1), 0)
    # Numbers that are no numbers compare as false: the chunk they point at must still exist.
    chunk = tl.minimum(tl.where(is_greedy, likeliest, sampled), chunks - 1)
    aim = target - tl.sum(tl.where(slot < chunk, mass, 0.0), 0)
    aim = aim / tl.sum(tl.where(slot == chunk, factor, 0.0), 0).to(tl.float64)
    peak = tl.max(tl.where(slot == chunk, highest, float("-inf")), 0)
    start = logits + row * stride
    columns = chunk * CHUNK + tl.arange(0, CHUNK)
    x = values(start, columns, width, vocabulary, scale, softcap, inverse)
    token = chunk * CHUNK + _place_inside(x, peak, aim, is_greedy)
    token = tl.minimum(token, vocabulary - 1)
    logp = log_probability(start, token, scale, softcap, inverse, top, tl.log(total))
    tl.store(tokens + row, token)
    tl.store(logps + row, logp)


def sample_rows(
    logits: Tensor,
    keys: Tensor,
    positions: Tensor,
    temperature: Tensor,
    greedy: Tensor,
    *,
    vocabulary: int,
    scale: float,
    softcap: float | None,
    out_tokens: Tensor,
    out_logps: Tensor,
) -> None:
    """Sample a token for each row, with the uniform number of its key and position.

    A token of probability 0 is never sampled. Greedy rows take the first of their likeliest tokens,
    at temperature 1. A row with NaN gives some id of the vocabulary and a NaN log-probability.
    `keys` and `positions` are int64, `temperature` float32 and `greedy` bool, all `[rows]`.
    """
    rows, width = logits.shape
    marks = greedy.view(torch.uint8)
    assert temperature.shape == greedy.shape == keys.shape == positions.shape == (rows,)
    form = {"vocabulary": vocabulary, "scale": scale, "softcap": softcap}
    highest, masses, *_ = chunk_sums(logits, temperature, marks, **form)
    if rows == 0:
        return
    _sample_kernel[(rows,)](
        logits,
        logits.stride(0),
        width,
        vocabulary,
        scale,
        softcap,
        temperature,
        marks,
        keys,
        positions,
        highest,
        masses,
        out_tokens,
        out_logps,
        chunk_count(vocabulary),
        slot_count(vocabulary),
        **OPTIONS,
    )
