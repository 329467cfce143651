"""Decode steps captured once per number of rows, replayed without the cost of launching them."""

import logging
from collections.abc import Sequence
from typing import Any, TypeAlias, final

import torch

from luyen.models.policy import Policy
from luyen.rollout.native.paged.pool import KeyValues
from luyen.rollout.native.paged.state import RowState
from luyen.rollout.native.paged.step import draw_step

_FEW_PROGRAMS = 288
"""Rows x heads up to which a row is always spread over several programs (measured on an H200)."""
_UNEVEN = 1.25
"""Longest row over the mean row from which on more rows are, too: whole ones end too far apart."""
_WARM_UP = 2
_LOG = logging.getLogger(__name__)

_Kind: TypeAlias = tuple[int, bool, bool, int]
"""Rows, whether any truncates, whether rows are spread, and members of a group at most."""


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


def is_spread(rows: int, heads: int, lengths: Sequence[int]) -> bool:
    """Whether the keys of a row are spread over several programs; `rows` are those of the bucket.

    Example:
        >>> [is_spread(256, 3, n) for n in ([900, 1000], [100, 1000])]
        [False, True]
    """
    is_uneven = max(lengths) * len(lengths) > _UNEVEN * sum(lengths)
    return rows * heads <= _FEW_PROGRAMS or is_uneven


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
        self._pool: Any = None

    def prepare(self, cache: KeyValues, state: RowState) -> None:
        """Forget graphs whose tensors have moved; called when a batch of requests begins."""
        if self._is_eager:
            return
        weights = (p.data_ptr() for p in self._policy.parameters())
        found = (*weights, cache.address, state.tokens.data_ptr(), self._policy.is_exact)
        if found != self._addresses:
            self.clear()
            self._addresses = found

    def clear(self) -> None:
        """Forget every graph and the memory behind it."""
        self._graphs.clear()
        self._pool = None

    def run(
        self,
        cache: KeyValues,
        state: RowState,
        lengths: Sequence[int],
        count: int,
        *,
        is_truncated: bool,
    ) -> None:
        """`count` decode steps of the first rows, which have about these lengths."""
        members = 0 if self._policy.is_exact else state.groups.most
        rows = bucket(len(lengths), state.rows)
        kind = (rows, is_truncated, is_spread(rows, self._heads, lengths), members)
        graph = self._graph(cache, state, kind)
        for _ in range(count):
            if graph is None:
                self._step(cache, state, kind)
            else:
                graph.replay()

    def _graph(self, cache: KeyValues, state: RowState, kind: _Kind) -> torch.cuda.CUDAGraph | None:
        """The graph of one step, captured at first need; None: steps are launched one by one."""
        if self._is_eager:
            return None
        if kind not in self._graphs:
            try:
                self._graphs[kind] = self._captured(cache, state, kind)
            except RuntimeError as error:
                self._give_up(error)
                return None
        return self._graphs[kind]

    def _give_up(self, error: RuntimeError) -> None:
        """Go on without graphs: some layers copy from the host, which cannot be captured."""
        if not any(word in str(error) for word in ("captur", "operation not permitted")):
            raise error
        torch.cuda.synchronize()
        self.clear()
        self._is_eager = True
        reason = str(error).splitlines()[0]
        _LOG.warning("decode steps of this model cannot be captured as graphs (%s)", reason)

    def _step(self, cache: KeyValues, state: RowState, kind: _Kind) -> None:
        size, is_truncated, is_split, members = kind
        draw_step(
            self._policy,
            cache,
            state,
            size,
            is_truncated=is_truncated,
            is_split=is_split,
            members=members,
        )

    def _captured(self, cache: KeyValues, state: RowState, kind: _Kind) -> torch.cuda.CUDAGraph:
        """A graph of one step. While it is made every row rests, so that nothing is drawn."""
        active, tick = state.active.clone(), state.tick.clone()
        state.active.zero_()
        try:
            return self._recorded(cache, state, kind)
        finally:
            state.active.copy_(active)
            state.tick.copy_(tick)

    def _recorded(self, cache: KeyValues, state: RowState, kind: _Kind) -> torch.cuda.CUDAGraph:
        """Two steps that warm up, then one that is captured."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(_WARM_UP):
                state.tick.zero_()
                self._step(cache, state, kind)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            self._step(cache, state, kind)
        self._pool = self._pool or graph.pool()
        return graph
