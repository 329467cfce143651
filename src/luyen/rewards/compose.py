"""How the parts of a tree become one score. Each stays visible, and none is replaced by 0."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from luyen.base.records import Score
from luyen.rewards.shares import gathered, rescaled

ROOT = "reward"
"""Name at the top of every tree."""
STD_EPSILON = 1e-6
"""Added to the spread of a group before dividing by it, as the estimator `gdpo` does."""


def total(parts: Sequence[Score], *, name: str = ROOT) -> Score:
    """The sum of weight times value; without a value as soon as one part has none.

    It is rounded once, so the order of the parts changes no bit.

    Example:
        >>> right = Score(name="right", value=1.0)
        >>> total([right, Score(name="brief", value=0.5, weight=0.2)]).value
        1.1
        >>> total([right, Score(name="judge", value=None, error="timed out")]).error
        'judge: timed out'
    """
    return _made(parts, name, "sum", _exact_sum)


def combined(parts: Sequence[Score], *, how: str, name: str = ROOT) -> Score:
    """The score that parts make by the sum, the product or the least of weight times value.

    A product or a least value leaves out parts of weight 0, which are only shown, and belongs to no
    turn. `gdpo` and `lexicographic` are sums; what is special about them happened to the parts.

    Example:
        >>> parts = [Score(name="right", value=1.0), Score(name="safe", value=0.5, weight=0.5)]
        >>> [combined(parts, how=how).value for how in ("sum", "product", "min")]
        [1.25, 0.25, 0.25]
    """
    if how not in ("product", "min"):
        return replace(total(parts, name=name), combine=how)
    return _made(parts, name, how, math.prod if how == "product" else min)


def _exact_sum(values: Sequence[float]) -> float:
    try:
        return math.fsum(values)
    except (OverflowError, ValueError):  # beyond any float, or infinities that cancel
        return math.nan


def _made(
    parts: Sequence[Score], name: str, how: str, rule: Callable[[list[float]], float]
) -> Score:
    faults = [f"{part.name}: {part.error}" for part in parts if part.value is None]
    if faults:
        error = "; ".join(faults)
        return Score(name=name, value=None, parts=tuple(parts), error=error, combine=how)
    is_sum = how == "sum"
    counted = [p for p in parts if p.value is not None and (is_sum or p.weight != 0)]
    value = float(rule([p.weight * p.value for p in counted if p.value is not None] or [0.0]))
    if not math.isfinite(value):
        error = f"the {how} is not finite"
        return Score(name=name, value=None, parts=tuple(parts), error=error, combine=how)
    made = Score(name=name, value=value, parts=tuple(parts), combine=how)
    return made if is_sum else replace(made, by_turn=gathered(made, factor=0.0))


def normalised(scores: Sequence[Score], counts: Sequence[bool]) -> list[Score]:
    """One part of a group's rollouts: (value - mean) / (std + ε), over those that count.

    The spread has n - 1 below; a rollout alone, or among equals, gets exactly 0. Scores that do not
    count stay as they are.

    Example:
        >>> some = [Score(name="right", value=v) for v in (0.0, 1.0, 0.0, 1.0)]
        >>> [round(score.value, 4) for score in normalised(some, [True] * 4)]
        [-0.866, 0.866, -0.866, 0.866]
    """
    values = [s.value for s, c in zip(scores, counts, strict=True) if c and s.value is not None]
    if not values:
        return list(scores)
    # Taking the largest off first makes equal values exactly 0, as in algorithms.advantages.
    top = max(values)
    mean = math.fsum(value - top for value in values) / len(values)
    squares = math.fsum((value - top - mean) ** 2 for value in values)
    factor = 1.0 / (math.sqrt(squares / max(len(values) - 1, 1)) + STD_EPSILON)
    return [
        rescaled(score, (score.value - top - mean) * factor, factor=factor)
        if does and score.value is not None
        else score
        for score, does in zip(scores, counts, strict=True)
    ]


def adds_up(score: Score) -> bool:
    """Whether a score says that it is the sum of its parts, so that one more can join them.

    Never by its numbers: a product may equal the sum by chance, and the trees of a group would
    then have different shapes.
    """
    return bool(score.parts) and score.combine not in ("product", "min")


def with_part(score: Score, part: Score) -> Score:
    """A tree with one more component under its root; a root that is no sum moves down."""
    if adds_up(score):
        return replace(total((*score.parts, part), name=score.name), combine=score.combine)
    own = replace(score, name="score", weight=1.0)
    return total((own, part), name=score.name)
