"""A wait that is explained: what takes long says so, and what is quick says nothing."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Timer

PATIENCE_S = 2.0
"""Seconds after which a person wonders whether anything happens."""


@contextmanager
def explained(
    say: Callable[[str], None], words: str, *, after_s: float = PATIENCE_S
) -> Iterator[None]:
    """Say the words once, from another thread, if the block is not over by then.

    Nothing is said after the block.

    Example:
        >>> with explained(print, "reading rows", after_s=60.0):
        ...     sum(range(10))
        45
    """
    timer = Timer(after_s, say, (words,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
