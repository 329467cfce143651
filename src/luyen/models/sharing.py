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
    own: tuple[int, ...]
    """Tokens of each sequence that are not copies of an earlier one's."""
    copies: tuple[tuple[Tensor, Tensor], ...]
    """(distinct tokens `[n]`, all their packed places `[n, copies]`) of tokens that stand at
    several places, those with equally many places together."""

    @property
    def saved(self) -> float:
        """Share of the tokens that need not be computed."""
        return 1.0 - self.first.numel() / max(1, self.place.numel())


def share_prompts(tokens: Tensor, lengths: Sequence[int], mask: Tensor) -> Sharing:
    """Find the prompts that several sequences begin with; a prompt ends before the first True."""
    ids, splits = tokens.cpu(), _splits(lengths, mask.cpu())
    place: list[Tensor] = []
    first: list[Tensor] = []
    known: dict[bytes, tuple[int, list[int]]] = {}
    own: list[int] = []
    start = distinct = 0
    for length, split in zip(lengths, splits, strict=True):
        prompt = ids[start : start + split].numpy().tobytes()
        begin = split if prompt in known else 0
        if begin:
            place.append(torch.arange(known[prompt][0], known[prompt][0] + split))
        known.setdefault(prompt, (distinct, []))[1].append(start)
        own.append(length - begin)
        place.append(torch.arange(distinct, distinct + own[-1]))
        first.append(torch.arange(start + begin, start + length))
        distinct += own[-1]
        start += length
    device = tokens.device
    width = ids.element_size()
    prompts = [(at, len(prompt) // width, starts) for prompt, (at, starts) in known.items()]
    return Sharing(
        place=_joined(place, device),
        first=_joined(first, device),
        own=tuple(own),
        copies=_copies(prompts, device),
    )


def _copies(
    prompts: list[tuple[int, int, list[int]]], device: torch.device
) -> tuple[tuple[Tensor, Tensor], ...]:
    """From (first distinct token, length, packed starts) of each prompt."""
    found: dict[int, tuple[list[Tensor], list[Tensor]]] = {}
    for at, length, starts in prompts:
        if len(starts) > 1 and length:
            distinct, places = found.setdefault(len(starts), ([], []))
            distinct.append(torch.arange(at, at + length))
            places.append(torch.arange(length)[:, None] + torch.tensor(starts)[None, :])
    return tuple((_joined(a, device), _joined(b, device)) for a, b in found.values())


def _splits(lengths: Sequence[int], mask: Tensor) -> list[int]:
    """Tokens of each sequence before its first True."""
    sizes = torch.tensor(lengths, dtype=torch.int64)
    ends = sizes.cumsum(0)
    starts = ends - sizes
    # A sequence without one finds that of a later sequence, or the end of all.
    marks = torch.cat([mask.nonzero()[:, 0], ends[-1:]])
    first = marks[torch.searchsorted(marks, starts)]
    return (torch.minimum(first, ends) - starts).tolist()


def _joined(parts: list[Tensor], device: torch.device) -> Tensor:
    return (
        torch.cat(parts).to(device) if parts else torch.empty(0, dtype=torch.int64, device=device)
    )
