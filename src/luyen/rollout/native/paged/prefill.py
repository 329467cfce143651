"""Reading prompts on the device: passes of whole or cut prompts, captured as CUDA graphs by size.

A pass launches some 300 kernels, which takes the host longer than the device takes for a few
thousand tokens. Captured passes have fixed sizes: padding tokens fill them, whose keys are stored
nowhere and which no other token attends to.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias, final

import numpy as np
import torch
from torch import Tensor

from luyen.models.paged_attention import PAGE, QUERY_TILE, Chunks, sent
from luyen.models.policy import Policy
from luyen.rollout.native.paged.graphs import GraphCache
from luyen.rollout.native.paged.kv_cache import KeyValues, PagedPrefillContext

Part: TypeAlias = tuple[int, int, int]
"""Number of a prompt, first token that is read, tokens."""

LARGEST_PASS = 8192
"""Tokens of a captured pass at most: the device takes longer for more of them than the host."""
_STEP, _FINE, _WIDE_STEP = 256, 4096, 1024
"""Sizes of captured passes are multiples of `_STEP` up to `_FINE`, and of `_WIDE_STEP` beyond."""
_CHUNK_TOKENS, _MOST_CHUNKS = 32, 64
"""A captured pass has room for a chunk for each so many tokens, up to so many chunks."""
_NOWHERE = 1 << 30
"""First query of a program that has none."""


def passes_of(
    lengths: Sequence[int], known: Sequence[int], budget: int, *, chunks: int | None = None
) -> list[list[Part]]:
    """The chunks of each pass: at most `budget` tokens, and at most so many chunks.

    Example:
        >>> passes_of([5, 3], [0, 1], 4)
        [[(0, 0, 4)], [(0, 4, 1), (1, 1, 2)]]
    """
    passes: list[list[Part]] = [[]]
    room = budget
    for index, (length, done) in enumerate(zip(lengths, known, strict=True)):
        while done < length:
            if room == 0 or len(passes[-1]) == chunks:
                passes.append([])
                room = budget
            count = min(length - done, room)
            passes[-1].append((index, done, count))
            done += count
            room -= count
    return passes


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PassShape:
    """Room of a pass, and how its numbers lie in one array.

    Example:
        >>> PassShape(tokens=256, chunks=8, pages=2).tiles
        12
    """

    tokens: int
    """Tokens that are read."""
    chunks: int
    """Chunks of prompts."""
    pages: int
    """Pages of a prompt."""

    @classmethod
    def captured(cls, tokens: int, chunks: int, pages: int) -> "PassShape":
        """The captured pass that so many tokens in so many chunks are read in.

        Example:
            >>> asked = ((1, 1), (2100, 4), (4097, 4), (300, 30))
            >>> [PassShape.captured(*n, 2).tokens for n in asked]
            [256, 2304, 5120, 1024]
        """
        tokens = max(tokens, chunks * _CHUNK_TOKENS)
        step = _STEP if tokens <= _FINE else _WIDE_STEP
        tokens = -(-tokens // step) * step
        return cls(tokens=tokens, chunks=min(tokens // _CHUNK_TOKENS, _MOST_CHUNKS), pages=pages)

    @property
    def tiles(self) -> int:
        """Programs of attention for each head: no chunks of these tokens need more."""
        return self.tokens // QUERY_TILE + self.chunks

    @property
    def numbers(self) -> int:
        """Numbers of the array."""
        return sum(self.sizes)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Numbers of each field of `PassNumbers`."""
        lines = (*[self.tokens] * 3, *[self.chunks] * 4)
        return (*lines, 2 * self.tiles, self.chunks * self.pages)


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PassNumbers:
    """What a pass reads, as views of one array of int64, on the host (numpy) or on the device.

    Example:
        >>> shape = PassShape(tokens=256, chunks=8, pages=2)
        >>> PassNumbers.of(shape, np.zeros(shape.numbers, np.int64)).tables.shape
        (8, 2)
    """

    tokens: Any
    """Tokens of all chunks, one after the other."""
    places: Any
    """Place of each in its sequence."""
    slots: Any
    """Where its keys and values are stored; below 0: nowhere."""
    starts: Any
    """First token of each chunk."""
    queries: Any
    """Tokens of each chunk; 0: no chunk."""
    keys: Any
    """Tokens of its sequence up to the end of the chunk."""
    ends: Any
    """Last token of each chunk."""
    tiles: Any
    """`[tiles, 2]`: chunk and first query of each program of attention."""
    tables: Any
    """`[chunks, pages]`."""

    @classmethod
    def of(cls, shape: PassShape, flat: Any) -> "PassNumbers":
        """The views of an array of `shape.numbers` numbers."""
        cuts = np.cumsum((0, *shape.sizes)).tolist()
        tokens, places, slots, starts, queries, keys, ends, tiles, tables = (
            flat[a:b] for a, b in pairwise(cuts)
        )
        return cls(
            tokens=tokens,
            places=places,
            slots=slots,
            starts=starts,
            queries=queries,
            keys=keys,
            ends=ends,
            tiles=tiles.reshape(shape.tiles, 2),
            tables=tables.reshape(shape.chunks, shape.pages),
        )


