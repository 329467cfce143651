"""Which running rows hold common pages, as tensors that a captured graph reads.

Rows that were forked from one prompt hold its full pages together. They are a group for as long as
two of them run. Reading common pages together changes the order of sums, so it is for engines of
which no exactness is asked.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import final

import torch

from luyen.models.paged import PAGE, Groups
from luyen.rollout.native.paged.seats import Seat

_WIDEST = 64
"""Rows of a group at most; more of them make several groups."""
_WORTH_BYTES = 128 << 20
"""Bytes a layer must not read again before it pays on an H200: its cache holds less than that."""


def pays(*, saved_keys: int, key_bytes: int) -> bool:
    """Whether groups are faster that spare a layer so many keys, each of so many bytes.

    Example:
        >>> [pays(saved_keys=n, key_bytes=768) for n in (32 * 7 * 256, 32 * 7 * 1024)]
        [False, True]
    """
    return saved_keys * key_bytes >= _WORTH_BYTES


def families(seats: Sequence[Seat]) -> list[list[int]]:
    """Rows that hold common pages, two or more each, in the order of the rows."""
    found: dict[int, list[int]] = {}
    for row, seat in enumerate(seats):
        if seat.shared and not seat.is_over:
            # A page has one owner or the rows of one prompt: the first tells who they are.
            found.setdefault(seat.pages[0], []).append(row)
    return [rows for rows in found.values() if len(rows) > 1]


def cut(rows: Sequence[int], most: int) -> list[list[int]]:
    """Nearly equal parts of at most `most` rows.

    Example:
        >>> cut([3, 4, 5, 6, 7], 4)
        [[3, 4, 5], [6, 7]]
    """
    parts = -(-len(rows) // most)
    size, longer = divmod(len(rows), parts)
    starts = [i * size + min(i, longer) for i in range(parts + 1)]
    return [list(rows[a:b]) for a, b in pairwise(starts)]


@final
class RowGroups:
    """Groups of the device's rows; their tensors stay where they are."""

    def __init__(self, rows: int, *, device: torch.device) -> None:
        self._members = torch.full(
            (max(1, rows // 2), _WIDEST), -1, dtype=torch.int32, device=device
        )
        self._shared = torch.zeros(rows, dtype=torch.int32, device=device)
        self._widest = 0
        self.most = 0
        """Rows of a group at most, as a power of two; 0: reading together would not pay."""

    def arrange(self, seats: Sequence[Seat], *, key_bytes: int) -> None:
        """Take down who belongs together now; to be called whenever rows come, go or move.

        `key_bytes` is what a token leaves behind in a layer. `most` does not shrink while rows run:
        every other number needs graphs of its own.
        """
        lines = [part for rows in families(seats) for part in cut(rows, _WIDEST)]
        saved = sum((len(line) - 1) * seats[line[0]].shared * PAGE for line in lines)
        if not seats:
            self._widest = 0
        self.most = 0
        if not pays(saved_keys=saved, key_bytes=key_bytes):
            return
        longest = max(len(line) for line in lines)
        self._widest = max(self._widest, 1 << (longest - 1).bit_length())
        self.most = self._widest
        self._write(seats, lines)

    def of(self, rows: int, most: int) -> Groups:
        """The groups among the first `rows` rows, as a step with up to `most` members reads them.

        Every group has two rows or more, so that half as many groups as rows are enough.
        """
        return Groups(members=self._members[: max(1, rows // 2), :most], shared=self._shared[:rows])

    def _write(self, seats: Sequence[Seat], lines: Sequence[list[int]]) -> None:
        """One transfer: the lines of the groups, then the shared keys of every row."""
        shared = [0] * len(seats)
        for line in lines:
            for row in line:
                shared[row] = seats[row].shared * PAGE
        flat = [row for line in lines for row in (*line, *[-1] * (self.most - len(line)))]
        device, count = self._shared.device, len(lines)
        sent = torch.tensor([*flat, *shared], dtype=torch.int32).to(device)
        self._members.fill_(-1)
        self._members[:count, : self.most] = sent[: len(flat)].view(count, self.most)
        self._shared.zero_()
        self._shared[: len(shared)] = sent[len(flat) :]
