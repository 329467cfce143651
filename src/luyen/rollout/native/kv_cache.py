"""KV caches of running rows: one dense row each, or a shared prompt prefix and own tokens."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, final

import torch
from torch import Tensor

from luyen.base.process_setup import padded_length
from luyen.models.attention import AttentionContext, AttentionWindow, decode_attention, decode_mask
from luyen.models.packed_attention import KeyValueSink, PackedContext
from luyen.models.policy import Policy


class RowCache(Protocol):
    """Keys and values of running rows, as the engine sees them. Rows are dense."""

    def make_room(self, rows: int, length: int, /) -> None:
        """Expect this many rows of at most this many tokens; what is cached stays."""
        ...

    def sink(
        self, starts: Sequence[int], lengths: Sequence[int], rows: Sequence[tuple[int, int]]
    ) -> KeyValueSink:
        """Writer for packed prompts, given their first tokens, lengths, and first and end rows."""
        ...

    def step(self, positions: Sequence[int], device: torch.device) -> AttentionContext:
        """The context of one new token for each row, at these positions."""
        ...

    def remove(self, index: int, last: int, length: int) -> None:
        """Take a row out; the last row, of `length` tokens, takes its place."""
        ...

    @property
    def layers(self) -> Sequence[int]:
        """Layers that have stored something."""
        ...

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's keys and values in all of these layers."""
        ...

    def tokens(self, layer: int, spans: Sequence[tuple[int, int, int]]) -> tuple[Tensor, Tensor]:
        """Keys and values `[tok, kv heads, width]` of spans: row, first token, and the end."""
        ...


@final
class SlottedCache:
    """`[rows, kv heads, length, width]` per layer; rows 0 to `used` are running sequences.

    A layer's tensors are made when it first stores something, since only then its heads and widths
    are known for certain, and grow when more or longer sequences come: memory that no request
    needs is never allocated. Rows start as zeros and only ever contain finite numbers: a masked key
    has weight exactly 0, and 0 times a stale number is 0, which it would not be for NaN.
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
    ) -> "PromptWriter":
        """Writer for packed prompts, given their first tokens, lengths, and first and end rows."""
        return PromptWriter(cache=self, starts=starts, lengths=lengths, rows=rows)

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

    @property
    def layers(self) -> Sequence[int]:
        """Layers that have stored something."""
        return list(self._layers)

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's keys and values in all of these layers."""
        return sum(x[0, :, 0].nbytes for pair in self._layers.values() for x in pair)

    def tokens(self, layer: int, spans: Sequence[tuple[int, int, int]]) -> tuple[Tensor, Tensor]:
        """Keys and values `[tok, kv heads, width]` of spans: row, first token, and the end."""
        keys, values = (
            torch.cat([x[row, :, first:end].transpose(0, 1) for row, first, end in spans])
            for x in self._layers[layer]
        )
        return keys, values

    def move(self, source: int, target: int, length: int) -> None:
        """Copy a row's first `length` tokens over another row."""
        for pair in self._layers.values():
            for tensor in pair:
                tensor[target, :, :length] = tensor[source, :, :length]

    def _zeros(self, like: Tensor) -> Tensor:
        return like.new_zeros(self.rows, like.shape[1], self.length, like.shape[2])


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PromptWriter:
    """Writes each prompt's keys and values into the rows of its samples.

    Example:
        >>> cache = SlottedCache(rows=4, length=8)
        >>> PromptWriter(cache=cache, starts=(0,), lengths=(3,), rows=((0, 4),)).lengths
        (3,)
    """

    cache: SlottedCache
    """The cache."""
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
    """The cache."""
    positions: Tensor
    """Position of each row's new token."""
    span: int
    """Keys to look at: the longest row's, padded."""
    masks: dict[Any, Tensor] = field(default_factory=dict[Any, Tensor])
    """What each row sees, by kinds of windows, which layers have in common."""

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        window: AttentionWindow,
    ) -> Tensor:
        """`[1, heads, rows, width]` in, `[1, rows, heads, width]` out."""
        rows = query.shape[2]
        index = torch.arange(rows, device=query.device)
        fresh_keys, fresh_values = key[0].transpose(0, 1), value[0].transpose(0, 1)
        keys, values = self.cache.layer(layer, fresh_keys, fresh_values)
        keys[index, :, self.positions] = fresh_keys
        values[index, :, self.positions] = fresh_values
        kind = window.sliding, window.is_fused
        if kind not in self.masks:
            self.masks[kind] = decode_mask(self.positions + 1, self.span, window, query.dtype)
        out = decode_attention(
            query[0].transpose(0, 1),
            keys[:rows, :, : self.span],
            values[:rows, :, : self.span],
            self.masks[kind],
            scale,
            window,
        )
        return out[None]


