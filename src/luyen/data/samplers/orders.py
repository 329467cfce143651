"""Built-in samplers: sequential, shuffled, grouped, mixed in proportions, curriculum."""

import heapq
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any, final

from luyen.base.errors import UserError, did_you_mean
from luyen.base.records import Prompt
from luyen.base.seeds import derive_key, shuffled, uniform
from luyen.data.samplers.protocol import KWARGS, State, samplers


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
        """The row indices at positions `cursor` to `cursor + count - 1`."""
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
        """The row indices at positions `cursor` to `cursor + count - 1`."""
        places = (divmod(position, self._size) for position in range(cursor, cursor + count))
        return [self._order(epoch)[place] for epoch, place in places]

    def _epoch(self, epoch: int) -> "array[int]":
        # A quarter of the memory of a list, which matters where rows are too many for memory.
        return array("Q", shuffled(self._size, derive_key(self._seed, "sampler/shuffled", epoch)))


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
        """Sources are distinguished by `data_source`."""
        self._size = len(prompts)
        self._seed = seed
        self._rows = rows_by_source(prompts)
        self._order = lru_cache(maxsize=2)(self._epoch)

    def take(self, cursor: int, count: int) -> list[int]:
        """The row indices at positions `cursor` to `cursor + count - 1`."""
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


# Mixture: data sources in given proportions.

_BLOCK = 1000


@samplers.register("mixed")
@final
class Mixed:
    """Data sources in given proportions, each with its own epochs.

    Of every thousand positions each source gets its share, rounded, in random order. A source with
    weight 0 is left out; a source without a weight is an error.

    Example:
        >>> from luyen.data.sources import load_dataset
        >>> rows = load_dataset(["arithmetic://sum?size=5", "arithmetic://product?size=5"]).prompts
        >>> weights = {"arithmetic/sum": 3, "arithmetic/product": 1}
        >>> indices = Mixed(rows, seed=0, weights=weights).take(0, 1000)
        >>> sum(row < 5 for row in indices)
        750
    """

    def __init__(
        self, prompts: Sequence[Prompt], *, seed: int, weights: Mapping[str, float]
    ) -> None:
        """`weights` gives every `data_source` its share; they need not add up to 1."""
        self._seed = seed
        self._rows = rows_by_source(prompts)
        self._quota = _quotas(weights, self._rows)
        self._block = lru_cache(maxsize=2)(self._mix_block)
        self._order = lru_cache(maxsize=4 * len(self._quota))(self._epoch)

    def take(self, cursor: int, count: int) -> list[int]:
        """The row indices at positions `cursor` to `cursor + count - 1`."""
        indices: list[int] = []
        for position in range(cursor, cursor + count):
            block, place = divmod(position, _BLOCK)
            name, nth = self._block(block)[place]
            epoch, inner = divmod(block * self._quota[name] + nth, len(self._rows[name]))
            indices.append(self._rows[name][self._order(name, epoch)[inner]])
        return indices

    def _epoch(self, name: str, epoch: int) -> list[int]:
        key = derive_key(self._seed, "sampler/mixed", name, epoch)
        return shuffled(len(self._rows[name]), key)

    def _mix_block(self, block: int) -> list[tuple[str, int]]:
        """Source of each position of a block, and how many of that source came before in it."""
        names = [name for name, quota in self._quota.items() for _ in range(quota)]
        order = shuffled(_BLOCK, derive_key(self._seed, "sampler/mixed", block))
        seen: Counter[str] = Counter()
        found: list[tuple[str, int]] = []
        for i in order:
            found.append((names[i], seen[names[i]]))
            seen[names[i]] += 1
        return found


