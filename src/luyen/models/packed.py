"""Attention over packed sequences: training, scoring and prefill."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, final

import torch
from torch import Tensor

from luyen.base.exactness import padded_length
from luyen.models.kernels import Window, causal_attention
from luyen.models.sharing import Sharing


class KeyValueSink(Protocol):
    """Takes the keys and values of a prefill, layer by layer."""

    def store(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Keys and values `[tok, kv heads, width]` of every packed token."""
        ...


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class _Bucket:
    """Sequences of one padded length, as rows of token indices.

    Example:
        >>> _Bucket(rows=torch.zeros(2, 32, dtype=torch.int64), length=32).length
        32
    """

    rows: Tensor
    """`[sequences x length]` index of the token at each place; places past the end repeat one."""
    length: int
    """Padded length."""


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedContext:
    """Which packed tokens see each other: those of one sequence, causally.

    Sequences of the same padded length are attended to together. Padding exists only inside this
    function and never meets a token: a query sees keys up to its own position.

    Example:
        >>> PackedContext.of([3, 2]).tokens
        5
    """

    buckets: tuple[_Bucket, ...]
    """Sequences by padded length."""
    back: Tensor
    """Where each token stands among the outputs of all buckets."""
    tokens: int
    """Packed tokens."""
    sink: KeyValueSink | None = field(default=None)
    """Takes keys and values while prompts are read."""

    @classmethod
    def of(
        cls,
        lengths: Sequence[int],
        *,
        device: torch.device | str = "cpu",
        sink: KeyValueSink | None = None,
        sharing: Sharing | None = None,
    ) -> "PackedContext":
        """The context of sequences of these lengths, packed one after the other.

        With `sharing`, the model computes the distinct tokens only, and each sequence looks at its
        own selection of them.
        """
        starts = [0]
        for length in lengths:
            starts.append(starts[-1] + length)
        members: dict[int, list[int]] = {}
        for index, length in enumerate(lengths):
            if length:
                members.setdefault(padded_length(length), []).append(index)
        buckets: list[_Bucket] = []
        back = torch.empty(starts[-1], dtype=torch.int64)
        done = 0
        for padded, indices in sorted(members.items()):
            first = torch.tensor([starts[i] for i in indices])[:, None]
            size = torch.tensor([lengths[i] for i in indices])[:, None]
            place = torch.arange(padded)[None, :]
            rows = first + torch.minimum(place, size - 1)
            inside = place < size
            flat = torch.arange(rows.numel()).view(rows.shape)
            back[rows[inside]] = done + flat[inside]
            done += rows.numel()
            buckets.append(_Bucket(rows=rows.flatten().to(device), length=padded))
        whole = cls(buckets=tuple(buckets), back=back.to(device), tokens=starts[-1], sink=sink)
        return whole if sharing is None else whole.shared(sharing)

    def shared(self, sharing: Sharing) -> "PackedContext":
        """The same sequences over distinct tokens; a token's output is that of its first place."""
        buckets = tuple(replace(b, rows=sharing.place[b.rows]) for b in self.buckets)
        back = self.back[sharing.first]
        return replace(self, buckets=buckets, back=back, tokens=sharing.first.numel())

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: Window
    ) -> Tensor:
        """`[1, heads, tok, width]` in, `[1, tok, heads, width]` out."""
        flat = [x[0].transpose(0, 1).flatten(1) for x in (query, key, value)]
        widths = [x.shape[-1] for x in (query, key, value)]
        if self.sink is not None:
            keys, values = (x[0].transpose(0, 1) for x in (key, value))
            self.sink.store(layer, keys, values)
        outputs: list[Tensor] = []
        for bucket in self.buckets:
            q, k, v = (
                x.index_select(0, bucket.rows).view(-1, bucket.length, x.shape[1] // width, width)
                for x, width in zip(flat, widths, strict=True)
            )
            out = causal_attention(
                q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), scale, window
            )
            outputs.append(out.transpose(1, 2).flatten(0, 1).flatten(1))
        joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return joined.index_select(0, self.back).view(1, self.tokens, -1, widths[2])


def packed_positions(lengths: Sequence[int], device: torch.device | str) -> Tensor:
    """0, 1, 2, ... anew for each packed sequence."""
    return torch.cat([torch.arange(n) for n in lengths]).to(device)
