"""Keys and values of running sequences: one row each, rows kept dense."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, final

import torch
from torch import Tensor

from luyen.base.exactness import padded_length
from luyen.models.attention import AttentionContext
from luyen.models.kernels import Window, decode_attention
from luyen.models.packed import KeyValueSink


class RowCache(Protocol):
    """Keys and values of running rows, as the engine sees them. Rows are dense."""

    def make_room(self, rows: int, length: int, /) -> None:
        """Expect this many rows of at most this many tokens; what is cached stays."""
        ...

    def sink(
        self, starts: Sequence[int], lengths: Sequence[int], rows: Sequence[tuple[int, int]]
    ) -> KeyValueSink:
        """What takes packed prompts: their first tokens, lengths, and first and end rows."""
        ...

    def step(self, positions: Sequence[int], device: torch.device) -> AttentionContext:
        """The context of one new token for each row, at these positions."""
        ...

    def remove(self, index: int, last: int, length: int) -> None:
        """Take a row out; the last row, of `length` tokens, takes its place."""
        ...


@final
class SlottedCache:
    """`[rows, kv heads, length, width]` per layer; rows 0 to `used` are running sequences.

    A layer's tensors are made when it first stores something, since only then its heads and widths
    are known for certain, and grow when more or longer sequences come: room that no request asked
    for is never held. Rows start as zeros and only ever hold finite numbers: a masked key has
    weight exactly 0, and 0 times a stale number is 0, which it would not be for NaN.
    """

    def __init__(self, *, rows: int, length: int) -> None:
        self.rows = rows
        self.length = padded_length(length)
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def make_room(self, rows: int, length: int, /) -> None:
        """Make room for this many rows of this many tokens; what is cached stays."""
        rows, length = max(rows, self.rows), max(padded_length(length), self.length)
        if (rows, length) == (self.rows, self.length):
            return
        old_rows, old_length, self.rows, self.length = self.rows, self.length, rows, length
        for index, pair in self._layers.items():
            grown = tuple(x.new_zeros(rows, x.shape[1], length, x.shape[3]) for x in pair)
            for new, old in zip(grown, pair, strict=True):
                new[:old_rows, :, :old_length] = old
            self._layers[index] = (grown[0], grown[1])

    def layer(self, index: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Cached keys and values of a layer that makes `[tok, kv heads, width]` ones like these."""
        found = self._layers.get(index)
        if found is None:
            found = self._layers[index] = (self._zeros(keys), self._zeros(values))
        return found

    def sink(
        self, starts: Sequence[int], lengths: Sequence[int], rows: Sequence[tuple[int, int]]
    ) -> "PromptSink":
        """What takes packed prompts: their first tokens, lengths, and first and end rows."""
        return PromptSink(cache=self, starts=starts, lengths=lengths, rows=rows)

    def step(self, positions: Sequence[int], device: torch.device) -> "DecodeContext":
        """The context of one new token for each row, at these positions."""
        return DecodeContext(
            cache=self,
            positions=torch.tensor(positions, device=device),
            span=padded_length(max(positions) + 1),
        )

    def remove(self, index: int, last: int, length: int) -> None:
        """Take a row out; the last row, of `length` tokens, takes its place."""
        if index != last:
            self.move(last, index, length)

    def move(self, source: int, target: int, length: int) -> None:
        """Copy a row's first `length` tokens over another row."""
        for pair in self._layers.values():
            for tensor in pair:
                tensor[target, :, :length] = tensor[source, :, :length]

    def _zeros(self, like: Tensor) -> Tensor:
        return like.new_zeros(self.rows, like.shape[1], self.length, like.shape[2])


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PromptSink:
    """Writes each prompt's keys and values into the rows of its samples.

    Example:
        >>> cache = SlottedCache(rows=4, length=8)
        >>> PromptSink(cache=cache, starts=(0,), lengths=(3,), rows=((0, 4),)).lengths
        (3,)
    """

    cache: SlottedCache
    """Where rows live."""
    starts: Sequence[int]
    """First packed token of each prompt."""
    lengths: Sequence[int]
    """Tokens of each prompt."""
    rows: Sequence[tuple[int, int]]
    """First row of each prompt's samples, and the row after the last."""

    def store(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Keys and values `[tok, kv heads, width]` of every packed token."""
        both = self.cache.layer(layer, keys, values)
        for start, length, (first, end) in zip(self.starts, self.lengths, self.rows, strict=True):
            for cached, fresh in zip(both, (keys, values), strict=True):
                cached[first:end, :, :length] = fresh[start : start + length].transpose(0, 1)


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DecodeContext:
    """One new token for each running row.

    Example:
        >>> cache = SlottedCache(rows=1, length=8)
        >>> DecodeContext(cache=cache, positions=torch.tensor([3]), span=32).span
        32
    """

    cache: SlottedCache
    """Where rows live."""
    positions: Tensor
    """Position of each row's new token."""
    span: int
    """Keys to look at: the longest row's, padded."""

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: Window
    ) -> Tensor:
        """`[1, heads, rows, width]` in, `[1, rows, heads, width]` out."""
        rows = query.shape[2]
        index = torch.arange(rows, device=query.device)
        fresh_keys, fresh_values = key[0].transpose(0, 1), value[0].transpose(0, 1)
        keys, values = self.cache.layer(layer, fresh_keys, fresh_values)
        keys[index, :, self.positions] = fresh_keys
        values[index, :, self.positions] = fresh_values
        out = decode_attention(
            query[0].transpose(0, 1),
            keys[:rows, :, : self.span],
            values[:rows, :, : self.span],
            self.positions + 1,
            scale,
            window,
        )
        return out[None]
