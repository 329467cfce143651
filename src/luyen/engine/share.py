"""Sequences dealt out to data-parallel ranks, and what the ranks found put back in place.

Everything here is pure. Whoever holds a whole batch splits it, has every rank work on its share,
and joins what comes back.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor

from luyen.engine.batch import PackedBatch
from luyen.engine.deal import deal
from luyen.engine.passes import Passes


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Share:
    """What one rank does of a step.

    Example:
        >>> from luyen.engine.batch import pack
        >>> whole = pack([[1, 2, 3], [4, 5]], masks=[[0, 1, 1], [0, 1]], groups=[0, 1])
        >>> [share.positions.tolist() for share in split(whole, Passes(), ranks=2)]
        [[0, 1, 2], [3, 4]]
    """

    batch: PackedBatch
    """The sequences of the rank, in the order of the whole batch."""
    passes: tuple[tuple[int, ...], ...]
    """Sequences of each pass, as indices into `batch`; an empty pass keeps step with the others."""
    positions: Tensor
    """`[tok]` where the tokens of `batch` stand in the whole batch."""

    def to(self, device: torch.device) -> "Share":
        """The same share with its batch on a device; itself where it is there already."""
        batch = self.batch.to(device)
        return self if batch is self.batch else replace(self, batch=batch)


def split(batch: PackedBatch, passes: Passes, *, ranks: int) -> list[Share]:
    """One share for each rank, all with the same number of passes.

    Every sequence is in one share. Groups stay together as far as tokens can be balanced that way
    (`luyen.engine.deal`). No pass is above the budget of `passes`. With one rank the share is the
    batch itself, cut as `passes` cuts it.
    """
    if ranks == 1:
        everything = torch.arange(len(batch.tokens), device=batch.tokens.device)
        cut = passes.of(batch.lengths, batch.labels())
        return [Share(batch=batch, passes=tuple(map(tuple, cut)), positions=everything)]
    dealt = deal(batch.lengths, batch.labels(), ranks=ranks)
    places = [batch.positions(sequences) for sequences in dealt]
    batches = [batch.take(*hand) for hand in zip(dealt, places, strict=True)]
    cuts = [passes.of(part.lengths, part.labels()) if part.lengths else [] for part in batches]
    most = max(len(cut) for cut in cuts)
    return [
        Share(
            batch=part,
            passes=(*map(tuple, cut), *[()] * (most - len(cut))),
            positions=positions,
        )
        for part, cut, positions in zip(batches, cuts, places, strict=True)
    ]


def join(
    shares: Sequence[Share], parts: Sequence[Mapping[str, Tensor]], like: PackedBatch
) -> dict[str, Tensor]:
    """Streams of the shares as streams of the whole batch `like`, on its device."""
    device = like.tokens.device
    if len(shares) == 1:
        return {name: stream.to(device) for name, stream in parts[0].items()}
    found: dict[str, Tensor] = {}
    for share, part in zip(shares, parts, strict=True):
        for name, stream in part.items():
            if name not in found:
                found[name] = torch.zeros(like.tokens.shape, dtype=stream.dtype, device=device)
            found[name][share.positions.to(device)] = stream.to(device)
    return found
