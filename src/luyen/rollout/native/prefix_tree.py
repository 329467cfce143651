"""Which token prefixes have cached keys and values: a tree of whole blocks, by content.

How the prefix cache of the embedded engines works:

- A node is a block of consecutive tokens; the path from the root to it is all that stands before.
  Keys and values of a token depend on the tokens up to it and on the weights, on nothing else, so
  equal paths have equal keys and values. A block is a number: a page of the device's pool
  (`luyen.rollout.native.paged`), or a block of host memory (`luyen.rollout.native.prefix_cache`).
- A prompt is matched block by block, and only the tokens after the match are read. At least the
  last token is read, because the first sampled token follows from its hidden state.
- Reading a suffix over cached keys gives the bits of reading the whole: a token's attention sums
  its keys in an order that depends on positions only, and all else works on single tokens. This is
  the property that makes decoding equal to training, so it holds where exactness is promised. In
  faster arithmetic (bf16 on a CPU, `rollout.deterministic: false`) an answer depends on the rest
  of its batch in the last bits, and in the same way on what was cached.
- Prompts are kept once they are read, answers when they end, blocks of the least recent use go
  first. What running rows use is never taken from them.
- Cached keys belong to one state of the weights (`luyen.models.weight_guard.WeightGuard`). A
  fused optimizer writes weights without increasing a tensor's version, so versions alone prove
  nothing: before an idle engine uses what it cached, sums over all weights are compared. In-process
  training drops the cache after each generation, before anything can change.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import final

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
