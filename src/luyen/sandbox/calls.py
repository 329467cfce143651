"""A call as data, its reply, and how long the running call may still take."""

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, final

RESULT_BYTES = 10 * 2**20
"""Most bytes of a pickled result, unless a pool says otherwise."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """Which function to call in another process, and with what.

    Example:
        >>> Call(where="math", name="hypot", args=(3.0, 4.0)).prepare is None
        True
    """

    where: str
    """A module, or the path of a Python file that ends in `.py`."""
    name: str
    """A function of it; dots lead into classes. A coroutine function is awaited."""
    args: tuple[Any, ...] = ()
    """Positional arguments; they must pickle."""
    kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Keyword arguments; they must pickle."""
    prepare: str | None = None
    """A function of the same place, called first with the same arguments, off the clock."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What came of a call: a value, or the reason why there is none.

    Example:
        >>> Reply(value=5.0).error is None
        True
    """

    value: Any = None
    """What the function returned; None also when there is an error."""
    error: str | None = None
    """The exception in one line, the timeout, the death of the process; None: it returned."""
    timed_out: bool = False
    """Whether the error is that the time was up."""
    exit_code: int | None = None
    """How the process ended, where the error is that it did."""
    seconds: float = 0.0
    """How long it took, loading not counted; after a fault, from the asking."""


# Deadline of the current call, kept in a context variable.

_deadline: ContextVar[float | None] = ContextVar("deadline", default=None)


@contextmanager
def within(seconds: float) -> Generator[None, None, None]:
    """Set the deadline that `seconds_left` reports in the body. The caller enforces it."""
    token = _deadline.set(monotonic() + seconds)
    try:
        yield
    finally:
        _deadline.reset(token)


def seconds_left() -> float | None:
    """Seconds until the call is ended from outside, never negative; None without a deadline.

    Example:
        >>> seconds_left() is None
        True
        >>> with within(60.0):
        ...     seconds_left() <= 60.0
        True
    """
    deadline = _deadline.get()
    return None if deadline is None else max(0.0, deadline - monotonic())
