"""What a run begins with is not searched for garbage again and again."""

import gc
from collections.abc import Generator
from contextlib import contextmanager

_YOUNG = 20_000
"""New objects before the collector looks at them: records of a step are many, and no garbage."""


@contextmanager
def settled() -> Generator[None]:
    """Inside, Python's collector passes over everything that was there before.

    Half a million objects of imported packages take it a quarter of a second, and it looks through
    all of them every few steps.
    """
    usual = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG, *usual[1:])
    try:
        yield
    finally:
        gc.set_threshold(*usual)
        gc.unfreeze()
