"""Packed batches: concatenated sequences with streams of numbers per token."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import final

import numpy as np
import torch
from torch import Tensor

from luyen.algorithms.layout import Layout


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedBatch:
    """Sequences of one optimizer step, or some of them.

    Example:
        >>> batch = pack([[1, 2, 3], [4, 5]], masks=[[0, 1, 1], [0, 1]], groups=[0, 0])
        >>> batch.take([1]).tokens.tolist(), batch.take([1]).layout.mask.tolist()
        ([4, 5], [False, True])
    """

    tokens: Tensor
    """`[tok]` token ids."""
    lengths: tuple[int, ...]
    """Tokens of each sequence, prompt included."""
    layout: Layout
    """Offsets of the sequences, the mask of trained tokens, and the group of each sequence."""
    streams: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])
    """Numbers per token by name: `old_logp`, `ref_logp`, `advantages`, ..."""
    branch_of: tuple[int, ...] = ()
    """Rollout that each sequence is a branch of; empty: every sequence is a whole rollout."""

    @property
    def rollouts(self) -> Layout:
        """The layout by rollout: adjacent branches of a rollout are one sequence.

        Used for everything per rollout, such as group baselines and weights of the loss.

        Example:
            >>> batch = pack([[1, 2], [1, 3], [1]], masks=[[0, 1], [0, 1], [0]], groups=[0, 0, 0])
            >>> replace(batch, branch_of=(0, 0, 1)).rollouts.offsets.tolist()
            [0, 4, 5]
        """
        of = self.branch_of
        first = [i for i in range(len(of)) if i == 0 or of[i] != of[i - 1]]
        if len(first) == len(of):
            return self.layout
        start = torch.tensor(first, device=self.tokens.device)
        offsets = torch.cat((self.layout.offsets[start], self.layout.offsets[-1:]))
        return Layout(mask=self.layout.mask, offsets=offsets, groups=self.layout.groups[start])

    def take(self, sequences: Sequence[int], index: Tensor | None = None) -> "PackedBatch":
        """A batch of these sequences, in this order; `index` are their `positions`, if known."""
        index = self.positions(sequences) if index is None else index
        lengths = tuple(self.lengths[i] for i in sequences)
        chosen = torch.tensor(list(sequences), dtype=torch.int64, device=self.tokens.device)
        groups = self.layout.groups[chosen]
        return PackedBatch(
            tokens=self.tokens[index],
            lengths=lengths,
            layout=make_layout(self.layout.mask[index], lengths, groups),
            streams={name: stream[index] for name, stream in self.streams.items()},
            branch_of=tuple(self.branch_of[i] for i in sequences) if self.branch_of else (),
        )

    def positions(self, sequences: Sequence[int]) -> Tensor:
        """Index of every token of these sequences."""
        offsets = [0, *itertools.accumulate(self.lengths)]
        lengths = flat_tensor((self.lengths[i] for i in sequences), torch.int64)
        starts = flat_tensor((offsets[i] for i in sequences), torch.int64)
        ends = lengths.cumsum(0)
        moved = (starts - ends + lengths).repeat_interleave(lengths)
        return (torch.arange(len(moved)) + moved).to(self.tokens.device)

    def to(self, device: torch.device) -> "PackedBatch":
        """The batch on a device; the same object if it is there already."""
        if self.tokens.device == device:
            return self
        layout = self.layout
        return replace(
            self,
            tokens=self.tokens.to(device),
            layout=Layout(
                mask=layout.mask.to(device),
                offsets=layout.offsets.to(device),
                groups=layout.groups.to(device),
            ),
            streams={name: stream.to(device) for name, stream in self.streams.items()},
        )

    def labels(self) -> list[int]:
        """The group of each sequence."""
        return self.layout.groups.tolist()

    def with_streams(self, **streams: Tensor) -> "PackedBatch":
        """The batch with additional streams."""
        return replace(self, streams={**self.streams, **streams})

    def scatter(self, on_mask: Tensor) -> Tensor:
        """Numbers of the trainable tokens, in order, as a `[tok]` stream; 0 at the rest."""
        stream = torch.zeros(self.tokens.shape, dtype=on_mask.dtype, device=on_mask.device)
        return stream.masked_scatter(self.layout.mask, on_mask)


def make_layout(mask: Tensor, lengths: Sequence[int], groups: Tensor) -> Layout:
    """The layout of sequences of these lengths."""
    offsets = torch.tensor([0, *lengths]).cumsum(0).to(mask.device)
    return Layout(mask=mask, offsets=offsets, groups=groups)


_TYPES = {torch.bool: np.bool_, torch.int64: np.int64, torch.float32: np.float32}


def flat_tensor(numbers: Iterable[float], dtype: torch.dtype) -> Tensor:
    """The numbers as a tensor, several times faster than `torch.tensor` of a list.

    Example:
        >>> flat_tensor([1, 2], torch.int64)
        tensor([1, 2])
    """
    return torch.from_numpy(np.fromiter(numbers, _TYPES[dtype]))


def pack(
    sequences: Sequence[Sequence[int]],
    *,
    masks: Sequence[Sequence[int]],
    groups: Sequence[int],
    device: torch.device | str = "cpu",
) -> PackedBatch:
    """Concatenate sequences to a batch. The first token of a sequence is never trained."""
    lengths = tuple(len(sequence) for sequence in sequences)
    mask = torch.from_numpy(np.frombuffer(bytearray().join(map(bytes, masks)), np.bool_))
    assert not any(row and row[0] for row in masks), "the first token cannot be trained"
    return PackedBatch(
        tokens=flat_tensor(itertools.chain.from_iterable(sequences), torch.int64).to(device),
        lengths=lengths,
        layout=make_layout(mask.to(device), lengths, torch.tensor(list(groups), device=device)),
    )


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OfflineBatch:
    """The batch of one optimizer step of an offline run: a pure function of its rows.

    Example:
        >>> from luyen.engine.batch import pack
        >>> pair = pack([[1, 2], [1, 3]], masks=[[0, 1], [0, 1]], groups=[0, 0])
        >>> numbers = {"margins": torch.tensor([0.5])}
        >>> offline_batch = OfflineBatch(rows=(7,), batch=pair, numbers=numbers)
        >>> sorted(offline_batch.tensors())
        ['batch/lengths', 'batch/mask', 'batch/tokens', 'margins']
    """

    rows: tuple[int, ...]
    """Indices of the training rows; those of validation rows count from -1 downwards."""
    sequences: tuple[int, ...] = ()
    """Sequences of each row; empty: one each, or two each if rows are pairs."""
    batch: PackedBatch
    """The trained sequences, in the order of the rows; of a pair, the chosen one first."""
    aside: Mapping[str, PackedBatch] = field(default_factory=dict[str, PackedBatch])
    """Sequences that are only scored, by purpose."""
    numbers: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])
    """Other values of the rows by name, one number per row or per sequence."""

    def by_row(self, numbers: Tensor) -> list[Tensor]:
        """Numbers of the sequences, row by row."""
        each = len(numbers) // len(self.rows)
        return list(numbers.split(self.sequences or (each,) * len(self.rows)))

    def to(self, device: torch.device) -> "OfflineBatch":
        """The batch on a device."""
        return replace(
            self,
            batch=self.batch.to(device),
            aside={name: batch.to(device) for name, batch in self.aside.items()},
            numbers={name: x.to(device) for name, x in self.numbers.items()},
        )

    def tensors(self) -> dict[str, Tensor]:
        """All its tensors by name, without the row indices."""
        found = dict(self.numbers)
        for name, batch in {"batch": self.batch, **self.aside}.items():
            found[f"{name}/tokens"], found[f"{name}/mask"] = batch.tokens, batch.layout.mask
            found[f"{name}/lengths"] = torch.tensor(batch.lengths)
            found |= {f"{name}/{key}": stream for key, stream in batch.streams.items()}
        return found
