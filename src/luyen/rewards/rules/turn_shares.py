"""A score made of amounts that turns of a conversation earned or cost."""

from collections.abc import Iterable
from math import fsum

from luyen.base.records import Score


def by_turns(name: str, amounts: Iterable[tuple[int, float]], *, over: float = 1.0) -> Score:
    """The sum of all amounts, and the share of each turn in it, both divided by `over`.

    Example:
        >>> by_turns("hits", [(0, 1.0), (2, 1.0), (2, 1.0)], over=4.0).by_turn
        ((0, 0.25), (2, 0.5))
    """
    turns: dict[int, list[float]] = {}
    for turn, amount in amounts:
        turns.setdefault(turn, []).append(amount)
    shares = tuple((turn, fsum(turns[turn]) / over) for turn in sorted(turns))
    value = fsum(amount for some in turns.values() for amount in some) / over
    return Score(name=name, value=value, by_turn=shares)


def joined(name: str, parts: tuple[Score, ...]) -> Score:
    """The sum of scores that stay visible below it; their turns are theirs."""
    return Score(name=name, value=fsum(part.value or 0.0 for part in parts), parts=parts)
