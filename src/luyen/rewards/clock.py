"""How long each rollout took to judge, gathered from wherever the judging happens."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from luyen.base.records import Rollout

Key = tuple[int, int, str, int]
_spent: ContextVar[dict[Key, float] | None] = ContextVar("spent", default=None)


@contextmanager
def measuring() -> Iterator[dict[Key, float]]:
    """Seconds by the key of a rollout, for all judging started inside."""
    seconds: dict[Key, float] = {}
    token = _spent.set(seconds)
    try:
        yield seconds
    finally:
        _spent.reset(token)


def add_time(rollout: Rollout, seconds: float) -> None:
    """Count seconds towards a rollout, if anybody measures."""
    spent = _spent.get()
    if spent is not None:
        spent[rollout.key] = spent.get(rollout.key, 0.0) + seconds
