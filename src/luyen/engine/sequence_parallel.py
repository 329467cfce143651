"""Sequence parallelism (Ulysses): ranks divide the tokens of a pass; attention divides its heads.

Everything in a decoder but attention works on single tokens, so each rank computes its share of
them. Before attention an all-to-all gives every rank all tokens of some heads, and after it another
one gives it all heads of its tokens back. Scores are joined, so that each rank computes the loss of
the whole pass, and its gradient by the rank's own tokens; gradients of weights are summed over all
ranks, as without sequence parallelism.
"""

from dataclasses import dataclass
from datetime import timedelta
from math import lcm
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor

from luyen.models.attention import AttentionContext, AttentionWindow
from luyen.models.rank_splits import OwnPlaces, Read


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SequenceRanks:
    """The ranks that divide a pass, and which of them this one is.

    Example:
        The second of two ranks has the last three of six tokens.

        >>> ranks = SequenceRanks(group=dist.group.WORLD, rank=1, size=2)
        >>> own = ranks.own_places(torch.tensor([0, 3, 5]), tokens=6)
        >>> own.index.tolist(), own.rows.tolist()
        ([1, 2], [0, 2])
    """

    group: dist.ProcessGroup
    """Connects them."""
    rank: int
    """This one, of the group."""
    size: int
    """How many they are."""

    def read(
        self, read: Read, tokens: Tensor, positions: Tensor, context: AttentionContext
    ) -> Tensor:
        """Last hidden states of this rank's tokens."""
        share = self._share(tokens.numel())
        inner = HeadShards(inner=context, ranks=self, tokens=tokens.numel(), share=share)
        return read(self._own(tokens, share), self._own(positions, share), inner)

    def own_places(self, places: Tensor, tokens: int) -> OwnPlaces:
        """Which places this rank's tokens have, of a pass over so many tokens."""
        share = self._share(tokens)
        index = (places // share == self.rank).nonzero()[:, 0]
        if index.numel() or not places.numel():
            return OwnPlaces(index=index, rows=places[index] - self.rank * share, weight=1.0)
        # A rank without one computes any: every rank takes part in the collectives of a pass.
        index = torch.zeros(1, dtype=torch.int64, device=places.device)
        return OwnPlaces(index=index, rows=index, weight=0.0)

    def join(self, values: Tensor, own: OwnPlaces, count: int) -> Tensor:
        """Values at all `count` places, from those that each rank has at its own."""
        joined: Any = _Join.apply(values, own, count, self.group)
        return joined

    def _share(self, tokens: int) -> int:
        """Tokens of each rank; the last ranks have padding."""
        return -(-tokens // self.size)

    def _own(self, values: Tensor, share: int) -> Tensor:
        mine = values[self.rank * share : (self.rank + 1) * share]
        return torch.cat([mine, mine.new_zeros(share - mine.numel())])


def divide_sequences(world: int, size: int, *, timeout_s: float) -> SequenceRanks | None:
    """Groups of `size` consecutive ranks; every rank must call it. None: sequences stay whole.

    A rank that waits longer than `timeout_s` for those of its group raises a RuntimeError.
    """
    if size == 1:
        return None
    assert world % size == 0, "the configuration was checked"
    group, _ = dist.new_subgroups(group_size=size, timeout=timedelta(seconds=timeout_s))
    assert isinstance(group, dist.ProcessGroup), "every rank is in one of the groups"
    return SequenceRanks(group=group, rank=dist.get_rank(group), size=size)


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HeadShards:
    """Attention of all tokens, of this rank's heads.

    Example:
        >>> from luyen.models.packed_attention import PackedContext
        >>> second = SequenceRanks(group=dist.group.WORLD, rank=1, size=2)
        >>> shards = HeadShards(inner=PackedContext.of([3]), ranks=second, tokens=3, share=2)
        >>> shards._own_sinks(torch.arange(4.0)).tolist()
        [2.0, 3.0]
    """

    inner: AttentionContext
    """Attends over all tokens."""
    ranks: SequenceRanks
    """Those that exchange tokens and heads."""
    tokens: int
    """Tokens of the pass, without padding."""
    share: int
    """Tokens of each rank, with padding."""

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        window: AttentionWindow,
    ) -> Tensor:
        """`[1, heads, tok, width]` in, `[1, tok, heads, width]` out, of this rank's tokens."""
        heads, size = query.shape[1], self.ranks.size
        copies = key_copies(heads, key.shape[1], size)
        q, k, v = (
            self._all_tokens(_padded(x.repeat_interleave(n, 1), size))
            for x, n in ((query, 1), (key, copies), (value, copies))
        )
        own = AttentionWindow(
            sliding=window.sliding, softcap=window.softcap, sinks=self._own_sinks(window.sinks)
        )
        out = self.inner.attend(layer, q, k, v, scale, own)
        return self._all_heads(out)[:, :, :heads]

    def _all_tokens(self, x: Tensor) -> Tensor:
        """`[1, heads, share, width]` to `[1, own heads, tokens, width]`."""
        by_rank = x[0].unflatten(0, (self.ranks.size, -1))
        found = _exchange(by_rank, self.ranks.group)
        return found.transpose(0, 1).flatten(1, 2)[None, :, : self.tokens]

    def _all_heads(self, x: Tensor) -> Tensor:
        """`[1, tokens, own heads, width]` to `[1, share, heads, width]`."""
        missing = self.ranks.size * self.share - self.tokens
        whole = torch.cat([x[0], x.new_zeros(missing, *x.shape[2:])]) if missing else x[0]
        found = _exchange(whole.unflatten(0, (self.ranks.size, self.share)), self.ranks.group)
        return found.transpose(0, 1).flatten(1, 2)[None]

    def _own_sinks(self, sinks: Tensor | None) -> Tensor | None:
        if sinks is None:
            return None
        padded = _padded(sinks[None], self.ranks.size)[0]
        return padded.unflatten(0, (self.ranks.size, -1))[self.ranks.rank]


def key_copies(heads: int, key_heads: int, ranks: int) -> int:
    """How often keys are repeated, so that every rank has those of its query heads.

    Example:
        >>> [key_copies(32, 8, 4), key_copies(14, 2, 2), key_copies(8, 2, 4), key_copies(6, 2, 4)]
        [1, 1, 2, 3]
    """
    wanted = lcm(key_heads, ranks)
    return wanted // key_heads if heads % wanted == 0 else heads // key_heads


def _padded(x: Tensor, ranks: int) -> Tensor:
    """Heads (dimension 1), and zeros up to a multiple of the ranks."""
    missing = -x.shape[1] % ranks
    return torch.cat([x, x.new_zeros(x.shape[0], missing, *x.shape[2:])], 1) if missing else x


class _Exchange(torch.autograd.Function):
    """The i-th part goes to rank i; the parts that came, by rank. Its gradient goes back alike."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        found = torch.empty_like(x, memory_format=torch.contiguous_format)
        dist.all_to_all_single(found, x.contiguous(), group=group)
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        found = torch.empty_like(grads[0], memory_format=torch.contiguous_format)
        dist.all_to_all_single(found, grads[0].contiguous(), group=ctx.group)
        return found, None


def _exchange(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    found: Any = _Exchange.apply(x, group)
    return found


class _Join(torch.autograd.Function):
    """Places of all ranks. Every rank has the gradient of the whole, and keeps its own part."""

    @staticmethod
    def forward(
        ctx: Any, values: Tensor, own: OwnPlaces, count: int, group: dist.ProcessGroup
    ) -> Tensor:
        ctx.own = own
        whole = values.new_zeros(count)
        whole[own.index] = values * own.weight
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        own: OwnPlaces = ctx.own
        return grads[0].index_select(0, own.index) * own.weight, None, None, None
