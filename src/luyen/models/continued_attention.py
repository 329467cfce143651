"""Attention of tokens that continue sequences whose first keys and values are known.

Only the tokens after the known ones are computed. A query sums over the keys of its whole sequence
in the order in which it would if all tokens were computed together, so it gets the same bits where
exactness is promised.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, final

import torch
from torch import Tensor

from luyen.base.process_setup import padded_length
from luyen.models.attention import AttentionWindow, causal_attention, masked_attention
from luyen.models.packed_attention import KeyValueSink

_QUERIES = 16
"""Queries are padded to a multiple of this: a single one is multiplied by other code."""


class PrefixSource(Protocol):
    """Has the keys and values of tokens that were computed before."""

    def load(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values `[known tok, kv heads, width]`, sequence after sequence."""
        ...


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ContinuedSequence:
    """A sequence, of which the first tokens are known.

    Example:
        >>> ContinuedSequence(length=9, known=8).fresh
        1
    """

    length: int
    """Tokens of the sequence."""
    known: int
    """Tokens whose keys and values are known; fewer than all."""

    @property
    def fresh(self) -> int:
        """Tokens to compute."""
        return self.length - self.known

    @property
    def padded_queries(self) -> int:
        """Queries with padding; as many as keys where nothing is known."""
        if self.known == 0:
            return padded_length(self.length)
        return -(-self.fresh // _QUERIES) * _QUERIES


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Bucket:
    """Sequences with as many padded queries and padded keys as each other.

    Example:
        Made by `ContinuedContext.of`.
    """

    queries: Tensor
    """`[sequences, padded queries]` index among the computed tokens."""
    positions: Tensor
    """Their positions, the same shape."""
    keys: Tensor
    """`[sequences, padded keys]` index among all tokens of the sequences."""
    is_whole: bool
    """Whether all tokens are computed."""
    masks: dict[tuple[int | None, torch.dtype], Tensor] = field(
        default_factory=dict[tuple[int | None, torch.dtype], Tensor]
    )
    """By window and type, once made."""

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, window: AttentionWindow
    ) -> Tensor:
        """Output `[sequences x padded queries, heads, width]` of these sequences."""
        q, k, v = (
            x.index_select(0, where.flatten()).view(*where.shape, *x.shape[1:]).transpose(1, 2)
            for x, where in ((query, self.queries), (key, self.keys), (value, self.keys))
        )
        if self.is_whole:
            out = causal_attention(q, k, v, scale, window)
        else:
            # PyTorch's kernel adds its mask; converting one of booleans in every layer takes time.
            kind = q.dtype if window.is_fused else torch.bool
            out = masked_attention(q, k, v, self._mask(window.sliding, kind), scale, window)
        return out.transpose(1, 2).flatten(0, 1)

    def to(self, device: torch.device | str) -> "_Bucket":
        """The same on a device."""
        queries, positions, keys = (x.to(device) for x in (self.queries, self.positions, self.keys))
        return _Bucket(queries=queries, positions=positions, keys=keys, is_whole=self.is_whole)

    def _mask(self, sliding: int | None, dtype: torch.dtype) -> Tensor:
        """`[sequences, 1, padded queries, padded keys]`: which key a query sees.

        As booleans, or as numbers to add: 0 where it sees it.
        """
        if (sliding, dtype) not in self.masks:
            place = torch.arange(self.keys.shape[1], device=self.keys.device)
            seen = place <= self.positions[:, :, None]
            if sliding is not None:
                seen &= self.positions[:, :, None] - place < sliding
            if dtype != torch.bool:
                zeros = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
                seen = zeros.masked_fill_(~seen, -torch.inf)
            self.masks[sliding, dtype] = seen[:, None]
        return self.masks[sliding, dtype]


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ContinuedContext:
    """Packed tokens that continue known sequences; sequences with nothing known may be among them.

    Example:
        Made by `NativeEngine` for prompts whose beginning is cached.
    """

    buckets: tuple[_Bucket, ...]
    """Sequences by padded queries and keys."""
    order: Tensor
    """Index of each token of the sequences among the known and then the computed ones."""
    back: Tensor
    """Where each computed token stands among the outputs of all buckets."""
    known: PrefixSource
    """The known keys and values."""
    sink: KeyValueSink
    """Takes keys and values of the whole sequences."""

    @classmethod
    def of(
        cls,
        sequences: Sequence[ContinuedSequence],
        *,
        known: PrefixSource,
        sink: KeyValueSink,
        device: torch.device | str = "cpu",
    ) -> "ContinuedContext":
        """The context of these sequences, packed one after the other."""
        members: dict[tuple[bool, int, int], list[int]] = {}
        for index, one in enumerate(sequences):
            kind = one.known == 0, one.padded_queries, padded_length(one.length)
            members.setdefault(kind, []).append(index)
        buckets: list[_Bucket] = []
        back = torch.empty(sum(one.fresh for one in sequences), dtype=torch.int64)
        done = 0
        for (is_whole, queries, keys), indices in sorted(members.items()):
            made = _bucket(sequences, indices, queries, keys, is_whole=is_whole)
            # Padding repeats the last token, whose first place is the one that counts.
            inside = made.queries == made.queries[:, :1] + torch.arange(queries)
            places = torch.arange(made.queries.numel()).view(made.queries.shape)
            back[made.queries[inside]] = done + places[inside]
            done += made.queries.numel()
            buckets.append(made.to(device))
        return cls(
            buckets=tuple(buckets),
            order=_order(sequences).to(device),
            back=back.to(device),
            known=known,
            sink=sink,
        )

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        window: AttentionWindow,
    ) -> Tensor:
        """`[1, heads, tok, width]` in, `[1, tok, heads, width]` out."""
        fresh = (key[0].transpose(0, 1), value[0].transpose(0, 1))
        keys, values = (
            torch.cat(pair).index_select(0, self.order)
            for pair in zip(self.known.load(layer), fresh, strict=True)
        )
        self.sink.store(layer, keys, values)
        queries = query[0].transpose(0, 1)
        outputs = [one.attend(queries, keys, values, scale, window) for one in self.buckets]
        return torch.cat(outputs).index_select(0, self.back)[None]


def _bucket(
    sequences: Sequence[ContinuedSequence],
    indices: Sequence[int],
    queries: int,
    keys: int,
    *,
    is_whole: bool,
) -> _Bucket:
    """These sequences; places past the end of one repeat its last token."""
    first_query, first_key = [0], [0]
    for one in sequences:
        first_query.append(first_query[-1] + one.fresh)
        first_key.append(first_key[-1] + one.length)
    fresh = torch.tensor([[sequences[i].fresh] for i in indices])
    known = torch.tensor([[sequences[i].known] for i in indices])
    place = torch.minimum(torch.arange(queries), fresh - 1)
    column = torch.minimum(torch.arange(keys), fresh + known - 1)
    return _Bucket(
        queries=torch.tensor([[first_query[i]] for i in indices]) + place,
        positions=known + place,
        keys=torch.tensor([[first_key[i]] for i in indices]) + column,
        is_whole=is_whole,
    )


def _order(sequences: Sequence[ContinuedSequence]) -> Tensor:
    """Where each token of the sequences stands, if all known tokens come before the computed."""
    known, fresh = 0, sum(one.known for one in sequences)
    parts: list[Tensor] = []
    for one in sequences:
        parts.append(torch.arange(known, known + one.known))
        parts.append(torch.arange(fresh, fresh + one.fresh))
        known += one.known
        fresh += one.fresh
    return torch.cat(parts)
