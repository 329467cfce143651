"""Attention over packed sequences: training, scoring, prefill; shared prompts are computed once."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, final

import torch
from torch import Tensor

from luyen.base.process_setup import padded_length
from luyen.models.attention import AttentionWindow, causal_attention
from luyen.models.cuda.varlen_segments import Segments

# Shared prompts: the model computes the tokens of a prompt once, not once per sample.
#
# Only attention looks from a sample's tokens back at the shared ones; everything else in a
# decoder works on single tokens. Values and gradients are those of the unshared batch.


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

    def multiplicity(self) -> Tensor:
        """At how many places each distinct token stands."""
        return torch.zeros_like(self.first).index_add_(0, self.place, torch.ones_like(self.place))


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
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        window: AttentionWindow,
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


def packed_positions(
    lengths: Sequence[int], device: torch.device | str, known: Sequence[int] | None = None
) -> Tensor:
    """0, 1, 2, ... for each packed sequence, or its positions after the first `known` ones."""
    starts = known or [0] * len(lengths)
    return torch.cat([torch.arange(k, n) for k, n in zip(starts, lengths, strict=True)]).to(device)


# Attention over packed sequences on a GPU: no padding, shared prompts computed once.
#
# The queries of a sequence are its own tokens only; a prompt that several sequences begin with
# belongs to the first of them. Keys and values are laid out for every sequence in full.


@final
class _Spread(torch.autograd.Function):
    """Rows of distinct tokens at every place where they stand.

    The gradient of a token sums its places in fp32 and in a fixed order, where PyTorch's own sum
    on a GPU depends on which place comes first.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, sharing: Sharing) -> Tensor:
        ctx.sharing = sharing
        return x.index_select(0, sharing.place)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        sharing: Sharing = ctx.sharing
        total = grads[0].index_select(0, sharing.first)
        for distinct, places in sharing.copies:
            every = grads[0].index_select(0, places.flatten())
            summed = every.view(*places.shape, *every.shape[1:]).sum(1, dtype=torch.float32)
            total[distinct] = summed.to(total.dtype)
        return total, None


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class VarlenContext:
    """Which packed tokens see each other: those of one sequence, causally.

    Example:
        >>> VarlenContext.of([3, 2], device="cpu", is_exact=True).segments.max_query
        3
    """

    segments: Segments
    """Queries and keys of each sequence."""
    sharing: Sharing | None
    """How keys of shared prompts are laid out; None: nothing is shared."""
    is_exact: bool
    """Whether results must be those of decoding, to the bit."""

    @classmethod
    def of(
        cls,
        lengths: Sequence[int],
        *,
        device: torch.device | str,
        is_exact: bool,
        sharing: Sharing | None = None,
    ) -> "VarlenContext":
        """The context of sequences of these lengths, packed one after the other."""
        own = lengths if sharing is None else sharing.own
        pairs = [(q, n) for q, n in zip(own, lengths, strict=True) if n]
        segments = Segments.packed([q for q, _ in pairs], [n for _, n in pairs], device=device)
        return cls(segments=segments, sharing=sharing, is_exact=is_exact)

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
        del layer
        from luyen.models.cuda.varlen import flash_varlen, varlen_attention

        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        if self.sharing is not None:
            k, v = (_spread(x, self.sharing) for x in (k, v))
        is_half = q.dtype in (torch.bfloat16, torch.float16)
        if q.is_cuda and is_half and window.is_fused and not self.is_exact:
            return flash_varlen(q, k, v, self.segments, scale, window.sliding)[None]
        return varlen_attention(
            q,
            k,
            v,
            self.segments,
            scale,
            sliding=window.sliding,
            softcap=window.softcap,
            sinks=window.sinks,
        )[None]


def _spread(x: Tensor, sharing: Sharing) -> Tensor:
    out: Any = _Spread.apply(x, sharing)
    return out
