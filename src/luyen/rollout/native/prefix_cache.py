"""The prefix cache of the embedded engines: keys and values of prefixes, by content.

How it works:

- A node is a block of consecutive tokens; the path from the root to it is all that stands before.
  Keys and values of a token depend on the tokens up to it and on the weights, on nothing else, so
  equal paths have equal keys and values. A block is a number: a page of the device's pool
  (`luyen.rollout.native.paged`), or a block of host memory (`HostBlocks`).
- A prompt is matched block by block, and only the tokens after the match are read. At least the
  last token is read, because the first sampled token follows from its hidden state.
- Reading a suffix over cached keys gives the bits of reading the whole: a token's attention sums
  its keys in an order that depends on positions only, and all else works on single tokens. This is
  the property that makes decoding equal to training, so it holds where exactness is promised. In
  faster arithmetic (bf16 on a CPU, `rollout.deterministic: false`) an answer depends on the rest
  of its batch in the last bits, and in the same way on what was cached.
- Prompts are kept once they are read, answers when they end, blocks of the least recent use go
  first. What running rows use is never taken from them.
- Cached keys belong to one state of the weights (`WeightGuard`). A
  fused optimizer writes weights without increasing a tensor's version, so versions alone prove
  nothing: before an idle engine uses what it cached, sums over all weights are compared. In-process
  training drops the cache after each generation, before anything can change.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, final, runtime_checkable

import torch
from torch import Tensor, nn

from luyen.base.system import memory_bytes
from luyen.models.weights import digest_numbers, is_adapter_layer
from luyen.rollout.native.kv_cache import RowCache
from luyen.rollout.protocol import CacheStats


@final
class _Node:
    """A block of tokens after those of its parent."""

    __slots__ = ("block", "children", "key", "parent", "used")

    def __init__(self, parent: "_Node | None", key: tuple[int, ...], block: int) -> None:
        self.parent = parent
        self.key = key
        self.block = block
        self.children: dict[tuple[int, ...], _Node] = {}
        self.used = 0


@final
class PrefixTree:
    """Known blocks of tokens, each after all that stands before it.

    Example:
        >>> tree = PrefixTree(2)
        >>> tree.insert((5, 6, 7, 8, 9), lambda place: 10 + place)
        [(0, 10), (1, 11)]
        >>> tree.match((5, 6, 7, 8, 1)), tree.match((5, 6, 1, 1)), tree.match((5,))
        ([10, 11], [10], [])
    """

    def __init__(self, size: int) -> None:
        """`size` is the number of tokens of a block."""
        self.size = size
        self._root = _Node(None, (), -1)
        # From the longest unused on. A path is marked from its end to the root, so that a node
        # stands before all of its ancestors, and the first node of all is a leaf.
        self._order: OrderedDict[_Node, None] = OrderedDict()
        self._clock = 0

    def __len__(self) -> int:
        """Number of blocks."""
        return len(self._order)

    def tick(self) -> None:
        """Begin a new period: what was used in earlier ones may be evicted."""
        self._clock += 1

    def match(self, tokens: Sequence[int]) -> list[int]:
        """Blocks of the longest known prefix, which count as used now."""
        path = self._path(tokens)
        self._mark(path)
        return [node.block for node in path]

    def insert(
        self, tokens: Sequence[int], block_at: Callable[[int], int | None]
    ) -> list[tuple[int, int]]:
        """Add the whole blocks of a sequence that are unknown; (place, block) of the new ones.

        `block_at` gives the block for a place, counted in blocks, or None to end here. It may
        evict; the path itself counts as used now and stays.
        """
        path = self._path(tokens)
        self._mark(path)
        added: list[tuple[int, int]] = []
        for place in range(len(path), len(tokens) // self.size):
            block = block_at(place)
            if block is None:
                break
            parent = path[-1] if path else self._root
            key = tuple(tokens[place * self.size : (place + 1) * self.size])
            node = parent.children[key] = _Node(parent, key, block)
            node.used = self._clock
            self._order[node] = None
            path.append(node)
            added.append((place, block))
        self._mark(path)
        return added

    def evict(self) -> int | None:
        """Remove the block of the least recent use; None: all were used in this period."""
        if not self._order:
            return None
        node = next(iter(self._order))
        if node.used == self._clock:
            return None
        assert node.parent is not None
        assert not node.children, "a node was used later than what follows it"
        del self._order[node], node.parent.children[node.key]
        return node.block

    def clear(self) -> list[int]:
        """Remove everything; the blocks that were there."""
        blocks = [node.block for node in self._order]
        self._order.clear()
        self._root.children.clear()
        return blocks

    def _path(self, tokens: Sequence[int]) -> list[_Node]:
        path: list[_Node] = []
        node = self._root
        for end in range(self.size, len(tokens) + 1, self.size):
            found = node.children.get(tuple(tokens[end - self.size : end]))
            if found is None:
                break
            path.append(found)
            node = found
        return path

    def _mark(self, path: Sequence[_Node]) -> None:
        for node in reversed(path):
            node.used = self._clock
            self._order.move_to_end(node)


@final
class CacheCounts:
    """Running totals of a prefix cache."""

    def __init__(self, size: int) -> None:
        """`size` is the number of tokens of a block."""
        self._stats = CacheStats(block_size=size)

    def count(
        self, *, tokens: int = 0, reused_tokens: int = 0, evictions: int = 0, drops: int = 0
    ) -> None:
        """Count a prompt of `tokens` tokens, or blocks that are gone."""
        now = self._stats
        self._stats = replace(
            now,
            prompts=now.prompts + (tokens > 0),
            hits=now.hits + (reused_tokens > 0),
            tokens=now.tokens + tokens,
            reused_tokens=now.reused_tokens + reused_tokens,
            evictions=now.evictions + evictions,
            drops=now.drops + drops,
        )

    def stats(self, *, blocks: int) -> CacheStats:
        """The totals, with the blocks there are now."""
        return replace(self._stats, blocks=blocks)


# Whether weights changed: keys and values of other weights are stale then. PyTorch counts writes to
# a tensor, but not all of them: a fused optimizer and a write through `.data` leave the version as
# it was. So versions and addresses are compared often, which costs nothing, and sums over all
# weights when something that was kept is about to be used after a pause.


@final
class WeightGuard:
    """Notices that the weights of a module are no longer those that results were kept for.

    Example:
        >>> module = nn.Linear(2, 1)
        >>> guard = WeightGuard(module)
        >>> guard.renew(is_idle=True, is_kept=False)
        True
        >>> guard.keep()
        >>> module.weight.data.zero_()  # no version counts this
        tensor([[0., 0.]])
        >>> guard.renew(is_idle=True, is_kept=True)
        True
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._tensors: list[Tensor] = []
        self._adapters: list[Any] = []
        self._marks: tuple[object, ...] = ()
        self._sums: tuple[int, ...] | None = None
        self.is_mixed = False
        """Whether work in progress began with other weights than those there are now."""

    def renew(self, *, is_idle: bool, is_kept: bool) -> bool:
        """Look at the weights; whether they changed since the last call, so that nothing is valid.

        `is_idle`: nothing is in progress. Then, if something is kept, every number is read: a fused
        optimizer or a write through `.data` increases no version.
        """
        if is_idle:
            everything = (*self._module.parameters(), *self._module.buffers())
            self._tensors = [_local(tensor) for tensor in everything]
            self._adapters = [m for m in self._module.modules() if is_adapter_layer(m)]
        marks = self._marks_now()
        is_same = marks == self._marks
        if is_same and is_idle and is_kept:
            is_same = self._sums is not None and self._sums == _sums(self._tensors)
        if not is_same or (is_idle and not is_kept):
            # Sums are those of the weights that kept results, and work in progress, belong to.
            self._marks, self._sums = marks, None
        self.is_mixed = not is_idle and (self.is_mixed or not is_same)
        return not is_same

    def keep(self) -> None:
        """Something may be kept from now on that is computed with the weights of the last `renew`.

        To be called when the work begins: weights may change unseen before its end.
        """
        if self._sums is None:
            self._sums = _sums(self._tensors)

    def _marks_now(self) -> tuple[object, ...]:
        """Where each tensor lies and how often it was written to, and which ones are in use."""
        return (
            vars(self._module).get("_is_exact"),
            *((m.disable_adapters, *m.active_adapters) for m in self._adapters),
            *((t.data_ptr(), t._version) for t in self._tensors),
        )


