"""Packed batches: concatenated sequences with streams of numbers per token, and their split.

A batch is split over data-parallel ranks and into micro-batches."""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import final

import numpy as np
import torch
from torch import Tensor

from luyen.algorithms.layout import Layout
from luyen.base.errors import UserError


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


ROUTES, REPLAYED_ROUTES = "routes", "replayed_routes"
"""Streams `[tok, layer, k]`: experts that the sampler chose, to compare with, or to use."""


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


# Splitting over data-parallel ranks and into micro-batches, and joining the results. Pure: the
# controller splits a batch, each rank computes its shard, and the controller joins the streams.

# Data-parallel split: tokens balanced, groups kept together if that costs little balance.

_SLACK = 1.1
"""Most tokens of a rank relative to the lower bound, when whole groups are kept together."""


def balance_by_tokens(
    lengths: Sequence[int], groups: Sequence[int], *, ranks: int
) -> list[list[int]]:
    """Indices of the sequences of each rank, ascending.

    Sequences of a group share their prompt, and are split only as far as the balance needs: whole
    groups are tried first, then ever smaller pieces. The fullest rank has at most 1.1 times the
    larger of mean and longest sequence, or, if no assignment achieves that, at most the mean and
    one sequence more. The result is deterministic.

    Example:
        >>> balance_by_tokens([4, 4, 3, 3], [0, 0, 1, 1], ranks=2)
        [[0, 2], [1, 3]]
        >>> balance_by_tokens([4, 4, 4, 4], [0, 0, 1, 1], ranks=2)
        [[0, 1], [2, 3]]
    """
    least = max(sum(lengths) / ranks, max(lengths, default=0))
    best: list[list[int]] = []
    fewest = float("inf")
    for limit in _limits(sum(lengths), ranks):
        assigned = _largest_first(lengths, _pieces(lengths, groups, limit), ranks)
        fullest = max(sum(lengths[i] for i in assignment) for assignment in assigned)
        if fullest < fewest:
            best, fewest = assigned, fullest
        if fewest <= _SLACK * least:
            break
    return best


