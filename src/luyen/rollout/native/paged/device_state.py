"""Device tensors of running rows and shared-prefix groups, read and written by CUDA graphs.

Decode steps need no host synchronisation: a row that sampled a stop token or its last token becomes
inactive on the device, until the host reads the round and removes it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import final

import torch
from torch import Tensor

from luyen.models.paged_attention import PAGE, Groups, sent
from luyen.rollout.native.paged.scheduler import ROUND, RunningSequence
from luyen.rollout.native.sampler import NextTokens, TruncationLimits
from luyen.rollout.native.sequences import padded, signed_key
from luyen.rollout.protocol import MOST_BARRED as BARRED
from luyen.rollout.protocol import MOST_TOP_LOGPROBS

_WIDEST = 64
"""Rows of a group at most; more of them make several groups."""
_WORTH_BYTES = 128 << 20
"""Bytes a layer must not read again before it pays on an H200: its cache holds less than that."""


def sharing_pays(*, saved_keys: int, key_bytes: int) -> bool:
    """Whether groups are faster that spare a layer so many keys, each of so many bytes.

    Example:
        >>> [sharing_pays(saved_keys=n, key_bytes=768) for n in (32 * 7 * 256, 32 * 7 * 1024)]
        [False, True]
    """
    return saved_keys * key_bytes >= _WORTH_BYTES


def shared_prefix_groups(sequences: Sequence[RunningSequence]) -> list[list[int]]:
    """Rows of the same prompt pages, two or more each, in the order of the rows."""
    found: dict[int, list[int]] = {}
    for row, sequence in enumerate(sequences):
        if sequence.shared and not sequence.is_over:
            # The last one: prompts that only begin alike have their first pages in common too.
            found.setdefault(sequence.pages[sequence.shared - 1], []).append(row)
    return [rows for rows in found.values() if len(rows) > 1]


def split_evenly(rows: Sequence[int], most: int) -> list[list[int]]:
    """Nearly equal parts of at most `most` rows.

    Example:
        >>> split_evenly([3, 4, 5, 6, 7], 4)
        [[3, 4, 5], [6, 7]]
    """
    parts = -(-len(rows) // most)
    size, longer = divmod(len(rows), parts)
    starts = [i * size + min(i, longer) for i in range(parts + 1)]
    return [list(rows[a:b]) for a, b in pairwise(starts)]


@final
class RowGroups:
    """Groups of rows that share prompt pages, as tensors at fixed addresses for captured graphs.

    Rows forked from one prompt share its full pages and are a group while two of them run. Reading
    shared pages together changes the order of sums, so it is for engines without exactness.
    """

    def __init__(self, rows: int, *, device: torch.device) -> None:
        self._members = torch.full(
            (max(1, rows // 2), _WIDEST), -1, dtype=torch.int32, device=device
        )
        self._shared = torch.zeros(rows, dtype=torch.int32, device=device)
        self._widest = 0
        self.most = 0
        """Rows of a group at most, as a power of two; 0: reading together would not pay."""

    def arrange(self, sequences: Sequence[RunningSequence], *, key_bytes: int) -> None:
        """Update the groups; to be called whenever rows are added, removed or moved.

        `key_bytes` is what a token leaves behind in a layer. `most` does not shrink while rows run:
        every other number needs graphs of its own.
        """
        lines = [
            part for rows in shared_prefix_groups(sequences) for part in split_evenly(rows, _WIDEST)
        ]
        saved = sum((len(line) - 1) * sequences[line[0]].shared * PAGE for line in lines)
        if not sequences:
            self._widest = 0
        self.most = 0
        if not sharing_pays(saved_keys=saved, key_bytes=key_bytes):
            return
        longest = max(len(line) for line in lines)
        self._widest = max(self._widest, 1 << (longest - 1).bit_length())
        self.most = self._widest
        self._write(sequences, lines)

    def of(self, rows: int, most: int) -> Groups:
        """The groups among the first `rows` rows, as a step with up to `most` members reads them.

        Every group has two rows or more, so that half as many groups as rows are enough.
        """
        return Groups(members=self._members[: max(1, rows // 2), :most], shared=self._shared[:rows])

    def _write(self, sequences: Sequence[RunningSequence], lines: Sequence[list[int]]) -> None:
        """One transfer: the lines of the groups, then the shared keys of every row."""
        shared = [0] * len(sequences)
        for line in lines:
            for row in line:
                shared[row] = sequences[row].shared * PAGE
        flat = [row for line in lines for row in (*line, *[-1] * (self.most - len(line)))]
        device, count = self._shared.device, len(lines)
        sent = torch.tensor([*flat, *shared], dtype=torch.int32).to(device)
        self._members.fill_(-1)
        self._members[:count, : self.most] = sent[: len(flat)].view(count, self.most)
        self._shared.zero_()
        self._shared[: len(shared)] = sent[len(flat) :]


_ALL = 1 << 62
"""As top-k: keep every token."""
_FEW_TOP = 5
"""Likeliest tokens that most requests are content with; each width is a graph of its own."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class StepNeeds:
    """What a step does besides sampling from the full softmax, for the rows that run.

    Example:
        >>> StepNeeds.of([]).top
        0
    """

    is_truncated: bool = False
    """Whether a row may truncate, or is constrained."""
    is_constrained: bool = False
    """Whether a row has a constraint: the host must know every token before the next step."""
    top: int = 0
    """Likeliest tokens that are reported; 0: none."""

    @classmethod
    def of(cls, sequences: Iterable[RunningSequence]) -> "StepNeeds":
        """The needs of those that are not over."""
        alive = [sequence for sequence in sequences if not sequence.is_over]
        most = max((s.row.request.sampling.top_logprobs for s in alive), default=0)
        width = _FEW_TOP if most <= _FEW_TOP else MOST_TOP_LOGPROBS
        return cls(
            is_truncated=any(sequence.may_truncate for sequence in alive),
            is_constrained=any(sequence.row.constraint is not None for sequence in alive),
            top=width if most > 0 else 0,
        )


