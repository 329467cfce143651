"""A weighted sum of named components. Each stays visible in the tree, and none is replaced by 0."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import final

from luyen.base.records import Prompt, Rollout, Score
from luyen.rewards.protocol import Reward

ROOT = "reward"
"""Name at the top of every tree."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Weighted:
    """A component of a sum.

    Example:
        >>> sorted(Weighted.__slots__)
        ['name', 'reward', 'weight']
    """

    name: str
    """What it is called in the tree."""
    weight: float
    """Its factor in the sum."""
    reward: Reward
    """What judges it."""


@final
class WeightedSum:
    """Judges a group by every component and adds them up."""

    def __init__(self, parts: Sequence[Weighted]) -> None:
        assert parts, "a sum of nothing would score 0"
        self._parts = tuple(parts)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the components."""
        return tuple(part.name for part in self._parts)

    async def __call__(self, prompt: Prompt, rollouts: Sequence[Rollout]) -> list[Score]:
        """One tree per rollout, with a part for each component."""
        columns: list[list[Score]] = []
        for part in self._parts:
            scores = await part.reward(prompt, rollouts)
            columns.append([replace(s, name=part.name, weight=part.weight) for s in scores])
        return [total(parts) for parts in zip(*columns, strict=True)]


def total(parts: Sequence[Score], *, name: str = ROOT) -> Score:
    """The sum of weight times value; without a value as soon as one part has none.

    Example:
        >>> right = Score(name="right", value=1.0)
        >>> total([right, Score(name="brief", value=0.5, weight=0.2)]).value
        1.1
        >>> total([right, Score(name="judge", value=None, error="timed out")]).error
        'judge: timed out'
    """
    faults = [f"{part.name}: {part.error}" for part in parts if part.value is None]
    if faults:
        return Score(name=name, value=None, parts=tuple(parts), error="; ".join(faults))
    value = sum(part.weight * part.value for part in parts if part.value is not None)
    if not math.isfinite(value):
        return Score(name=name, value=None, parts=tuple(parts), error="the sum is not finite")
    return Score(name=name, value=float(value), parts=tuple(parts))


def with_part(score: Score, part: Score) -> Score:
    """A tree with one more component under its root."""
    own = score.parts or (replace(score, name="score", weight=1.0),)
    return total((*own, part), name=score.name)
