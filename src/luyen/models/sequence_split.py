"""How a pass over packed tokens is divided over ranks, as a model sees it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias, final

from torch import Tensor

from luyen.models.attention import AttentionContext

Read: TypeAlias = Callable[[Tensor, Tensor, AttentionContext], Tensor]
"""`(tokens, positions, context) -> last hidden states [tok, hidden]`."""


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OwnPlaces:
    """The places of a pass whose hidden states this rank computes.

    Example:
        >>> import torch
        >>> OwnPlaces(index=torch.tensor([2]), rows=torch.tensor([0]), weight=1.0).weight
        1.0
    """

    index: Tensor
    """Which of the places."""
    rows: Tensor
    """Their rows among this rank's hidden states."""
    weight: float
    """1; or 0, where the rank has no place and computes one that does not count."""


class SequenceSplit(Protocol):
    """Divides the tokens of a pass over ranks that all call it with the same pass."""

    def read(
        self, read: Read, tokens: Tensor, positions: Tensor, context: AttentionContext
    ) -> Tensor:
        """Last hidden states of this rank's tokens."""
        ...

    def own_places(self, places: Tensor, tokens: int) -> OwnPlaces:
        """Which places this rank's tokens have, of a pass over so many tokens."""
        ...

    def join(self, values: Tensor, own: OwnPlaces, count: int) -> Tensor:
        """Values at all `count` places, from those that each rank has at its own."""
        ...
