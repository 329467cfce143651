"""Which assistant turns the value of a score belongs to."""

from collections.abc import Iterator
from dataclasses import replace

from luyen.base.records import Score


def turn_shares(score: Score, factor: float = 1.0) -> Iterator[tuple[int, float]]:
    """Turn and share of the root's value, for everything in the tree that belongs to a turn.

    A share counts as often as the weights between it and the root say. A score that has shares
    itself speaks for the parts below it.

    Example:
        >>> calls = Score(name="calls", value=-2.0, weight=0.5, by_turn=((0, -1.0), (1, -1.0)))
        >>> list(turn_shares(Score(name="reward", value=0.0, parts=(calls,))))
        [(0, -0.5), (1, -0.5)]
    """
    if score.by_turn:
        yield from ((turn, factor * share) for turn, share in score.by_turn)
        return
    for part in score.parts:
        yield from turn_shares(part, factor * part.weight)


def rescaled(score: Score, value: float, *, factor: float) -> Score:
    """A score with another value; what turns have of it is `factor` times what they had.

    What was judged stays visible as `raw`. The rest of the value belongs to the whole rollout.

    Example:
        >>> calls = Score(name="calls", value=-2.0, by_turn=((0, -1.0), (1, -1.0)))
        >>> rescaled(calls, -1.0, factor=0.5).by_turn
        ((0, -0.5), (1, -0.5))
    """
    raw = score.value if score.raw is None else score.raw
    return replace(score, value=value, raw=raw, by_turn=gathered(score, factor=factor))


def gathered(score: Score, *, factor: float) -> tuple[tuple[int, float], ...]:
    """Times a factor, what each turn has of a score or of the parts below it."""
    turns: dict[int, float] = {}
    for turn, share in turn_shares(score):
        turns[turn] = turns.get(turn, 0.0) + factor * share
    return tuple(sorted(turns.items()))