def _quotas(weights: Mapping[str, float], rows: Mapping[str, Sequence[int]]) -> dict[str, int]:
    """How many positions of a block each source gets: shares rounded so that they add up."""
    for name, weight in weights.items():
        if name not in rows:
            why = "no row has this data source"
            raise UserError(f"{KWARGS}.weights", name, why, did_you_mean(name, rows))
        if not weight >= 0:
            why = f"the weight of `{name}` is negative"
            raise UserError(f"{KWARGS}.weights", weight, why, "give 0 or more")
    missing = sorted(set(rows) - set(weights))
    if missing:
        why = f"rows of `{missing[0]}` have no weight"
        raise UserError(f"{KWARGS}.weights", dict(weights), why, "give it one; 0 leaves it out")
    total = sum(weights.values())
    if not total > 0:
        raise UserError(f"{KWARGS}.weights", dict(weights), "all weights are 0", "raise one")
    ends = [round(_BLOCK * part / total) for part in accumulate(weights.values())]
    sizes = [end - start for start, end in zip([0, *ends], ends, strict=False)]
    quotas = dict(zip(weights, sizes, strict=True))
    lost = [name for name, size in quotas.items() if not size and weights[name]]
    if lost:
        why = f"`{lost[0]}` would get less than one row in {_BLOCK}"
        raise UserError(f"{KWARGS}.weights", weights[lost[0]], why, "raise it, or set it to 0")
    return {name: size for name, size in quotas.items() if size}


# Curriculum: rows from easy to hard by a number each carries, in growing stages.


