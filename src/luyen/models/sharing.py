"""Samples of one prompt share its tokens: the model reads a prompt once, not once a sample.

Only attention looks from a sample's tokens back at the shared ones; everything else in a decoder
works on single tokens. Values and gradients are those of the unshared batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sharing:
    """Which packed tokens are the same token.

    Example:
        Two sequences that begin with the prompt 7, 8.

        >>> tokens, mask = torch.tensor([7, 8, 1, 7, 8, 2]), torch.tensor([0, 0, 1, 0, 0, 1]).bool()
        >>> shared = share_prompts(tokens, (3, 3), mask)
        >>> shared.place.tolist(), shared.first.tolist()
        ([0, 1, 2, 0, 1, 3], [0, 1, 2, 5])
    """

    place: Tensor
    """For each packed token, its index among the distinct ones."""
    first: Tensor
    """For each distinct token, where it first stands in the packed batch."""

    @property
    def saved(self) -> float:
        """Share of the tokens that need not be computed."""
        return 1.0 - self.first.numel() / max(1, self.place.numel())


def share_prompts(tokens: Tensor, lengths: Sequence[int], mask: Tensor) -> Sharing:
    """Find the prompts that several sequences begin with; a prompt ends before the first True."""
    ids, trains = tokens.tolist(), mask.tolist()
    place: list[int] = []
    first: list[int] = []
    known: dict[tuple[int, ...], int] = {}
    start = 0
    for length in lengths:
        end = start + length
        split = next((i for i in range(start, end) if trains[i]), end)
        prompt = tuple(ids[start:split])
        if prompt not in known:
            known[prompt] = len(first)
            first += range(start, split)
        place += range(known[prompt], known[prompt] + len(prompt))
        place += range(len(first), len(first) + end - split)
        first += range(split, end)
        start = end
    device = tokens.device
    return Sharing(
        place=torch.tensor(place, dtype=torch.int64, device=device),
        first=torch.tensor(first, dtype=torch.int64, device=device),
    )
