"""A sampler class of a user's own, as `data.sampler.class_path` names one."""

from collections.abc import Sequence
from typing import Any


class RowsInTurn:
    """One row after the other, and from the first again."""

    def __init__(self, prompts: Sequence[Any], *, seed: int) -> None:
        """`seed` decides where it begins."""
        self._count, self._first = len(prompts), seed

    def take(self, cursor: int, count: int) -> list[int]:
        """Rows of the draws from `cursor` on."""
        return [(self._first + i) % self._count for i in range(cursor, cursor + count)]