@samplers.register("curriculum")
@final
class Curriculum:
    """Stage s of S samples from the easiest s/S of the rows, shuffled; the last stage from all.

    Without `promote_at` a stage is one pass over its rows, and the stage is a function of the
    cursor. With it the next stage begins when the policy succeeds that often, and the state is two
    integers: the stage, and the cursor at which it began.

    Example:
        >>> from luyen.data.sources import load_dataset
        >>> rows = load_dataset(["arithmetic://sum?size=40"]).prompts
        >>> easy = Curriculum(rows, seed=0, key="difficulty", stages=4).take(0, 10)
        >>> hard = Curriculum(rows, seed=0, key="difficulty", stages=4).take(70, 10)
        >>> level = lambda indices: max(rows[i].extra_info["difficulty"] for i in indices)
        >>> level(easy) <= level(hard)
        True
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        *,
        seed: int,
        key: str,
        stages: int = 4,
        promote_at: float | None = None,
    ) -> None:
        """`key` names a number in `extra_info`, larger for harder rows."""
        if stages < 1 or stages > len(prompts):
            why = f"{len(prompts)} rows make from 1 to {len(prompts)} stages"
            raise UserError(f"{KWARGS}.stages", stages, why, "choose within")
        if promote_at is not None and not 0 < promote_at <= 1:
            why = "a share of successes lies above 0 and at most at 1"
            raise UserError(f"{KWARGS}.promote_at", promote_at, why, "give 0.7, for instance")
        values = [_difficulty(prompt, key) for prompt in prompts]
        self._easiest = sorted(range(len(prompts)), key=lambda i: (values[i], i))
        self._sizes = [len(prompts) * (stage + 1) // stages for stage in range(stages)]
        self._promote_at = promote_at
        self.state: State = (0, 0)
        self._seed = seed
        self._order = lru_cache(maxsize=4)(self._epoch)

    def take(self, cursor: int, count: int) -> list[int]:
        """The row indices at positions `cursor` to `cursor + count - 1`, for the current state."""
        return [self._index_at(position) for position in range(cursor, cursor + count)]

    def record(self, cursor: int, success: float) -> None:
        """Begin the next stage at `cursor` when the policy succeeds often enough."""
        stage = self.state[0]
        if self._promote_at is None or stage + 1 == len(self._sizes):
            return
        if success >= self._promote_at:
            self.state = (stage + 1, cursor)

    def _epoch(self, stage: int, epoch: int) -> list[int]:
        return shuffled(
            self._sizes[stage], derive_key(self._seed, "sampler/curriculum", stage, epoch)
        )

    def _index_at(self, position: int) -> int:
        stage, start = self.state if self._promote_at is not None else self._stage_of(position)
        assert position >= start, "a position from before the stage began"
        epoch, place = divmod(position - start, self._sizes[stage])
        return self._easiest[self._order(stage, epoch)[place]]

    def _stage_of(self, position: int) -> tuple[int, int]:
        """The stage of a position, and the position at which that stage began."""
        start = 0
        for stage, size in enumerate(self._sizes[:-1]):
            if position < start + size:
                return stage, start
            start += size
        return len(self._sizes) - 1, start


def _difficulty(prompt: Prompt, key: str) -> float:
    value: Any = prompt.extra_info.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float):
        if key not in prompt.extra_info:
            fix = did_you_mean(key, prompt.extra_info)
            raise UserError(f"{KWARGS}.key", key, "a row's extra_info lacks it", fix)
        why = f"a row's extra_info has {value!r} there, which is no number"
        raise UserError(f"{KWARGS}.key", key, why, "choose a key with numbers")
    return float(value)


# Mixture of files: rows of several files in the proportions of `data.train_weights`.
#
# The k-th row of a file with weight w is due at the time (k + u) / w, where u in [0, 1) is a number
# of the seed, the file and k; the rows of all files are taken in the order of these times. So among
# the first N rows a file has its share of N to within the number of files, the order is a pure
# function of the seed, and any position is found without walking to it from the beginning.

WEIGHTS = "data.train_weights"


@final
class Mixture:
    """An endless order over the rows of several files; each file has its own passes.

    A pass over a file visits each of its rows once, in an order of its own.

    Example:
        >>> order = Mixture([0, 0, 0, 0, 1, 1], weights=(3, 1), seed=0).take(0, 400)
        >>> sum(row < 4 for row in order)
        300
    """

    def __init__(self, files: Sequence[int], *, weights: Sequence[float], seed: int) -> None:
        """`files`: of each row, the place of its file in `weights`; a weight of 0 leaves it out."""
        rows: dict[int, list[int]] = {file: [] for file, w in enumerate(weights) if w > 0}
        for row, file in enumerate(files):
            if file in rows:
                rows[file].append(row)
        empty = next((file for file, found in rows.items() if not found), None)
        if empty is not None or not rows:
            why = f"no row is left of the file number {empty or 0}, counted from 0"
            raise UserError(WEIGHTS, list(weights), why, "give it rows, or the weight 0")
        total = sum(weights)
        self._rows = rows
        self._shares = {file: weights[file] / total for file in rows}
        self._keys = {file: derive_key(seed, "sampler/mixture/due", file) for file in rows}
        self._seed = seed
        self._order = lru_cache(maxsize=2 * len(rows))(self._pass_order)

    def take(self, cursor: int, count: int) -> list[int]:
        """The row indices at positions `cursor` to `cursor + count - 1`."""
        taken = self._counts_before(max(0.0, float(cursor - len(self._rows))))
        queue = [(self._due(file, nth), file) for file, nth in taken.items()]
        heapq.heapify(queue)
        found: list[int] = []
        for position in range(sum(taken.values()), cursor + count):
            _, file = queue[0]
            if position >= cursor:
                found.append(self._row(file, taken[file]))
            taken[file] += 1
            heapq.heapreplace(queue, (self._due(file, taken[file]), file))
        return found

    def _due(self, file: int, nth: int) -> float:
        """When the nth row of a file is taken; increasing in `nth`."""
        return (nth + uniform(self._keys[file], nth)) / self._shares[file]

    def _counts_before(self, time: float) -> dict[int, int]:
        """Rows of each file that are due before a time: at most as many as the time itself says."""
        counts: dict[int, int] = {}
        for file, share in self._shares.items():
            nth = int(time * share)
            while self._due(file, nth) < time:
                nth += 1
            while nth > 0 and self._due(file, nth - 1) >= time:
                nth -= 1
            counts[file] = nth
        return counts

    def _row(self, file: int, nth: int) -> int:
        rows = self._rows[file]
        turn, place = divmod(nth, len(rows))
        return rows[self._order(file, turn)[place]]

    def _pass_order(self, file: int, turn: int) -> list[int]:
        return shuffled(
            len(self._rows[file]), derive_key(self._seed, "sampler/mixture", file, turn)
        )
