"""Pieces of work at the same time, of which the first error ends all."""

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

T = TypeVar("T")


async def side_by_side(work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """What came of each, in order; the first error stops the rest and is raised once they went.

    It is raised as it is and not in a group: callers know errors by their kind.
    """
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
