"""Segments of a packed batch: which queries see which keys. No triton here."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import final

import torch
from torch import Tensor


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Segments:
    """Ranges of queries, each with its range of keys; the queries are the last of these positions.

    Query `i` of `n` sees the keys `0..m - n + i` of `m`. Ranges of queries do not overlap; ranges
    of keys may, and segments with equal ranges share keys.

    Example:
        Three queries that begin a sequence, and the last of a sequence of five.

        >>> found = Segments.packed((3, 1), (3, 5))
        >>> found.key_starts.tolist(), found.max_query, found.key_ends().tolist()
        ([0, 3], 3, [0, 3, 8])
    """

    query_starts: Tensor
    """First query of each segment; int32, like the next three."""
    key_starts: Tensor
    """First key of each segment; of no meaning where keys are paged."""
    query_lengths: Tensor
    """Queries of each segment."""
    key_lengths: Tensor
    """Keys of each segment."""
    max_query: int
    """No segment has more queries."""
    max_key: int
    """No segment has more keys."""
    is_packed: bool = False
    """Whether queries and keys lie segment after segment, without gaps, in this order."""

    @classmethod
    def packed(
        cls,
        query_lengths: Sequence[int],
        key_lengths: Sequence[int] | None = None,
        *,
        device: torch.device | str = "cpu",
    ) -> "Segments":
        """Segments that lie one after the other; without `key_lengths`, whole sequences."""
        keys = query_lengths if key_lengths is None else key_lengths
        query_starts, key_starts = ([0, *accumulate(n)][:-1] for n in (query_lengths, keys))
        table = torch.tensor([query_starts, key_starts, query_lengths, keys], dtype=torch.int32)
        table = table.to(device)
        return cls(
            query_starts=table[0],
            key_starts=table[1],
            query_lengths=table[2],
            key_lengths=table[3],
            max_query=max(query_lengths, default=0),
            max_key=max(keys, default=0),
            is_packed=True,
        )

    def ranges(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Starts of queries and keys, then their lengths."""
        return self.query_starts, self.key_starts, self.query_lengths, self.key_lengths

    def query_ends(self) -> Tensor:
        """0 and the end of each segment's queries; for packed segments."""
        return _ends(self.query_lengths)

    def key_ends(self) -> Tensor:
        """0 and the end of each segment's keys; for packed segments."""
        return _ends(self.key_lengths)


def _ends(lengths: Tensor) -> Tensor:
    ends = torch.zeros(lengths.numel() + 1, dtype=torch.int32, device=lengths.device)
    torch.cumsum(lengths, 0, dtype=torch.int32, out=ends[1:])
    return ends