def pass_numbers(
    shape: PassShape,
    prompts: Sequence[Sequence[int]],
    pages: Sequence[Sequence[int]],
    part: Sequence[Part],
) -> np.ndarray[Any, np.dtype[np.int64]]:
    """The numbers of a pass on the host. Programs that look at most keys come first."""
    flat = np.zeros(shape.numbers, np.int64)
    found = PassNumbers.of(shape, flat)
    found.slots[:] = -1
    found.tiles[:, 1] = _NOWHERE
    programs: list[tuple[int, int, int]] = []
    at = 0
    for row, (index, done, count) in enumerate(part):
        here, own = slice(at, at + count), np.asarray(pages[index])
        place = np.arange(done, done + count)
        found.tokens[here] = prompts[index][done : done + count]
        found.places[here] = place
        found.slots[here] = own[place // PAGE] * PAGE + place % PAGE
        found.starts[row], found.queries[row], found.keys[row] = at, count, done + count
        at += count
        found.ends[row] = at - 1
        found.tables[row, : len(own)] = own
        programs += [(done + first, row, first) for first in range(0, count, QUERY_TILE)]
    for place, (_, row, first) in enumerate(sorted(programs, reverse=True)):
        found.tiles[place] = row, first
    return flat


def read_pass(policy: Policy, cache: KeyValues, shape: PassShape, flat: Tensor) -> Tensor:
    """Store keys and values of a pass; the last hidden state of each chunk, `[chunks, hidden]`."""
    found = PassNumbers.of(shape, flat)
    context = PagedPrefillContext(
        cache=cache,
        slots=found.slots,
        tables=found.tables.int(),
        chunks=Chunks(
            starts=found.starts.int(),
            queries=found.queries.int(),
            keys=found.keys.int(),
            longest_query=shape.tokens,
            longest_key=shape.pages * PAGE,
            tiles=found.tiles.int(),
        ),
    )
    return policy.hidden(found.tokens, found.places, context).index_select(0, found.ends)


@final
class PromptReader:
    """Reads prompts in passes, which are captured as graphs where that is possible."""

    def __init__(self, policy: Policy, *, tokens_at_once: int, pages: int, is_eager: bool) -> None:
        """Passes have at most `tokens_at_once` tokens, and a prompt at most `pages` pages."""
        self._policy = policy
        self._budget = tokens_at_once
        self._pages = pages
        is_eager = is_eager or policy.device.type != "cuda"
        self._graphs = GraphCache[PassShape]("passes over prompts", is_eager=is_eager)
        self._buffers: dict[PassShape, _PassBuffer] = {}

    @property
    def is_captured(self) -> bool:
        """Whether passes are captured graphs, as far as is known yet."""
        return not self._graphs.is_eager

    def prepare(self, cache: KeyValues) -> None:
        """Forget graphs whose tensors have moved; called when a batch of requests begins."""
        if self._graphs.prepare(self._policy, cache.address):
            self._buffers.clear()

    def clear(self) -> None:
        """Forget every graph and the memory behind it."""
        self._graphs.clear()
        self._buffers.clear()

    @torch.no_grad()
    def read(
        self,
        cache: KeyValues,
        prompts: Sequence[Sequence[int]],
        pages: Sequence[Sequence[int]],
        known: Sequence[int],
    ) -> Tensor:
        """Fill the pages of each prompt, and give the last hidden state of each.

        The first `known` tokens of a prompt are in its pages already. A result does not depend on
        the passes, nor on what is known: chunks look at their predecessors through the pages.
        """
        last: list[Tensor] = [torch.empty(0)] * len(prompts)
        is_eager = self._graphs.is_eager
        budget = self._budget if is_eager else min(self._budget, LARGEST_PASS)
        lengths, most = [len(prompt) for prompt in prompts], None if is_eager else _MOST_CHUNKS
        for part in passes_of(lengths, known, budget, chunks=most):
            hidden = self._read_pass(cache, prompts, pages, part)
            for row, (index, *_) in enumerate(part):
                last[index] = hidden[row]
        return torch.stack(last)

    def _read_pass(
        self,
        cache: KeyValues,
        prompts: Sequence[Sequence[int]],
        pages: Sequence[Sequence[int]],
        part: Sequence[Part],
    ) -> Tensor:
        """One pass; the last hidden state of each chunk."""
        total = sum(count for *_, count in part)
        if not self._graphs.is_eager:
            shape = PassShape.captured(total, len(part), self._pages)
            found = self._replay(cache, shape, pass_numbers(shape, prompts, pages, part))
            if found is not None:
                return found[: len(part)].clone()
        widest = max(len(pages[index]) for index, *_ in part)
        shape = PassShape(tokens=total, chunks=len(part), pages=widest)
        numbers = sent(pass_numbers(shape, prompts, pages, part), self._policy.device)
        return read_pass(self._policy, cache, shape, numbers)

    def _replay(self, cache: KeyValues, shape: PassShape, numbers: Any) -> Tensor | None:
        """A captured pass; None where passes cannot be captured."""
        device = self._policy.device
        if shape not in self._buffers:
            flat = sent(pass_numbers(shape, (), (), ()), device)
            self._buffers[shape] = _PassBuffer(numbers=flat)
        buffer = self._buffers[shape]

        def work() -> None:
            buffer.put(read_pass(self._policy, cache, shape, buffer.numbers))

        graph = self._graphs.get(shape, work)
        if graph is None:
            # Not now, or never. Graphs that are there read the buffers of their own shapes.
            del self._buffers[shape]
            if self._graphs.is_eager:
                self._buffers.clear()
            return None
        buffer.numbers.copy_(sent(numbers, device))
        graph.replay()
        return buffer.hidden


@final
class _PassBuffer:
    """Tensors of a captured pass at fixed addresses."""

    __slots__ = ("hidden", "numbers")

    def __init__(self, *, numbers: Tensor) -> None:
        self.numbers = numbers
        self.hidden: Tensor | None = None
        """Last hidden state of each chunk; None before the pass was made once."""

    def put(self, hidden: Tensor) -> None:
        """Keep what a pass gave."""
        if self.hidden is None:
            self.hidden = torch.empty_like(hidden)
        self.hidden.copy_(hidden)
