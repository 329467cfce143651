"""Keys and values of prefixes in host memory, for the engine on a CPU.

Blocks are copied: into a row when a prompt begins with them, out of a row when its prompt was read
or its answer ended. Rows therefore never depend on what is evicted. `prefix_tree` says what is
cached, and why no answer changes.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import final

import torch
from torch import Tensor, nn

from luyen.base.system import memory_bytes
from luyen.models.weight_guard import WeightGuard
from luyen.rollout.native.kv_cache import RowCache
from luyen.rollout.native.prefix_tree import CacheCounts, PrefixTree
from luyen.rollout.protocol import CacheStats

BLOCK = 8
"""Tokens of a block. A turn of a conversation loses half a block on average."""
_SHARE = 16
"""The cache takes at most one part in so many of the memory of machine or container."""
_CONTAINER = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
"""Files with the memory that a container may take, in the two versions of control groups."""
_FIRST = 512
"""Blocks that memory is taken for at first; it doubles from there."""

_Pair = tuple[Tensor, Tensor]


def default_bytes() -> int:
    """Bytes of host memory that a prefix cache may take."""
    memory = memory_bytes()
    for path in _CONTAINER:
        with suppress(OSError, ValueError):  # no such file, or no limit in it
            memory = min(memory, int(Path(path).read_text()))
    return memory // _SHARE


@final
class HostBlocks:
    """Keys and values of blocks: `[blocks, 8, kv heads, width]` for each layer."""

    def __init__(self) -> None:
        self._layers: dict[int, _Pair] = {}
        self._free: list[int] = []
        self._size = 0

    def take(self, most: int) -> int | None:
        """A free block, of at most `most` that there may be; None: all are in use."""
        if not self._free and self._size < most:
            size = min(most, max(_FIRST, 2 * self._size))
            self._free = list(range(size - 1, self._size - 1, -1))
            self._size = size
        return self._free.pop() if self._free else None

    def give_back(self, block: int) -> None:
        """The block is free again."""
        self._free.append(block)

    def write(self, layer: int, blocks: Tensor, keys: Tensor, values: Tensor) -> None:
        """Fill blocks with `[tok, kv heads, width]`, 8 tokens each."""
        pair = self._layers.get(layer)
        if pair is None or pair[0].shape[0] < self._size:
            pair = self._layers[layer] = _grown(pair, (keys, values), self._size)
        for cached, fresh in zip(pair, (keys, values), strict=True):
            cached[blocks] = fresh.unflatten(0, (-1, BLOCK))

    def read(self, layer: int, blocks: Tensor) -> _Pair:
        """Keys and values `[tok, kv heads, width]` of these blocks."""
        keys, values = (x.index_select(0, blocks).flatten(0, 1) for x in self._layers[layer])
        return keys, values


def _grown(old: _Pair | None, like: _Pair, size: int) -> _Pair:
    keys, values = (x.new_empty(size, BLOCK, *x.shape[1:]) for x in like)
    if old is not None:
        keys[: len(old[0])], values[: len(old[1])] = old
    return keys, values


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KnownPrefixes:
    """Cached beginnings of some sequences, one after the other.

    Example:
        Made by `PrefixCache.known` for prompts whose beginning is cached.
    """

    store: HostBlocks
    """Where they are."""
    blocks: Tensor
    """The blocks of all sequences."""

    def load(self, layer: int) -> _Pair:
        """Keys and values `[known tok, kv heads, width]`."""
        return self.store.read(layer, self.blocks)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class CachedRow:
    """A row of the engine whose keys and values may be kept.

    Example:
        >>> CachedRow(row=0, tokens=(5, 6, 7)).row
        0
    """

    row: int
    """Its index."""
    tokens: tuple[int, ...]
    """The tokens whose keys and values it has, from the first on."""


@final
class PrefixCache:
    """What the engine on a CPU knows of prompts and answers that it computed before."""

    def __init__(self, module: nn.Module, *, most_bytes: int | None = None) -> None:
        """`module` has the weights; `most_bytes` of memory, None: a share of the machine's."""
        self._guard = WeightGuard(module)
        self._limit = default_bytes() if most_bytes is None else most_bytes
        self._tree = PrefixTree(BLOCK)
        self._store = HostBlocks()
        self._counts = CacheCounts(BLOCK)
        self._most: int | None = None

    def begin_pass(self, *, is_idle: bool) -> None:
        """Before a pass: drop everything if the weights are other ones; `is_idle`: no row runs."""
        self._tree.tick()
        if self._guard.renew(is_idle=is_idle, is_kept=len(self._tree) > 0):
            self.drop()

    def match(self, tokens: Sequence[int]) -> list[int]:
        """Blocks of the prompt's beginning; they stay until the next pass begins."""
        return self._tree.match(tokens[:-1])

    def count(self, tokens: Sequence[int], blocks: Sequence[int]) -> None:
        """Count a prompt that is read, and its blocks that were cached."""
        self._counts.count(tokens=len(tokens), reused_tokens=BLOCK * len(blocks))

    def known(self, blocks: Sequence[int], device: torch.device) -> KnownPrefixes:
        """Keys and values of matched blocks."""
        return KnownPrefixes(store=self._store, blocks=torch.tensor(blocks, device=device))

    def keep(self, cache: RowCache, rows: Sequence[CachedRow], *, is_ended: bool) -> None:
        """Copy out what rows have and the tree has not.

        `is_ended`: their answers are complete, and began before this pass.
        """
        if is_ended and self._guard.is_mixed:
            return
        self._guard.keep()
        spans: list[tuple[int, int, int]] = []
        blocks: list[int] = []
        for one in rows:
            added = self._tree.insert(one.tokens, lambda _: self._take(cache))
            if added:
                first, last = added[0][0], added[-1][0] + 1
                spans.append((one.row, first * BLOCK, last * BLOCK))
                blocks += [block for _, block in added]
        if not blocks:
            return
        for layer in cache.layers:
            keys, values = cache.tokens(layer, spans)
            self._store.write(layer, torch.tensor(blocks, device=keys.device), keys, values)

    def drop(self) -> None:
        """Forget everything and free the memory."""
        if self._tree.clear():
            self._counts.count(drops=1)
        self._store = HostBlocks()

    def stats(self) -> CacheStats:
        """What the cache did so far."""
        return self._counts.stats(blocks=len(self._tree))

    def _take(self, cache: RowCache) -> int | None:
        """A block to write into; None: the memory is full of what this pass uses."""
        if self._most is None:
            self._most = self._limit // (BLOCK * cache.token_bytes)
        block = self._store.take(self._most)
        if block is None:
            block = self._tree.evict()
            self._counts.count(evictions=block is not None)
        return block
