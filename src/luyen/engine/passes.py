"""Which sequences travel together in one pass."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from luyen.engine.micro import by_count, by_tokens


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Passes:
    """Passes limited by tokens, or by a number of sequences.

    Example:
        >>> Passes(max_tokens=10).of([6, 5, 4])
        [[0, 2], [1]]
    """

    max_tokens: int | None = None
    """Hard budget of a pass; None: `sequences` decides."""
    sequences: int = 1
    """Sequences of a pass when tokens do not decide."""

    def of(self, lengths: Sequence[int], groups: Sequence[int] | None = None) -> list[list[int]]:
        """Indices of the sequences of each pass; those of one group together where they fit."""
        if self.max_tokens is not None:
            return by_tokens(lengths, budget=self.max_tokens, groups=groups)
        return by_count(lengths, size=self.sequences)
