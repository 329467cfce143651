"""Decode steps captured once per number of rows, replayed without the cost of launching them."""

from typing import TypeAlias, final

import torch

from luyen.models.policy import Policy
from luyen.rollout.native.paged.pool import KeyValues
from luyen.rollout.native.paged.state import RowState
from luyen.rollout.native.paged.step import draw_step

_FEW_PROGRAMS = 512
"""Rows x heads below which a row's keys are spread over several programs."""
_WARM_UP = 2

_Kind: TypeAlias = tuple[int, bool]


def bucket(rows: int, most: int) -> int:
    """The number of rows that is computed for `rows`: the next power of two, or one between.

    Example:
        >>> [bucket(n, 300) for n in (1, 3, 33, 65, 200, 290)]
        [1, 4, 48, 96, 256, 300]
    """
    size = 1
    while size < rows:
        size *= 2
    if size > 32 and rows <= size * 3 // 4:
        size = size * 3 // 4
    return min(size, most)


@final
class Steps:
    """Runs decode steps, as captured graphs where that is possible.

    Graphs hold addresses. They are captured again when the weights, the pages or the rows have
    moved.
    """

    def __init__(self, policy: Policy, *, heads: int, is_eager: bool) -> None:
        """`heads` is how many heads of keys and values a layer has."""
        self._policy = policy
        self._heads = heads
        self._is_eager = is_eager or policy.device.type != "cuda"
        self._graphs: dict[_Kind, torch.cuda.CUDAGraph] = {}
        self._addresses: tuple[int, ...] = ()
        self._pool: tuple[int, int] | None = None

    def prepare(self, cache: KeyValues, state: RowState) -> None:
        """Forget graphs whose tensors have moved; called when a batch of requests begins."""
        if self._is_eager:
            return
        weights = (p.data_ptr() for p in self._policy.parameters())
        found = (*weights, cache.address, state.tokens.data_ptr())
        if found != self._addresses:
            self.clear()
            self._addresses = found

    def clear(self) -> None:
        """Forget every graph and the memory behind it."""
        self._graphs.clear()
        self._pool = None

    def run(
        self, cache: KeyValues, state: RowState, rows: int, count: int, *, is_truncated: bool
    ) -> None:
        """`count` decode steps of the first `rows` rows."""
        size = bucket(rows, state.rows)
        if self._is_eager:
            for _ in range(count):
                self._step(cache, state, size, is_truncated)
            return
        kind = (size, is_truncated)
        if kind not in self._graphs:
            self._graphs[kind] = self._captured(cache, state, size, is_truncated)
        for _ in range(count):
            self._graphs[kind].replay()

    def _step(self, cache: KeyValues, state: RowState, size: int, is_truncated: bool) -> None:
        draw_step(
            self._policy,
            cache,
            state,
            size,
            is_truncated=is_truncated,
            is_split=size * self._heads < _FEW_PROGRAMS,
        )

    def _captured(
        self, cache: KeyValues, state: RowState, size: int, is_truncated: bool
    ) -> torch.cuda.CUDAGraph:
        """A graph of one step. While it is made every row rests, so that nothing is drawn."""
        active, tick = state.active.clone(), state.tick.clone()
        state.active.zero_()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(_WARM_UP):
                state.tick.zero_()
                self._step(cache, state, size, is_truncated)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            self._step(cache, state, size, is_truncated)
        self._pool = self._pool or graph.pool()
        state.active.copy_(active)
        state.tick.copy_(tick)
        return graph
