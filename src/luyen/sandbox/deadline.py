"""How long the call that runs now may still take: known to it wherever it looks."""

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from time import monotonic

_deadline: ContextVar[float | None] = ContextVar("deadline", default=None)


@contextmanager
def within(seconds: float) -> Generator[None, None, None]:
    """State that what runs inside has so many seconds; whoever said so enforces it."""
    token = _deadline.set(monotonic() + seconds)
    try:
        yield
    finally:
        _deadline.reset(token)


def seconds_left() -> float | None:
    """Seconds until the call is ended from outside, never negative; None: nobody said.

    Example:
        >>> seconds_left() is None
        True
        >>> with within(60.0):
        ...     seconds_left() <= 60.0
        True
    """
    deadline = _deadline.get()
    return None if deadline is None else max(0.0, deadline - monotonic())
