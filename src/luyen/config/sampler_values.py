"""Whether the arguments of a sampler of ours suit the rows, as far as those are known."""

from collections.abc import Iterator, Mapping, Sequence
from typing import cast

from luyen.base.errors import UserError
from luyen.config.arithmetic_task import read_arithmetic
from luyen.config.schema.data import Data
from luyen.config.task_url import parse_task_url

_STAGES = 4
"""Of a curriculum that is not told how many."""
_NUMBERS = ("difficulty", "index")
"""What a question of `arithmetic://` says of itself in numbers."""


def sampler_faults(data: Data) -> Iterator[str]:
    """What is wrong with arguments that are of their kinds.

    Example:
        >>> from luyen.config.schema.data import Sampler
        >>> mixed = Sampler(name="mixed", kwargs={"weights": {"arithmetic/sum": 0}})
        >>> list(sampler_faults(Data(train_files=("arithmetic://sum",), sampler=mixed)))
        ['weights: all of them are 0']
    """
    sampler, addresses = data.sampler, data.train_files
    if sampler.name == "mixed":
        weights = cast(Mapping[str, float], sampler.kwargs.get("weights", {}))
        yield from _weight_faults(weights, _sources(addresses))
    if sampler.name == "curriculum":
        yield from _stage_faults(data)


def _weight_faults(weights: Mapping[str, float], sources: set[str] | None) -> Iterator[str]:
    for name, weight in weights.items():
        if weight < 0:
            yield f"weights: that of `{name}` is negative"
        if sources is not None and name not in sources:
            yield f"weights: no row has the data source `{name}`, but {', '.join(sorted(sources))}"
    if not any(weight > 0 for weight in weights.values()):
        yield "weights: all of them are 0" if weights else "weights: there are none"
    for name in sorted((sources or set()) - weights.keys()):
        yield f"weights: rows of `{name}` have none; 0 leaves them out"


def _stage_faults(data: Data) -> Iterator[str]:
    given, addresses = data.sampler.kwargs, data.train_files
    key, stages = given.get("key"), given.get("stages", _STAGES)
    if stages < 1:
        yield f"stages: {stages} is none; 1 or more are"
    is_ours = bool(addresses) and all(path.startswith("arithmetic://") for path in addresses)
    if is_ours and key is not None and key not in _NUMBERS:
        yield f"key: rows of {addresses[0]} have no number `{key}`, but {', '.join(_NUMBERS)}"
    rows = _rows(addresses) if is_ours else None
    if rows is not None and data.train_max_samples >= 0:
        rows = min(rows, data.train_max_samples)
    if rows is not None and stages > rows:
        yield f"stages: {rows} rows make from 1 to {rows} stages, and there are {stages}"


def _rows(addresses: Sequence[str]) -> int | None:
    try:
        return sum(read_arithmetic(parse_task_url(path)).asked.size for path in addresses)
    except UserError:
        return None  # D02 says why


def _sources(addresses: Sequence[str]) -> set[str] | None:
    """Data sources of the rows; None where only the rows show them."""
    if not all(path.startswith("arithmetic://") for path in addresses):
        return None
    return {path.partition("?")[0].replace("://", "/").rstrip("/") for path in addresses}