@runtime_checkable
class _Divided(Protocol):
    """A tensor that ranks divide."""

    def to_local(self) -> Tensor:
        """The part of this process."""
        ...


def _local(tensor: Tensor) -> Tensor:
    """What this process has of a tensor."""
    found = tensor.detach()
    return found.to_local() if isinstance(found, _Divided) else tensor


def _sums(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    """A sum over the bits of each tensor: 64-bit words on a CPU, digests on a GPU."""
    some = [t.detach() for t in tensors if t.numel() > 0]
    digests = digest_numbers({str(i): t for i, t in enumerate(some) if t.is_cuda})
    return tuple(digests[str(i)] if t.is_cuda else _sum_of_words(t) for i, t in enumerate(some))


def _sum_of_words(tensor: Tensor) -> int:
    """Of 8 bytes where the tensor consists of such, which is as fast as memory."""
    flat = tensor.contiguous().view(-1)
    size = flat.element_size()
    is_whole = flat.numel() * size % 8 == 0 and flat.storage_offset() * size % 8 == 0
    words = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return int(flat.view(torch.int64 if is_whole else words[size]).sum())


# Host memory, for the engine on a CPU. Blocks are copied: into a row when a prompt begins with
# them, out of a row when its prompt was read or its answer ended. Rows therefore never depend on
# what is evicted.

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
