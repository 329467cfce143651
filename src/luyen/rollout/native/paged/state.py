"""Running rows as the device sees them: fixed tensors that a captured graph reads and writes.

The host never has to be asked between two decode steps: a row that drew a stop token or its last
token rests from then on, until the host hears of it and takes it out.
"""

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from luyen.rollout.native.running import Row
from luyen.rollout.native.sample import Limits

ROUND = 8
"""Decode steps between two looks at the results."""
_ALL = 1 << 62
"""As top-k: keep every token."""


@final
class RowState:
    """What decoding knows of each row; row `i` of every tensor is one sequence."""

    def __init__(self, rows: int, pages: int, stops: int, *, device: torch.device) -> None:
        """`pages` is the most pages a row can have, `stops` the most stop tokens."""

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.rows = rows
        self.tables = zeros(rows, pages, dtype=torch.int32)
        self.tokens = zeros(rows)
        self.lengths = zeros(rows)
        self.drawn = zeros(rows)
        self.limits = zeros(rows)
        self.keys = zeros(rows)
        self.temperature = zeros(rows, dtype=torch.float32)
        self.top_p = zeros(rows, dtype=torch.float32)
        self.min_p = zeros(rows, dtype=torch.float32)
        self.top_k = zeros(rows)
        self.greedy = zeros(rows, dtype=torch.bool)
        self.active = zeros(rows, dtype=torch.bool)
        self.stops = zeros(rows, stops) - 1
        self.tick = zeros(1)
        self.out_tokens = zeros(ROUND, rows)
        self.out_logps = zeros(ROUND, rows, dtype=torch.float32)
        self.out_kept = zeros(ROUND, rows, dtype=torch.float32)

    def _per_row(self) -> tuple[Tensor, ...]:
        return (
            self.tables,
            self.tokens,
            self.lengths,
            self.drawn,
            self.limits,
            self.keys,
            self.temperature,
            self.top_p,
            self.min_p,
            self.top_k,
            self.greedy,
            self.active,
            self.stops,
        )

    def reorder(self, order: Sequence[int]) -> None:
        """Row `order[i]` becomes row `i`; rows beyond them rest."""
        index = torch.tensor(list(order), dtype=torch.int64).to(self.tokens.device)
        for tensor in self._per_row():
            tensor[: len(order)] = tensor.index_select(0, index)
        self.active[len(order) :] = False

    def place(
        self, first: int, rows: Sequence[Row], lengths: Sequence[int], tables: Sequence[list[int]]
    ) -> None:
        """Put rows whose keys are cached at `first` and after: they draw next."""
        device, width, pages = self.tokens.device, self.stops.shape[1], self.tables.shape[1]
        whole: list[list[int]] = []
        real: list[list[float]] = []
        for row, length, table in zip(rows, lengths, tables, strict=True):
            asked = row.request.sampling
            stops = [] if asked.ignore_stop else sorted(asked.stop_ids)[:width]
            top_k = asked.top_k if asked.top_k > 0 and asked.is_truncated else _ALL
            key = row.request.keys[row.sample]
            head = [length, len(row.tokens), asked.max_new_tokens, _signed(key), top_k]
            head += [asked.is_greedy, *_padded(stops, width, -1), *_padded(table, pages, 0)]
            whole.append(head)
            is_cut = asked.is_truncated
            scale = 1.0 if asked.is_greedy else asked.temperature
            real.append([scale, asked.top_p if is_cut else 1.0, asked.min_p if is_cut else 0.0])
        integers = torch.tensor(whole, dtype=torch.int64).to(device)
        fractions = torch.tensor(real, dtype=torch.float32).to(device)
        here = slice(first, first + len(rows))
        for column, tensor in enumerate(
            (self.lengths, self.drawn, self.limits, self.keys, self.top_k, self.greedy)
        ):
            tensor[here] = integers[:, column].to(tensor.dtype)
        for column, tensor in enumerate((self.temperature, self.top_p, self.min_p)):
            tensor[here] = fractions[:, column]
        self.stops[here] = integers[:, 6 : 6 + width]
        self.tables[here] = integers[:, 6 + width :].int()
        self.active[here] = True

    def truncation(self, here: slice) -> Limits:
        """What the rows keep of their distributions."""
        return Limits(
            top_k=self.top_k[here, None],
            top_p=self.top_p[here, None],
            min_p=self.min_p[here, None],
        )

    def set_pages(self, entries: Sequence[tuple[int, int, int]]) -> None:
        """Write (row, place in its table, page) entries."""
        if entries:
            row, place, page = torch.tensor(list(entries)).T.to(self.tables.device)
            self.tables[row, place] = page.int()

    def accept(self, here: slice, tokens: Tensor, logps: Tensor, kept: Tensor | None) -> None:
        """Write down one draw of the rows in `here`, and let those rest that have ended."""
        active = self.active[here]
        self.out_tokens[:, here].index_copy_(0, self.tick, tokens[None])
        self.out_logps[:, here].index_copy_(0, self.tick, logps[None])
        if kept is not None:
            self.out_kept[:, here].index_copy_(0, self.tick, kept[None])
        self.tokens[here] = torch.where(active, tokens, self.tokens[here])
        self.drawn[here] += active
        is_stop = (self.stops[here] == tokens[:, None]).any(-1)
        self.active[here] = active & ~is_stop & (self.drawn[here] < self.limits[here])
        self.tick += 1


def _signed(key: int) -> int:
    """An unsigned 64-bit key as torch's int64 holds it."""
    return key - (1 << 64) if key >= 1 << 63 else key


def _padded(values: list[int], size: int, filler: int) -> list[int]:
    return values + [filler] * (size - len(values))
