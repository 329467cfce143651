"""The bookkeeping of a decode step in two kernels, where PyTorch would launch two dozen."""
# pyright: reportMissingImports=false, reportIndexIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

_PAGE = tl.constexpr(64)


@triton.jit
def _begin_kernel(
    active, lengths, tables, width, places, slots, counts, rows, ROWS: tl.constexpr
):  # fmt: skip
    """Where each row's new token goes, and how many keys it then has."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    mask = row < rows
    is_active = tl.load(active + row, mask=mask, other=0) != 0
    place = tl.where(is_active, tl.load(lengths + row, mask=mask, other=0), 0)
    page = tl.load(tables + row.to(tl.int64) * width + place // _PAGE, mask=mask, other=0)
    slot = page.to(tl.int64) * _PAGE + place % _PAGE
    tl.store(places + row, place, mask=mask)
    tl.store(slots + row, tl.where(is_active, slot, -1), mask=mask)
    tl.store(counts + row, tl.where(is_active, place + 1, 0).to(tl.int32), mask=mask)


@triton.jit
def _end_kernel(
    sampled_tokens, sampled_logps, tokens, lengths, num_generated, limits, active, stops, tick,
    out_tokens, out_logps, width, rows,
    STOPS: tl.constexpr, IS_CACHED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Record the sampled tokens. One program: every row reads the counter before it advances."""
    row = tl.arange(0, ROWS)
    mask = row < rows
    step = tl.load(tick)
    token = tl.load(sampled_tokens + row, mask=mask, other=0)
    tl.store(out_tokens + step * width + row, token, mask=mask)
    logp = tl.load(sampled_logps + row, mask=mask, other=0.0)
    tl.store(out_logps + step * width + row, logp, mask=mask)
    is_active = tl.load(active + row, mask=mask, other=0) != 0
    tl.store(tokens + row, token, mask=mask & is_active)
    if IS_CACHED:
        length = tl.load(lengths + row, mask=mask, other=0)
        tl.store(lengths + row, length + 1, mask=mask & is_active)
    count = tl.load(num_generated + row, mask=mask, other=0) + is_active.to(tl.int64)
    tl.store(num_generated + row, count, mask=mask)
    goes_on = is_active & (count < tl.load(limits + row, mask=mask, other=0))
    for index in tl.static_range(STOPS):
        goes_on &= token != tl.load(stops + row * STOPS + index, mask=mask, other=-1)
    tl.store(active + row, goes_on.to(tl.uint8), mask=mask)
    tl.debug_barrier()
    tl.store(tick, step + 1)


def begin_step(active: Tensor, lengths: Tensor, tables: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Place, slot and number of keys of each row's new token; a resting row: 0, -1 and 0."""
    rows = active.shape[0]
    places, slots = torch.empty_like(lengths), torch.empty_like(lengths)
    counts = torch.empty(rows, dtype=torch.int32, device=active.device)
    _begin_kernel[(triton.cdiv(rows, 128),)](
        active.view(torch.uint8), lengths, tables, tables.stride(0), places, slots, counts, rows,
        ROWS=128, num_warps=4,
    )  # fmt: skip
    return places, slots, counts


def end_step(
    sampled_tokens: Tensor,
    sampled_logps: Tensor,
    *,
    tokens: Tensor,
    lengths: Tensor,
    num_generated: Tensor,
    limits: Tensor,
    active: Tensor,
    stops: Tensor,
    tick: Tensor,
    out_tokens: Tensor,
    out_logps: Tensor,
    is_cached: bool,
) -> None:
    """Record the sampled token of each row at `tick`, and deactivate the rows that have ended.

    `is_cached` says that the step stored a key for each active row.
    """
    rows = sampled_tokens.shape[0]
    _end_kernel[(1,)](
        sampled_tokens, sampled_logps, tokens, lengths, num_generated, limits,
        active.view(torch.uint8), stops, tick, out_tokens, out_logps, out_tokens.stride(0), rows,
        STOPS=stops.shape[1], IS_CACHED=is_cached, ROWS=triton.next_power_of_2(rows), num_warps=8,
    )  # fmt: skip