def _limits(total: int, ranks: int) -> Iterator[int]:
    """Most tokens of a piece: a whole group, then fractions of a rank's mean, then one sequence."""
    yield total
    yield from (total // (ranks * parts) for parts in (1, 2, 4, 8))
    yield 0


def _pieces(lengths: Sequence[int], groups: Sequence[int], limit: int) -> list[list[int]]:
    """Groups, split into pieces of at most `limit` tokens; a sequence is never split."""
    pieces: list[list[int]] = []
    size: list[int] = []
    last: dict[int, int] = {}
    for index, (length, group) in enumerate(zip(lengths, groups, strict=True)):
        at = last.get(group)
        if at is None or size[at] + length > limit:
            last[group] = len(pieces)
            pieces.append([index])
            size.append(length)
        else:
            pieces[at].append(index)
            size[at] += length
    return pieces


def _largest_first(
    lengths: Sequence[int], pieces: Sequence[Sequence[int]], ranks: int
) -> list[list[int]]:
    """Assign each piece, the largest first, to the rank with the fewest tokens."""
    assignments: list[list[int]] = [[] for _ in range(ranks)]
    tokens = [0] * ranks
    sized = [(sum(lengths[i] for i in piece), piece) for piece in pieces]
    for size, piece in sorted(sized, key=lambda pair: (-pair[0], pair[1][0])):
        rank = min(range(ranks), key=lambda r: (tokens[r], r))
        assignments[rank] += piece
        tokens[rank] += size
    return [sorted(assignment) for assignment in assignments]


# Micro-batching: the sequences of each forward pass.


_FIELD = "actor_rollout_ref.actor.ppo_max_token_len_per_gpu"


def by_tokens(
    lengths: Sequence[int],
    *,
    budget: int,
    groups: Sequence[int] | None = None,
    ranks: int = 1,
    field: str = _FIELD,
) -> list[list[int]]:
    """Passes of at most `budget` tokens, by first-fit decreasing.

    Sequences of one group are in one pass if they fit, so that their prompt is computed once. A
    sequence longer than the budget is a UserError about `field`, of which the budget is `ranks`
    times the value.

    Example:
        >>> by_tokens([5, 3, 4, 2], budget=7)
        [[0, 3], [2, 1]]
        >>> by_tokens([5, 3, 4, 2], budget=7, groups=[0, 1, 1, 0])
        [[0, 3], [1, 2]]
    """
    if lengths and max(lengths) > budget:
        raise _too_long(max(lengths), budget // ranks, ranks, field)
    units = _units(lengths, budget, groups)
    sizes = [sum(lengths[i] for i in unit) for unit in units]
    passes: list[list[int]] = []
    room: list[int] = []
    for unit in sorted(range(len(units)), key=lambda u: (-sizes[u], units[u])):
        place = next((p for p, free in enumerate(room) if free >= sizes[unit]), None)
        if place is None:
            passes.append([])
            room.append(budget)
            place = len(passes) - 1
        passes[place] += units[unit]
        room[place] -= sizes[unit]
    return passes


def _too_long(length: int, value: int, ranks: int, field: str) -> UserError:
    """The error of a sequence that the ranks cannot compute, each with a budget of `value`."""
    shared = f", which {ranks} ranks compute together," if ranks > 1 else ""
    why = f"a sequence has {length} tokens{shared} and a pass may not be cut through it"
    least = -(-length // ranks)
    return UserError(field, value, why, f"set it to at least {least}, or shorten sequences")


def _units(lengths: Sequence[int], budget: int, groups: Sequence[int] | None) -> list[list[int]]:
    """Sequences that stay in one pass: a group, or as much of it as a pass holds."""
    units: list[list[int]] = []
    open_unit: dict[int, int] = {}
    for index, length in enumerate(lengths):
        label = index if groups is None else groups[index]
        unit = open_unit.get(label)
        if unit is None or sum(lengths[i] for i in units[unit]) + length > budget:
            open_unit[label] = len(units)
            units.append([index])
        else:
            units[unit].append(index)
    return units


def by_count(lengths: Sequence[int], *, size: int) -> list[list[int]]:
    """Passes of `size` sequences, in order.

    Example:
        >>> by_count([5, 3, 4], size=2)
        [[0, 1], [2]]
    """
    return [list(range(i, min(i + size, len(lengths)))) for i in range(0, len(lengths), size)]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatching:
    """Limit of a forward pass: tokens, or a number of sequences.

    Example:
        >>> MicroBatching(max_tokens=10).of([6, 5, 4])
        [[0, 2], [1]]
    """

    max_tokens: int | None = None
    """Most tokens of a pass; None: `sequences` is the limit."""
    sequences: int = 1
    """Sequences of a pass without `max_tokens`."""
    ranks: int = 1
    """Ranks that compute each pass together, and have `max_tokens` together."""

    def on_ranks(self, count: int) -> "MicroBatching":
        """The limit of ranks that compute each pass together: so many times the tokens.

        Example:
            >>> MicroBatching(max_tokens=10).on_ranks(2).max_tokens
            20
        """
        if self.max_tokens is None:
            return self
        return replace(self, max_tokens=count * self.max_tokens, ranks=count)

    def of(self, lengths: Sequence[int], groups: Sequence[int] | None = None) -> list[list[int]]:
        """Indices of the sequences of each pass; those of one group together if they fit."""
        if self.max_tokens is not None:
            return by_tokens(lengths, budget=self.max_tokens, groups=groups, ranks=self.ranks)
        return by_count(lengths, size=self.sequences)


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BatchShard:
    """One rank's part of a batch.

    Example:
        >>> from luyen.engine.batch import pack
        >>> whole = pack([[1, 2, 3], [4, 5]], masks=[[0, 1, 1], [0, 1]], groups=[0, 1])
        >>> [shard.positions.tolist() for shard in split_batch(whole, MicroBatching(), ranks=2)]
        [[0, 1, 2], [3, 4]]
    """

    batch: PackedBatch
    """The sequences of the rank, in the order of the whole batch."""
    passes: tuple[tuple[int, ...], ...]
    """Sequences of each pass, as indices into `batch`; empty for a dummy pass."""
    positions: Tensor
    """`[tok]` indices of the tokens of `batch` in the whole batch."""

    def to(self, device: torch.device) -> "BatchShard":
        """The shard on a device; the same object if it is there already."""
        batch = self.batch.to(device)
        return self if batch is self.batch else replace(self, batch=batch)


def split_batch(batch: PackedBatch, passes: MicroBatching, *, ranks: int) -> list[BatchShard]:
    """One shard for each rank, all with the same number of passes.

    Every sequence is in exactly one shard (`balance_by_tokens`), and no pass exceeds the limit of
    `passes`. With one rank the shard is the batch itself.
    """
    if ranks == 1:
        everything = torch.arange(len(batch.tokens), device=batch.tokens.device)
        cut = passes.of(batch.lengths, batch.labels())
        return [BatchShard(batch=batch, passes=tuple(map(tuple, cut)), positions=everything)]
    assigned = balance_by_tokens(batch.lengths, batch.labels(), ranks=ranks)
    places = [batch.positions(sequences) for sequences in assigned]
    batches = [batch.take(*assignment) for assignment in zip(assigned, places, strict=True)]
    cuts = [passes.of(part.lengths, part.labels()) if part.lengths else [] for part in batches]
    most = max(len(cut) for cut in cuts)
    return [
        BatchShard(
            batch=part,
            passes=(*map(tuple, cut), *[()] * (most - len(cut))),
            positions=positions,
        )
        for part, cut, positions in zip(batches, cuts, places, strict=True)
    ]


def join_shards(
    shards: Sequence[BatchShard], parts: Sequence[Mapping[str, Tensor]], like: PackedBatch
) -> dict[str, Tensor]:
    """Streams of the shards as streams of the whole batch `like`, on its device."""
    device = like.tokens.device
    if len(shards) == 1:
        return {name: stream.to(device) for name, stream in parts[0].items()}
    found: dict[str, Tensor] = {}
    for shard, part in zip(shards, parts, strict=True):
        for name, stream in part.items():
            if name not in found:
                found[name] = torch.zeros(like.tokens.shape, dtype=stream.dtype, device=device)
            found[name][shard.positions.to(device)] = stream.to(device)
    return found
