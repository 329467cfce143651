"""Random attention problems: packed, in a poisoned cache, and answered in float64."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sliding": {"sliding": 40},
    "softcap": {"softcap": 3.0},
    "sinks": {"sinks": True},
    "all": {"sliding": 70, "softcap": 3.0, "sinks": True},
}
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}
NOWHERE = 2_000_000_000
"""A page number that must never be followed."""


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Case:
    """Sequences packed and paged. Example: `make_case("cpu", [3], (2, 1, 16), "plain")`."""

    lengths: tuple[int, ...]
    """Keys of each sequence."""
    query: Tensor
    """Packed, one query a token."""
    key: Tensor
    """Packed."""
    value: Tensor
    """Packed."""
    keys: Tensor
    """Paged; NaN where no sequence has a key."""
    values: Tensor
    """Paged; NaN where no sequence has a key."""
    tables: Tensor
    """Pages of each sequence."""
    slots: Tensor
    """Where each packed token lies in the cache."""
    scale: float
    """Of scores."""
    window: dict[str, Any]
    """Keyword arguments of every kernel."""

    def ends(self) -> list[int]:
        """The end of each sequence among the packed tokens."""
        return torch.tensor(self.lengths).cumsum(0).tolist()

    def every_position(self) -> tuple[Tensor, Tensor]:
        """Tables and lengths that decode every packed token."""
        device = self.query.device
        counts = torch.tensor(self.lengths, device=device)
        rows = torch.repeat_interleave(torch.arange(len(self.lengths), device=device), counts)
        places = torch.cat([torch.arange(1, n + 1, device=device) for n in self.lengths])
        return self.tables[rows], places.int()

    def expected(self, *, is_newest: bool = False) -> Tensor:
        """Every packed query's output, or that of the newest of each sequence."""
        parts: list[Tensor] = []
        for length, end in zip(self.lengths, self.ends(), strict=True):
            first = end - 1 if is_newest else end - length
            query = self.query[first:end].double()
            held = (x[end - length : end].double() for x in (self.key, self.value))
            parts.append(dense(query, *held, self.scale, **self.window))
        return torch.cat(parts)

    def packed(self) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value."""
        return self.query, self.key, self.value


def make_case(
    device: str,
    lengths: Sequence[int],
    shape: tuple[int, int, int],
    kind: str,
    dtype: torch.dtype | None = None,
) -> Case:
    """Random tokens of sequences; `shape` is heads, key heads, width."""
    heads, kv_heads, width = shape
    dtype = dtype or (torch.bfloat16 if device == "cuda" else torch.float32)
    make = torch.Generator().manual_seed(sum(lengths) + heads * width)
    tokens, pages = sum(lengths), [-(-n // 64) for n in lengths]
    query, key, value = (
        torch.randn(tokens, h, width, generator=make).to(device, dtype)
        for h in (heads, kv_heads, kv_heads)
    )
    order = torch.randperm(sum(pages) + 3, generator=make).int()
    tables = torch.full((len(lengths), max(pages) + 1), NOWHERE, dtype=torch.int32)
    slots: list[Tensor] = []
    for row, (count, length) in enumerate(zip(pages, lengths, strict=True)):
        tables[row, :count], order = order[:count], order[count:]
        place = torch.arange(length)
        slots.append(tables[row, place // 64].long() * 64 + place % 64)
    slot = torch.cat(slots).to(device)
    caches: list[Tensor] = []
    for new in (key, value):
        flat = torch.full((sum(pages) + 3, 64, kv_heads, width), torch.nan, dtype=dtype).to(device)
        flat.view(-1, kv_heads, width)[slot] = new
        caches.append(flat.transpose(1, 2).contiguous())
    window = dict(KINDS[kind])
    if "sinks" in window:
        window["sinks"] = torch.randn(heads, generator=make).to(device, dtype)
    return Case(
        lengths=tuple(lengths), query=query, key=key, value=value, keys=caches[0],
        values=caches[1], tables=tables.to(device), slots=slot, scale=width**-0.5, window=window,
    )  # fmt: skip


def dense(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    *,
    sliding: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention written out; the queries are the last positions of the keys."""
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    scores = torch.einsum("qhw,nhw->hqn", query, key) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    count, keys = scores.shape[1:]
    place = torch.arange(keys, device=query.device)
    distance = place[keys - count :, None] - place[None, :]
    seen = distance >= 0 if sliding is None else (distance >= 0) & (distance < sliding)
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(scores.dtype)[:, None, None].expand(-1, count, 1)], -1)
    return torch.einsum("hqn,nhw->qhw", scores.softmax(-1)[..., :keys], value)