@final
class RowState:
    """Decode state on the device; row `i` of every tensor is one sequence."""

    def __init__(
        self, rows: int, pages: int, stops: int, *, heads: int = 1, device: torch.device
    ) -> None:
        """`pages` is the most pages a row can have, `stops` the most stop tokens.

        `heads` is how many heads of keys a layer has: attention counts for each of them.
        """

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.rows = rows
        self.groups = RowGroups(rows, device=device)
        self.tables = zeros(rows, pages, dtype=torch.int32)
        self.tokens = zeros(rows)
        self.lengths = zeros(rows)
        self.generated = zeros(rows)
        self.limits = zeros(rows)
        self.keys = zeros(rows)
        # Inactive rows are sampled too, and must not divide by 0 or keep no token.
        self.temperature = zeros(rows, dtype=torch.float32) + 1.0
        self.top_p = zeros(rows, dtype=torch.float32) + 1.0
        self.min_p = zeros(rows, dtype=torch.float32)
        self.top_k = zeros(rows) + _ALL
        self.greedy = zeros(rows, dtype=torch.bool)
        self.active = zeros(rows, dtype=torch.bool)
        self.stops = zeros(rows, stops) - 1
        self.constrained = zeros(rows, dtype=torch.bool)
        self.allowed: Tensor | None = None
        """`[rows, vocabulary]` tokens that constraints allow next; None: no row had one yet."""
        self.floors = zeros(rows)
        self.barred = zeros(rows, BARRED) - 1
        self.tick = zeros(1)
        self.arrivals = zeros(rows * heads, dtype=torch.int32)
        self.out_tokens = zeros(ROUND, rows)
        self.out_logps = zeros(ROUND, rows, dtype=torch.float32)
        self.out_kept = zeros(ROUND, rows, dtype=torch.float32)
        self.out_top_ids = zeros(ROUND, rows, MOST_TOP_LOGPROBS)
        self.out_top_logps = zeros(ROUND, rows, MOST_TOP_LOGPROBS, dtype=torch.float32)

    def _per_row(self) -> tuple[Tensor, ...]:
        return (
            self.tables,
            self.tokens,
            self.lengths,
            self.generated,
            self.limits,
            self.keys,
            self.temperature,
            self.top_p,
            self.min_p,
            self.top_k,
            self.greedy,
            self.active,
            self.stops,
            self.floors,
            self.barred,
            self.constrained,
        )

    def reorder(self, order: Sequence[int]) -> None:
        """Row `order[i]` becomes row `i`; later rows become inactive."""
        index = sent(list(order), self.tokens.device, torch.int64)
        for tensor in self._per_row():
            tensor[: len(order)] = tensor.index_select(0, index)
        self.active[len(order) :] = False

    def place(self, first: int, sequences: Sequence[RunningSequence]) -> None:
        """Write sequences whose keys are cached into the rows from `first` on."""
        device, width, pages = self.tokens.device, self.stops.shape[1], self.tables.shape[1]
        whole: list[list[int]] = []
        real: list[list[float]] = []
        for sequence in sequences:
            row, sampling = sequence.row, sequence.row.request.sampling
            stops = [] if sampling.ignore_stop else sorted(sampling.stop_ids)[:width]
            is_cut = sampling.is_filtered
            top_k = sampling.top_k if sampling.top_k > 0 and is_cut else _ALL
            key = signed_key(row.request.keys[row.sample])
            head = [sequence.planned, len(row.tokens), sampling.max_new_tokens, key, top_k]
            head += [sampling.is_greedy, sampling.min_new_tokens if sampling.barred_ids else 0]
            head += [row.constraint is not None]
            head += [*padded(stops, width, -1), *padded(sorted(sampling.barred_ids), BARRED, -1)]
            whole.append([*head, *padded(sequence.pages, pages, 0)])
            scale = 1.0 if sampling.is_greedy else sampling.temperature
            top_p, min_p = (sampling.top_p, sampling.min_p) if is_cut else (1.0, 0.0)
            real.append([scale, top_p, min_p])
        integers = sent(whole, device, torch.int64)
        fractions = sent(real, device, torch.float32)
        here = slice(first, first + len(sequences))
        counters = (self.lengths, self.generated, self.limits, self.keys)
        single = (*counters, self.top_k, self.greedy, self.floors, self.constrained)
        for column, tensor in enumerate(single):
            tensor[here] = integers[:, column].to(tensor.dtype)
        for column, tensor in enumerate((self.temperature, self.top_p, self.min_p)):
            tensor[here] = fractions[:, column]
        first, last = len(single) + width, len(single) + width + BARRED
        self.stops[here] = integers[:, len(single) : first]
        self.barred[here] = integers[:, first:last]
        self.tables[here] = integers[:, last:].int()
        self.active[here] = True

    def is_truncated(self, here: slice) -> Tensor:
        """Which rows truncate at their next token."""
        is_filtered = (
            (self.top_k[here] < _ALL) | (self.top_p[here] < 1.0) | (self.min_p[here] > 0.0)
        )
        return is_filtered | self.constrained[here] | (self.generated[here] < self.floors[here])

    def truncation(self, here: slice) -> TruncationLimits:
        """Truncation limits of the rows at their next token."""
        is_early = (self.generated[here] < self.floors[here])[:, None]
        return TruncationLimits(
            top_k=self.top_k[here, None],
            top_p=self.top_p[here, None],
            min_p=self.min_p[here, None],
            barred=torch.where(is_early, self.barred[here], -1),
        )

    def allow(self, masks: Sequence[tuple[int, Tensor]], *, vocabulary: int) -> None:
        """Write what constraints allow next, as (row, mask); other rows may sample anything."""
        if self.allowed is None:
            size, device = (self.rows, vocabulary), self.tokens.device
            self.allowed = torch.ones(size, dtype=torch.bool, device=device)
        self.allowed.fill_(True)
        if masks:
            rows = sent([row for row, _ in masks], self.tokens.device, torch.int64)
            self.allowed[rows] = torch.stack([mask for _, mask in masks]).to(self.tokens.device)

    def set_pages(self, entries: Sequence[tuple[int, int, int]]) -> None:
        """Write (row, place in its table, page) entries."""
        if entries:
            row, place, page = sent(list(entries), self.tables.device).T
            self.tables[row, place] = page.int()

    def begin(self, here: slice) -> tuple[Tensor, Tensor, Tensor]:
        """Place, slot and number of keys of each row's new token; an inactive row: 0, -1 and 0."""
        active, lengths, tables = self.active[here], self.lengths[here], self.tables[here]
        if active.is_cuda:
            from luyen.models.cuda.decode_step import begin_step

            return begin_step(active, lengths, tables)
        place = torch.where(active, lengths, 0)
        page = tables.gather(1, (place // PAGE)[:, None])[:, 0]
        slots = torch.where(active, page * PAGE + place % PAGE, -1)
        return place, slots, torch.where(active, place + 1, 0).int()

    def accept(self, here: slice, sampled: NextTokens, *, is_cached: bool) -> None:
        """Record one sampled token of the rows in `here`, and deactivate those that ended.

        `is_cached` says that the step stored a key for each active row.
        """
        if sampled.kept is not None:
            self.out_kept[:, here].index_copy_(0, self.tick, sampled.kept[None])
        if sampled.top is not None:
            width = sampled.top.ids.shape[1]
            self.out_top_ids[:, here, :width].index_copy_(0, self.tick, sampled.top.ids[None])
            self.out_top_logps[:, here, :width].index_copy_(0, self.tick, sampled.top.logps[None])
        if self.tokens.is_cuda:
            from luyen.models.cuda.decode_step import end_step

            end_step(
                sampled.tokens,
                sampled.logps,
                tokens=self.tokens[here],
                lengths=self.lengths[here],
                num_generated=self.generated[here],
                limits=self.limits[here],
                active=self.active[here],
                stops=self.stops[here],
                tick=self.tick,
                out_tokens=self.out_tokens[:, here],
                out_logps=self.out_logps[:, here],
                is_cached=is_cached,
            )
            return
        active = self.active[here]
        self.out_tokens[:, here].index_copy_(0, self.tick, sampled.tokens[None])
        self.out_logps[:, here].index_copy_(0, self.tick, sampled.logps[None])
        self.tokens[here] = torch.where(active, sampled.tokens, self.tokens[here])
        self.lengths[here] += active & is_cached
        self.generated[here] += active
        is_stop = (self.stops[here] == sampled.tokens[:, None]).any(-1)
        self.active[here] = active & ~is_stop & (self.generated[here] < self.limits[here])
        self.tick += 1
