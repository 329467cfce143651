"""The sampler protocol: the order of rows is a pure function of the seed and of one integer.

`take(cursor, count)` returns the row indices at positions `cursor`, `cursor + 1`, ... Sampling
consumes nothing and keeps no state that cannot be recomputed, so a run resumed at a cursor gets the
rows it would have got without the interruption.
"""

from collections.abc import Callable
from typing import Protocol, TypeAlias, runtime_checkable

from luyen.base.registry import Registry

State: TypeAlias = tuple[int, ...]
KWARGS = "data.sampler.kwargs"


@runtime_checkable
class Sampler(Protocol):
    """Yields indices of rows in the dataset."""

    def take(self, cursor: int, count: int) -> list[int]:
        """The row indices at positions `cursor` to `cursor + count - 1`."""
        ...


@runtime_checkable
class AdaptiveSampler(Protocol):
    """A sampler that also looks at how well the policy does; its state is a few integers."""

    state: State
    """What it learned; restored before a resumed run takes its first rows."""

    def take(self, cursor: int, count: int) -> list[int]:
        """The row indices at positions `cursor` to `cursor + count - 1`, for the current state."""
        ...

    def record(self, cursor: int, success: float) -> None:
        """Record the success rate of the rows up to position `cursor`."""
        ...


samplers: Registry[Callable[..., Sampler]] = Registry("sampler", "data.sampler.name")
"""Name -> `(prompts, *, seed, **kwargs)`, which makes a sampler."""
