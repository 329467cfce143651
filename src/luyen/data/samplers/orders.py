"""Orders in which every epoch visits every row once."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, final

from luyen.base.records import Prompt
from luyen.base.seeds import derive_key, shuffled
from luyen.data.samplers.protocol import samplers


@samplers.register("sequential")
@final
class Sequential:
    """The rows as they stand, over and over.

    Example:
        >>> Sequential(["a", "b", "c"], seed=0).take(2, 3)
        [2, 0, 1]
    """

    def __init__(self, prompts: Sequence[Any], *, seed: int) -> None:
        """The seed changes nothing here."""
        del seed
        self._size = len(prompts)

    def take(self, cursor: int, count: int) -> list[int]:
        """The rows of `count` draws from `cursor` on."""
        return [position % self._size for position in range(cursor, cursor + count)]


@samplers.register("shuffled")
@final
class Shuffled:
    """Another permutation in every epoch.

    Example:
        >>> sorted(Shuffled(["a", "b", "c"], seed=0).take(3, 3))
        [0, 1, 2]
    """

    def __init__(self, prompts: Sequence[Any], *, seed: int) -> None:
        """Every epoch has an order of its own under the seed."""
        self._size = len(prompts)
        self._seed = seed
        self._order = lru_cache(maxsize=2)(self._epoch)

    def take(self, cursor: int, count: int) -> list[int]:
        """The rows of `count` draws from `cursor` on."""
        places = (divmod(position, self._size) for position in range(cursor, cursor + count))
        return [self._order(epoch)[place] for epoch, place in places]

    def _epoch(self, epoch: int) -> list[int]:
        return shuffled(self._size, derive_key(self._seed, "sampler/shuffled", epoch))


@samplers.register("grouped")
@final
class Grouped:
    """Rows of one data source together; sources and rows in another order in every epoch.

    Example:
        >>> from luyen.data.sources import load_dataset
        >>> rows = load_dataset(["arithmetic://sum?size=2", "arithmetic://product?size=2"]).prompts
        >>> {frozenset(Grouped(rows, seed=0).take(c, 2)) for c in (0, 2)} == {
        ...     frozenset({0, 1}), frozenset({2, 3})}
        True
    """

    def __init__(self, prompts: Sequence[Prompt], *, seed: int) -> None:
        """Sources are told apart by `data_source`."""
        self._size = len(prompts)
        self._seed = seed
        self._rows = rows_by_source(prompts)
        self._order = lru_cache(maxsize=2)(self._epoch)

    def take(self, cursor: int, count: int) -> list[int]:
        """The rows of `count` draws from `cursor` on."""
        places = (divmod(position, self._size) for position in range(cursor, cursor + count))
        return [self._order(epoch)[place] for epoch, place in places]

    def _epoch(self, epoch: int) -> list[int]:
        names = sorted(self._rows)
        key = derive_key(self._seed, "sampler/grouped", epoch)
        order: list[int] = []
        for name in (names[i] for i in shuffled(len(names), key)):
            rows = self._rows[name]
            inner = derive_key(self._seed, "sampler/grouped", epoch, name)
            order += [rows[i] for i in shuffled(len(rows), inner)]
        return order


def rows_by_source(prompts: Sequence[Prompt]) -> dict[str, list[int]]:
    """Data source -> places of its rows."""
    rows: dict[str, list[int]] = {}
    for i, prompt in enumerate(prompts):
        rows.setdefault(prompt.data_source, []).append(i)
    return rows