_OWN_STEP = 16
"""The span of own keys is a multiple of this."""

_Pair = tuple[Tensor, Tensor]


@final
class SharedPrefixCache:
    """Keys and values of prompts, once for all their samples, and of generated tokens, per row.

    Prompts are `[slots, tokens, kv heads, width]`, generated tokens `[rows, tokens, kv heads,
    width]`. The samples of a prompt read its keys together, as many queries of one product; each
    row then reads its own keys, and the two results are merged by their log-sum-exp. That is the
    same attention with other rounding, so it is used only where no exactness is promised.

    Rows and slots are dense: the last one moves into a gap. A slot lives as long as a row of it.
    Tensors grow when something needs the room. What is not written yet is 0, and so finite.
    """

    def __init__(self) -> None:
        self._prompts: dict[int, _Pair] = {}
        self._own: dict[int, _Pair] = {}
        self._rows = 1
        self._own_length = _OWN_STEP
        self._slots: list[int] = []
        self._lengths: list[int] = []

    def make_room(self, rows: int, _length: int, /) -> None:
        """Expect this many rows; the room for tokens grows with generation."""
        self._rows = max(rows, self._rows)

    def sink(
        self, starts: Sequence[int], lengths: Sequence[int], rows: Sequence[tuple[int, int]]
    ) -> "SharedPrefixWriter":
        """Open a slot for each prompt, whose samples are the rows after those there are."""
        first = len(self._lengths)
        self._lengths += lengths
        for slot, (start, end) in enumerate(rows, first):
            assert start == len(self._slots)
            self._slots += [slot] * (end - start)
        return SharedPrefixWriter(self, first, starts, lengths)

    def step(self, positions: Sequence[int], device: torch.device) -> "SharedPrefixContext":
        """The context of one new token for each row."""
        own = [p - self._lengths[s] for p, s in zip(positions, self._slots, strict=True)]
        span = -(-(max(own) + 1) // _OWN_STEP) * _OWN_STEP
        if span > self._own_length:
            self._own_length = max(span, 2 * self._own_length)
        return SharedPrefixContext(self, self._slots, self._lengths, own, span, device)

    def remove(self, index: int, last: int, length: int) -> None:
        """Take a row out; the last row, of `length` tokens, takes its place."""
        gone = self._slots[index]
        if index != last:
            own = length - self._lengths[self._slots[last]]
            # A row with one generated token has no keys of its own yet, and perhaps no memory.
            if own > 0:
                _copy(self._own, last, index, own)
            self._slots[index] = self._slots[last]
        self._slots.pop()
        if gone not in self._slots:
            self._close(gone)

    @property
    def layers(self) -> Sequence[int]:
        """Layers that have stored something."""
        return list(self._prompts)

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's keys and values in all of these layers."""
        return sum(x[0, 0].nbytes for pair in self._prompts.values() for x in pair)

    def tokens(self, layer: int, spans: Sequence[tuple[int, int, int]]) -> _Pair:
        """Keys and values `[tok, kv heads, width]` of spans: row, first token, and the end."""
        parts: tuple[list[Tensor], list[Tensor]] = ([], [])
        for row, first, end in spans:
            slot = self._slots[row]
            split = self._lengths[slot]
            for which, part in enumerate(parts):
                if first < split:
                    part.append(self._prompts[layer][which][slot, first : min(end, split)])
                if end > split:
                    own = slice(max(first - split, 0), end - split)
                    part.append(self._own[layer][which][row, own])
        return torch.cat(parts[0]), torch.cat(parts[1])

    def prompt(self, layer: int) -> _Pair:
        """Keys and values of the prompts, `[slots, tokens, kv heads, width]`."""
        keys, values = self._prompts[layer]
        slots, longest = len(self._lengths), max(self._lengths)
        return keys[:slots, :longest], values[:slots, :longest]

    def prompt_room(self, layer: int, keys: Tensor, values: Tensor) -> _Pair:
        """The same with room for all slots, for a layer that makes keys and values like these."""
        size = len(self._lengths), max(self._lengths)
        return _with_room(self._prompts, layer, (keys, values), size)

    def own_room(self, layer: int, keys: Tensor, values: Tensor) -> _Pair:
        """Keys and values of generated tokens, with room for all rows and the newest token."""
        return _with_room(self._own, layer, (keys, values), (self._rows, self._own_length))

    def _close(self, slot: int) -> None:
        """Free a slot: the last one moves into it."""
        last = len(self._lengths) - 1
        if slot != last:
            _copy(self._prompts, last, slot, self._lengths[last])
            self._lengths[slot] = self._lengths[last]
            self._slots = [slot if s == last else s for s in self._slots]
        self._lengths.pop()


def _copy(layers: dict[int, _Pair], source: int, target: int, length: int) -> None:
    for pair in layers.values():
        for tensor in pair:
            tensor[target, :length] = tensor[source, :length]


def _with_room(layers: dict[int, _Pair], index: int, like: _Pair, size: tuple[int, int]) -> _Pair:
    """A layer's tensors, made or grown to at least `size`."""
    pair = layers.get(index)
    if pair is not None and pair[0].shape[0] >= size[0] and pair[0].shape[1] >= size[1]:
        return pair
    have = (0, 0) if pair is None else pair[0].shape[:2]
    rows, tokens = max(size[0], have[0]), max(size[1], have[1])
    keys, values = (x.new_zeros(rows, tokens, *x.shape[1:]) for x in like)
    if pair is not None:
        keys[: have[0], : have[1]], values[: have[0], : have[1]] = pair
    layers[index] = (keys, values)
    return keys, values


@final
class SharedPrefixWriter:
    """Writes each prompt's keys and values into its slot."""

    def __init__(
        self, cache: SharedPrefixCache, first: int, starts: Sequence[int], lengths: Sequence[int]
    ) -> None:
        """`first` is the slot of the first prompt."""
        self._cache = cache
        self._prompts = list(zip(range(first, first + len(starts)), starts, lengths, strict=True))

    def store(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Keys and values `[tok, kv heads, width]` of every packed token."""
        room = self._cache.prompt_room(layer, keys, values)
        for slot, start, length in self._prompts:
            for cached, fresh in zip(room, (keys, values), strict=True):
                cached[slot, :length] = fresh[start : start + length]


@final
class SharedPrefixContext:
    """One new token for each running row, over a prompt part and an own part."""

    def __init__(
        self,
        cache: SharedPrefixCache,
        slots: Sequence[int],
        lengths: Sequence[int],
        own: Sequence[int],
        span: int,
        device: torch.device,
    ) -> None:
        """`slots` and `own`: the slot of each row's prompt, and its cached own tokens."""
        members: list[list[int]] = [[] for _ in lengths]
        for row, slot in enumerate(slots):
            members[slot].append(row)
        self._cache, self._span, self._device = cache, span, device
        self._width = max(len(rows) for rows in members)
        # A slot with fewer rows repeats its first one; that result is not used.
        grid = [row for rows in members for row in rows + rows[:1] * (self._width - len(rows))]
        places = {
            row: s * self._width + i for s, m in enumerate(members) for i, row in enumerate(m)
        }
        self._is_grid = grid == list(range(len(slots)))
        self._grid = torch.tensor(grid, device=device)
        self._back = torch.tensor([places[row] for row in range(len(slots))], device=device)
        self._lengths = torch.tensor(lengths, device=device)
        self._own = torch.tensor(own, device=device)
        self._rows = torch.arange(len(slots), device=device)
        self._masks: dict[int | None, _Pair] = {}

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        window: AttentionWindow,
    ) -> Tensor:
        """`[1, heads, rows, width]` in, `[1, rows, heads, width]` out."""
        rows, heads = query.shape[2], query.shape[1]
        fresh = key[0].transpose(0, 1), value[0].transpose(0, 1)
        shared_pair, own_pair = self._cache.prompt(layer), self._cache.own_room(layer, *fresh)
        place = self._rows * own_pair[0].shape[1] + self._own
        for cached, new in zip(own_pair, fresh, strict=True):
            cached.view(-1, *cached.shape[2:]).index_copy_(0, place, new)
        grouped = query[0].transpose(0, 1).reshape(rows, key.shape[1], -1, query.shape[3])
        masks = self._masks_of(window, grouped)
        out, weight = self._over_prompts(grouped, shared_pair, masks[0], scale)
        keys, values = (x[:rows, : self._span].transpose(1, 2) for x in own_pair)
        own_out, own_weight = _flash(grouped, keys, values, masks[1], scale)
        share = torch.sigmoid(weight - own_weight.transpose(1, 2))[..., None].to(out.dtype)
        merged = torch.lerp(own_out.transpose(1, 2), out, share)
        return merged.transpose(1, 2).reshape(1, rows, heads, -1)

    def _over_prompts(self, grouped: Tensor, pair: _Pair, mask: Tensor, scale: float) -> _Pair:
        """Output `[rows, group, kv heads, width]` and log-sum-exp of the prompt part."""
        kv, group, width = grouped.shape[1:]
        queries = grouped if self._is_grid else grouped.index_select(0, self._grid)
        queries = queries.view(-1, self._width, kv, group, width).transpose(1, 2).flatten(2, 3)
        keys, values = (x.transpose(1, 2) for x in pair)
        out, weight = _flash(queries, keys, values, mask, scale)
        out = out.transpose(1, 2).reshape(-1, group, kv, width)
        weight = weight.transpose(1, 2).reshape(-1, group, kv)
        if self._is_grid:
            return out, weight
        return out.index_select(0, self._back), weight.index_select(0, self._back)

    def _masks_of(self, window: AttentionWindow, grouped: Tensor) -> _Pair:
        """What is added to the scores of the prompt part and of the own part."""
        found = self._masks.get(window.sliding)
        if found is None:
            found = self._masks[window.sliding] = self._new_masks(window.sliding, grouped)
        return found

    def _new_masks(self, sliding: int | None, grouped: Tensor) -> _Pair:
        longest = int(self._lengths.max())
        place = torch.arange(max(longest, self._span), device=self._device)
        own_place = place[: self._span]
        own = own_place <= self._own[:, None]
        seen = (place[:longest] < self._lengths[:, None])[:, None]
        if sliding is not None:
            own &= self._own[:, None] - own_place < sliding
            positions = self._own[self._grid].view(-1, self._width) + self._lengths[:, None]
            near = positions[:, :, None] - place[:longest] < sliding
            seen = (seen & near).repeat_interleave(grouped.shape[2], 1)
        return _additive(seen[:, None], grouped.dtype), _additive(own[:, None, None], grouped.dtype)


def _additive(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where seen; elsewhere a number that is finite, since a whole part may be out of sight."""
    zeros = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
    return zeros.masked_fill(~seen, torch.finfo(dtype).min / 2)


def _flash(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> _Pair:
    """Attention and its log-sum-exp `[batch, heads, queries]`."""
    aten: Any = torch.ops.aten
    return aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, False, attn_mask=mask, scale=scale
    )


@final
class _SplitProbe:
    """Attends as a packed context does, and remembers whether all layers can be split."""

    def __init__(self, context: PackedContext) -> None:
        self._context = context
        self.can_split = True

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
        self.can_split &= window.is_fused and query.shape[3] == value.shape[3]
        return self._context.attend(layer, query, key, value, scale, window)


@torch.no_grad()
def can_split(policy: Policy) -> bool:
    """Whether the model's attention can be computed in parts; one pass of one token shows it.

    Caps on scores and sinks are written out, without the log-sum-exp that merging needs.
    """
    zero = torch.zeros(1, dtype=torch.int64, device=policy.device)
    probe = _SplitProbe(PackedContext.of([1], device=policy.device))
    policy.hidden(zero, zero, probe)
    return probe.can_split
