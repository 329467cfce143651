"""Samplers with a defect each."""

from collections.abc import Sequence
from typing import Any


class TheSameRows:
    """Never gets past the first rows."""

    def __init__(self, prompts: Sequence[Any], *, seed: int) -> None:
        self.rows = len(prompts)

    def take(self, cursor: int, count: int) -> list[int]:
        return [i % self.rows for i in range(count)]


class EveryRowTwice:
    """Walks through the rows and draws each twice."""

    def __init__(self, prompts: Sequence[Any], *, seed: int) -> None:
        self.rows = len(prompts)

    def take(self, cursor: int, count: int) -> list[int]:
        return [i // 2 % self.rows for i in range(cursor, cursor + count)]
