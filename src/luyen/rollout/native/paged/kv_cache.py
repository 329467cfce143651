"""Paged KV cache: page allocation, the memory behind it, and the attention contexts over it."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from luyen.base.errors import UserError
from luyen.models.attention import AttentionWindow
from luyen.models.fused.ops import Joint
from luyen.models.paged_attention import (
    PAGE,
    Chunks,
    Groups,
    Pages,
    decode,
    decode_grouped,
    decode_joint,
    prefill,
    sent,
    store,
)
from luyen.models.policy import Policy
from luyen.rollout.native.prefix_cache import CacheCounts, PrefixTree

_MARGIN = 0.9
"""Share of the free memory that pages may take: kernels need the rest."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class CacheShape:
    """Shape of the keys and values of one token in every layer.

    Example:
        >>> CacheShape(layers=30, heads=3, width=64, dtype=torch.bfloat16).page_bytes
        1474560
    """

    layers: int
    """Attention layers."""
    heads: int
    """Heads of keys and values."""
    width: int
    """Numbers of a head."""
    dtype: torch.dtype
    """Of keys and values."""

    @property
    def page_bytes(self) -> int:
        """Bytes of a page over all layers."""
        return 2 * self.layers * self.heads * self.width * PAGE * self.dtype.itemsize


@final
class _Recorder:
    """An attention context that only records the shapes of each layer's keys and values."""

    def __init__(self) -> None:
        self.seen: dict[int, tuple[int, int, int, torch.dtype]] = {}

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        window: AttentionWindow,
    ) -> Tensor:
        """Zeros of the right shape."""
        del scale, window
        self.seen[layer] = (key.shape[1], key.shape[3], value.shape[3], key.dtype)
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3])


@torch.no_grad()
def cache_shape(policy: Policy) -> CacheShape:
    """Shape of the model's keys and values; a UserError if layers differ."""
    recorder = _Recorder()
    token = torch.zeros(1, dtype=torch.int64, device=policy.device)
    policy.hidden(token, token, recorder)
    kinds = set(recorder.seen.values())
    if len(kinds) != 1 or len({width for _, *width, _ in kinds for width in width}) != 1:
        raise UserError(
            "actor_rollout_ref.rollout.name",
            "native",
            "the layers of this model keep keys and values of different sizes, and pages of the "
            "embedded engine have one size",
            "set it to hf",
        )
    heads, width, _, dtype = kinds.pop()
    return CacheShape(layers=len(recorder.seen), heads=heads, width=width, dtype=dtype)


@final
class KeyValues:
    """Pages of every layer."""

    def __init__(self, shape: CacheShape, pages: int, *, device: torch.device) -> None:
        # Zeros, not garbage: what a masked key holds is multiplied by 0, and NaN times 0 is NaN.
        self._all = torch.zeros(
            (shape.layers, 2, pages, shape.heads, PAGE, shape.width),
            dtype=shape.dtype,
            device=device,
        )

    @property
    def address(self) -> int:
        """Device address of the pages."""
        return self._all.data_ptr()

    def layer(self, index: int) -> Pages:
        """The pages of a layer."""
        return Pages(keys=self._all[index, 0], values=self._all[index, 1])

    def copy(self, pages: Sequence[tuple[int, int]]) -> None:
        """Copy whole pages, (source, target), in every layer."""
        if pages:
            source, target = sent(list(pages), self._all.device).T
            self._all[:, :, target] = self._all[:, :, source]


def affordable_pages(
    policy: Policy, shape: CacheShape, *, utilization: float, allocated: int
) -> int:
    """Pages that fit into a share of the device next to the weights, and into free memory.

    `allocated` are existing pages, whose memory is reused.
    """
    device = policy.device
    if device.type != "cuda":
        return 1 << 16
    free, total = torch.cuda.mem_get_info(device)
    weights = sum(p.numel() * p.element_size() for p in policy.parameters())
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    share = utilization * total - weights
    fits = _MARGIN * (free + unused) + allocated * shape.page_bytes
    return max(0, int(min(share, fits))) // shape.page_bytes


# Page allocation. A page is 64 tokens of keys and values of every layer.


