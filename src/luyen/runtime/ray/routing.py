"""Who gets the next request: whoever knows its beginning, unless others have much less to do.

The cost of a choice does not grow with the number of replicas, but for the depth of a heap.
"""

import heapq
from collections import OrderedDict
from collections.abc import Sequence
from typing import final

_BLOCK = 32
"""Tokens of a block; what is shorter is not worth remembering."""
_REMEMBERED = 1 << 16
"""Conversations whose replica is remembered."""
_SLACK = 8
"""Answers by which a known replica may be ahead of the idlest one."""


@final
class Router:
    """Loads of the replicas, and where conversations were held before.

    Example:
        >>> router = Router()
        >>> router.open(0), router.open(1)
        (None, None)
        >>> first = router.choose((1,) * 40)
        >>> router.add(first, 4)
        >>> first, router.choose((2,) * 40), router.choose((1,) * 80)
        (0, 1, 0)
    """

    def __init__(self) -> None:
        self._loads: dict[int, int] = {}
        self._heap: list[tuple[int, int]] = []
        self._homes: OrderedDict[int, int] = OrderedDict()

    def open(self, replica: int) -> None:
        """A replica takes requests from now on; it has none."""
        self._loads[replica] = 0
        heapq.heappush(self._heap, (0, replica))

    def shut(self, replica: int) -> None:
        """A replica takes no requests any more; what it had is not counted."""
        self._loads.pop(replica, None)

    def add(self, replica: int, answers: int) -> None:
        """A replica has so many answers more to draw, or fewer."""
        if replica not in self._loads:
            return
        self._loads[replica] += answers
        heapq.heappush(self._heap, (self._loads[replica], replica))
        if len(self._heap) > 64 + 4 * len(self._loads):
            self._heap = [(load, name) for name, load in self._loads.items()]
            heapq.heapify(self._heap)

    def choose(self, tokens: Sequence[int]) -> int | None:
        """The replica for a prompt, which is then remembered; None: no replica is open."""
        idlest = self._idlest()
        if idlest is None:
            return None
        blocks = _chain(tokens)
        home = next((self._homes[b] for b in reversed(blocks) if b in self._homes), None)
        is_fit = home in self._loads and self._loads[home] <= self._loads[idlest] + _SLACK
        chosen = home if home is not None and is_fit else idlest
        if blocks:
            self._remember(blocks[-1], chosen)
        return chosen

    def _idlest(self) -> int | None:
        """The least loaded replica, the first among equals; entries that are out of date go."""
        while self._heap:
            load, replica = self._heap[0]
            if self._loads.get(replica) == load:
                return replica
            heapq.heappop(self._heap)
        return None

    def _remember(self, block: int, replica: int) -> None:
        self._homes[block] = replica
        self._homes.move_to_end(block)
        if len(self._homes) > _REMEMBERED:
            self._homes.popitem(last=False)


def _chain(tokens: Sequence[int]) -> list[int]:
    """A hash for each beginning of whole blocks: equal beginnings have equal hashes."""
    found: list[int] = []
    last = 0
    for start in range(0, len(tokens) - _BLOCK + 1, _BLOCK):
        last = hash((last, tuple(tokens[start : start + _BLOCK])))
        found.append(last)
    return found
