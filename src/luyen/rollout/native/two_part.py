"""Keys and values in two parts: a prompt's once for all its samples, the drawn tokens' per row.

The samples of a prompt read its keys together, as many queries of one product; each row then reads
its own keys, and the two results are weighed by their log-sum-exp. That is the same attention with
other rounding, so it serves only where no exactness is promised.
"""

from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor

from luyen.models.kernels import Window
from luyen.models.packed import PackedContext
from luyen.models.policy import Policy

_OWN_STEP = 16
"""Own keys are looked at in multiples of this many."""

_Pair = tuple[Tensor, Tensor]


@final
class TwoPartCache:
    """`[slots, tokens, kv heads, width]` of prompts and `[rows, tokens, kv heads, width]` of draws.

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
        """Expect this many rows; the room for tokens follows what is drawn."""
        self._rows = max(rows, self._rows)

    def sink(
        self, starts: Sequence[int], lengths: Sequence[int], rows: Sequence[tuple[int, int]]
    ) -> "TwoPartSink":
        """Open a slot for each prompt, whose samples are the rows after those there are."""
        first = len(self._lengths)
        self._lengths += lengths
        for slot, (start, end) in enumerate(rows, first):
            assert start == len(self._slots)
            self._slots += [slot] * (end - start)
        return TwoPartSink(self, first, starts, lengths)

    def step(self, positions: Sequence[int], device: torch.device) -> "TwoPartContext":
        """The context of one new token for each row."""
        own = [p - self._lengths[s] for p, s in zip(positions, self._slots, strict=True)]
        span = -(-(max(own) + 1) // _OWN_STEP) * _OWN_STEP
        if span > self._own_length:
            self._own_length = max(span, 2 * self._own_length)
        return TwoPartContext(self, self._slots, self._lengths, own, span, device)

    def remove(self, index: int, last: int, length: int) -> None:
        """Take a row out; the last row, of `length` tokens, takes its place."""
        gone = self._slots[index]
        if index != last:
            own = length - self._lengths[self._slots[last]]
            # A row that drew its first token has no keys of its own yet, nor perhaps a place.
            if own > 0:
                _copy(self._own, last, index, own)
            self._slots[index] = self._slots[last]
        self._slots.pop()
        if gone not in self._slots:
            self._close(gone)

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
        """Keys and values of drawn tokens, with room for all rows and the newest token."""
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
class TwoPartSink:
    """Writes each prompt's keys and values into its slot."""

    def __init__(
        self, cache: TwoPartCache, first: int, starts: Sequence[int], lengths: Sequence[int]
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
class TwoPartContext:
    """One new token for each running row, over a prompt part and an own part."""

    def __init__(
        self,
        cache: TwoPartCache,
        slots: Sequence[int],
        lengths: Sequence[int],
        own: Sequence[int],
        span: int,
        device: torch.device,
    ) -> None:
        """`slots` and `own` say of each row where its prompt is and how many draws are cached."""
        members: list[list[int]] = [[] for _ in lengths]
        for row, slot in enumerate(slots):
            members[slot].append(row)
        self._cache, self._span, self._device = cache, span, device
        self._width = max(len(rows) for rows in members)
        # A slot with fewer rows asks for its first one again; nobody reads that answer.
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
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: Window
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
        asked = grouped if self._is_grid else grouped.index_select(0, self._grid)
        asked = asked.view(-1, self._width, kv, group, width).transpose(1, 2).flatten(2, 3)
        keys, values = (x.transpose(1, 2) for x in pair)
        out, weight = _flash(asked, keys, values, mask, scale)
        out = out.transpose(1, 2).reshape(-1, group, kv, width)
        weight = weight.transpose(1, 2).reshape(-1, group, kv)
        if self._is_grid:
            return out, weight
        return out.index_select(0, self._back), weight.index_select(0, self._back)

    def _masks_of(self, window: Window, grouped: Tensor) -> _Pair:
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
            asked = self._own[self._grid].view(-1, self._width) + self._lengths[:, None]
            near = asked[:, :, None] - place[:longest] < sliding
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
class _Witness:
    """Attends as a packed context does, and remembers whether all layers can be split."""

    def __init__(self, context: PackedContext) -> None:
        self._context = context
        self.can_split = True

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: Window
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
    witness = _Witness(PackedContext.of([1], device=policy.device))
    policy.hidden(zero, zero, witness)
    return witness.can_split