def pages_of(tokens: int) -> int:
    """Pages that hold this many tokens.

    Example:
        >>> pages_of(64), pages_of(65)
        (1, 2)
    """
    return -(-tokens // PAGE)


@final
class PagePool:
    """Free pages, a reference count for each page in use, and full pages cached by content.

    A page is free again when its last holder has dropped it. A cached page counts as free then too:
    it keeps its contents until it is taken, those of the least recent use first.

    Example:
        >>> pool = PagePool(2)
        >>> page = pool.take(1)
        >>> pool.share(page)
        >>> pool.drop(page)
        >>> pool.free
        1
    """

    def __init__(self, pages: int, counts: CacheCounts | None = None) -> None:
        """`counts` is told of cached pages that were taken."""
        self.size = pages
        self._counts = counts
        self._free = list(range(pages - 1, -1, -1))
        self._holders: Counter[int] = Counter()
        self._tree = PrefixTree(PAGE)
        self._cached: set[int] = set()
        self._unused = 0

    @property
    def free(self) -> int:
        """Number of pages that nothing holds."""
        return len(self._free) + self._unused

    @property
    def cached(self) -> int:
        """Number of pages that are cached by content, in use or not."""
        return len(self._cached)

    def take(self, count: int) -> list[int]:
        """Pages for one holder; there must be enough of them."""
        assert count <= self.free, "the caller asks only for what is free"
        self._tree.tick()
        while len(self._free) < count:
            page = self._tree.evict()
            assert page is not None, "pages that nothing uses are in the tree"
            self._forget(page)
            if self._counts is not None:
                self._counts.count(evictions=1)
        taken = [self._free.pop() for _ in range(count)]
        self._holders.update(taken)
        return taken

    def share(self, pages: Iterable[int]) -> None:
        """One holder more of each of these."""
        for page in pages:
            self._unused -= page in self._cached and page not in self._holders
            self._holders[page] += 1

    def drop(self, pages: Iterable[int]) -> None:
        """One holder less of each of these."""
        for page in pages:
            self._holders[page] -= 1
            if self._holders[page] == 0:
                del self._holders[page]
                if page in self._cached:
                    self._unused += 1
                else:
                    self._free.append(page)

    def match(self, tokens: Sequence[int]) -> list[int]:
        """Cached pages that these tokens begin with, for one holder; the last one is left out."""
        pages = self._tree.match(tokens[:-1])
        self.share(pages)
        return pages

    def keep(self, tokens: Sequence[int], pages: Sequence[int]) -> None:
        """Cache the full pages of a sequence that are in use."""
        added = self._tree.insert(tokens, lambda place: pages[place])
        self._cached.update(page for _, page in added)

    def drop_cached(self) -> None:
        """Cache nothing any more; what is in use stays so."""
        for page in self._tree.clear():
            self._forget(page)

    def _forget(self, page: int) -> None:
        self._cached.discard(page)
        if page not in self._holders:
            self._unused -= 1
            self._free.append(page)


# Attention contexts over the pages, for prefill and for decode.


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PagedPrefillContext:
    """Chunks of prompts: each looks at what its sequence has in its pages, and at itself.

    Example:
        Made by `PagedEngine` for every pass that reads prompts.
    """

    cache: KeyValues
    """Pages of all layers."""
    slots: Tensor
    """Where each packed token is stored."""
    tables: Tensor
    """`[chunks, pages]`."""
    chunks: Chunks
    """Lengths of the chunks and of what precedes them."""

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
        pages = self.cache.layer(layer)
        store(pages, key[0].transpose(0, 1), value[0].transpose(0, 1), self.slots)
        q = query[0].transpose(0, 1)
        return prefill(q, pages, self.tables, self.chunks, scale, window)[None]


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PagedDecodeContext:
    """One new token for each row.

    Example:
        Made by `PagedEngine` for every decode step.
    """

    cache: KeyValues
    """Pages of all layers."""
    slots: Tensor
    """Where each row's new token is stored; below 0: the row is inactive."""
    tables: Tensor
    """`[rows, pages]`."""
    lengths: Tensor
    """Keys of each row with the new one; 0: the row is inactive."""
    is_split: bool
    """Whether a row is spread over several programs."""
    arrivals: Tensor
    """A counter for each row and key head, 0 between two layers."""
    groups: Groups | None = None
    """Rows that read common pages together, in another order of sums; None: none does."""

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
        pages = self.cache.layer(layer)
        store(pages, key[0].transpose(0, 1), value[0].transpose(0, 1), self.slots)
        q = query[0].transpose(0, 1)
        read = q, pages, self.tables, self.lengths
        if self.groups is None:
            ways = {"is_split": self.is_split, "arrivals": self.arrivals}
            return decode(*read, scale, window, **ways)[None]
        return decode_grouped(*read, self.groups, scale, window, is_split=self.is_split)[None]

    def attend_joint(
        self, layer: int, joint: Joint, scale: float, window: AttentionWindow
    ) -> Tensor:
        """The same, with turning and storing in the kernel that attends; `[1, rows, heads, width]`.

        Rows that read in groups have kernels that expect both to be done.
        """
        if self.groups is not None or not joint.qkv.is_cuda:
            query, key, value = (x.transpose(0, 1)[None] for x in joint.turned())
            return self.attend(layer, query, key, value, scale, window)
        return decode_joint(
            joint,
            self.cache.layer(layer),
            self.tables,
            self.lengths,
            scale,
            window,
            is_split=self.is_split,
            arrivals=self.arrivals,
        )[None]
