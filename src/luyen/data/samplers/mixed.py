"""Data sources in given proportions."""

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import final

from luyen.base.errors import UserError
from luyen.base.records import Prompt
from luyen.base.seeds import derive_key, shuffled
from luyen.base.suggest import did_you_mean
from luyen.data.samplers.orders import rows_by_source
from luyen.data.samplers.protocol import KWARGS, samplers

_BLOCK = 1000


@samplers.register("mixed")
@final
class Mixed:
    """Data sources in given proportions, each with its own epochs.

    Of every thousand draws each source gets its share, rounded, in random order. A source with
    weight 0 is left out; a source without a weight is an error.

    Example:
        >>> from luyen.data.sources import load_dataset
        >>> rows = load_dataset(["arithmetic://sum?size=5", "arithmetic://product?size=5"]).prompts
        >>> weights = {"arithmetic/sum": 3, "arithmetic/product": 1}
        >>> drawn = Mixed(rows, seed=0, weights=weights).take(0, 1000)
        >>> sum(row < 5 for row in drawn)
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
        """The rows of `count` draws from `cursor` on."""
        drawn: list[int] = []
        for position in range(cursor, cursor + count):
            block, place = divmod(position, _BLOCK)
            name, nth = self._block(block)[place]
            epoch, inner = divmod(block * self._quota[name] + nth, len(self._rows[name]))
            drawn.append(self._rows[name][self._order(name, epoch)[inner]])
        return drawn

    def _epoch(self, name: str, epoch: int) -> list[int]:
        key = derive_key(self._seed, "sampler/mixed", name, epoch)
        return shuffled(len(self._rows[name]), key)

    def _mix_block(self, block: int) -> list[tuple[str, int]]:
        """Source of each draw of a block, and how many of that source came before in it."""
        names = [name for name, quota in self._quota.items() for _ in range(quota)]
        order = shuffled(_BLOCK, derive_key(self._seed, "sampler/mixed", block))
        seen: Counter[str] = Counter()
        found: list[tuple[str, int]] = []
        for i in order:
            found.append((names[i], seen[names[i]]))
            seen[names[i]] += 1
        return found


def _quotas(weights: Mapping[str, float], rows: Mapping[str, Sequence[int]]) -> dict[str, int]:
    """How many draws of a block each source gets: shares rounded so that they add up."""
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
        why = f"`{lost[0]}` would get less than one draw in {_BLOCK}"
        raise UserError(f"{KWARGS}.weights", weights[lost[0]], why, "raise it, or set it to 0")
    return {name: size for name, size in quotas.items() if size}
