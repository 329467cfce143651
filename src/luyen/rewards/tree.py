"""The reward tree: nodes are scored in the order that their gates demand, then combined."""

import asyncio
import math
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from math import inf
from typing import Any, TypeVar, final

from luyen.base.errors import UserError
from luyen.base.records import Prompt, Rollout, Score, reaches
from luyen.config.reward_components import opens_at, scoring_order
from luyen.config.schema.reward import ComponentConfig
from luyen.rewards.protocol import Group, Reward, StepReward
from luyen.rewards.running_stats import RunningMoments

# Gates: the values of its siblings decide whether a node counts.


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """A sibling, and the values of it with which a node counts.

    Example:
        >>> Condition(by="right").is_met(1.0), Condition(by="right").is_met(0.5)
        (True, False)
    """

    by: str
    """Name of the sibling."""
    at_least: float = 1.0
    """Least value of it."""
    below: float = inf
    """The value that it does not reach."""
    otherwise: float = 0.0
    """What the node is worth when the condition is not met."""

    def is_met(self, value: float) -> bool:
        """Whether the gate is open for this value of the sibling."""
        return reaches(value, self.at_least) and not reaches(value, self.below)


def conditions(
    name: str, components: Mapping[str, ComponentConfig], combine: str
) -> tuple[Condition, ...]:
    """When one of several siblings counts: by its gate, and after those that come first."""
    found: list[Condition] = []
    gate = components[name].gate
    if gate is not None:
        below = inf if gate.below is None else gate.below
        found.append(
            Condition(by=gate.by, at_least=opens_at(gate), below=below, otherwise=gate.otherwise)
        )
    if combine == "lexicographic":
        names = list(components)
        earlier = names[: names.index(name)]
        found += [Condition(by=one, at_least=components[one].bar) for one in earlier]
    return tuple(found)


# Turn attribution: the assistant turns that the value of a score belongs to.


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

    The unshaped value stays visible as `raw`. The rest of the value belongs to the whole rollout.

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


# Nodes of the reward tree: the source of a value, and how it is scaled, clipped and gated.


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One node, with what it needs to be scored.

    Example:
        >>> Node(path="style/brief", component=ComponentConfig(rule="length")).name
        'brief'
    """

    path: str
    """Its name, after the names of the nodes above it."""
    component: ComponentConfig
    """What the configuration says about it."""
    source: Reward | None = None
    """The reward that scores it; None for a node of parts."""
    waves: "tuple[tuple[Node, ...], ...]" = ()
    """The nodes below it; each wave can be scored concurrently."""
    order: tuple[str, ...] = ()
    """Names of the nodes below, as written."""
    wanted: tuple[Condition, ...] = ()
    """When it counts."""

    @property
    def name(self) -> str:
        """What it is called in the tree."""
        return self.path.rpartition("/")[2]

    def gated_score(self, siblings: Mapping[str, Score]) -> Score | None:
        """The score of a node whose gate these siblings close; None if it has to be scored.

        Behind a closed gate it is worth what the gate says. Where a sibling that decides has no
        value it has none either, since the gate is undecided. Siblings are compared as
        scored, scaled and clipped but not normalised.
        """
        made = Score(name=self.name, value=0.0, weight=self.component.weight, gated=True)
        lost = next((c.by for c in self.wanted if siblings[c.by].value is None), None)
        if lost is not None:
            return replace(made, value=None, error=f"not judged, because `{lost}` has no value")
        closed = [c for c in self.wanted if not c.is_met(siblings[c.by].value or 0.0)]
        return replace(made, value=closed[0].otherwise) if closed else None

    def shaped(self, score: Score) -> Score:
        """A source's score as the node's score: scaled, shifted and clipped; a fault stays one.

        A clip takes from every turn alike.
        """
        own = replace(
            score,
            name=self.name,
            weight=self.component.weight,
            raw=None,
            gated=False,
            turned=self.component.scale < 0,
        )
        if own.value is None:
            return replace(own, error=own.error or "it has no value and does not say why")
        value = shape(self.component, own.value)
        if not math.isfinite(value):
            return replace(own, value=None, error=f"{own.value} was judged: not a finite value")
        if abs(value) > LARGEST_SCORE:
            return replace(own, value=None, error=too_large(value))
        if value == own.value:
            return own
        unclipped = self.component.scale * own.value + self.component.shift
        kept = value / unclipped if unclipped else 0.0
        return rescaled(own, value, factor=self.component.scale * (kept if 0 <= kept <= 1 else 0))


def shape(component: ComponentConfig, value: float) -> float:
    """A raw value after scale, shift, floor and ceiling; NaN stays NaN.

    Example:
        >>> shape(ComponentConfig(rule="length", scale=2.0, floor=-1.0), -0.75)
        -1.0
    """
    value = component.scale * value + component.shift
    if component.floor is not None and value < component.floor:
        value = component.floor
    if component.ceiling is not None and value > component.ceiling:
        value = component.ceiling
    return value


def node_of(
    path: str,
    component: ComponentConfig,
    leaf: Callable[[str, ComponentConfig], Reward],
    wanted: tuple[Condition, ...] = (),
) -> Node:
    """The node that a component describes, with those below it; `leaf` makes their sources."""
    if component.parts is None:
        return Node(path=path, component=component, source=leaf(path, component), wanted=wanted)
    waves, order = below(path, component.parts, component.combine, leaf)
    return Node(path=path, component=component, waves=waves, order=order, wanted=wanted)


def below(
    path: str,
    components: Mapping[str, ComponentConfig],
    combine: str,
    leaf: Callable[[str, ComponentConfig], Reward],
) -> tuple[tuple[tuple[Node, ...], ...], tuple[str, ...]]:
    """Siblings as nodes, in waves, and their names as written."""
    above = f"{path}/" if path else ""
    made = {
        name: node_of(f"{above}{name}", component, leaf, conditions(name, components, combine))
        for name, component in components.items()
    }
    waves = tuple(tuple(made[n] for n in wave) for wave in scoring_order(components, combine))
    lost = [name for name in components if not any(part.name == name for w in waves for part in w)]
    if lost:
        why = f"the gates of {', '.join(lost)} look at no sibling, or wait for one another"
        fix = "let a gate look at a sibling that is judged without it"
        raise UserError("reward.components", path or lost[0], why, fix)
    return waves, tuple(components)


# Combining the parts of a tree into one score. Every part is kept; a missing one is never 0.

ROOT = "reward"
"""Name at the top of every tree."""
LARGEST_SCORE = 1e18
"""Its square is still a number of fp32, in which advantages are computed."""
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


def too_large(value: float) -> str:
    """The error of a score that is beyond what training computes with.

    Example:
        >>> too_large(1e300)
        'a score of 1e+300 lies beyond 1e+18, the largest that training computes with'
    """
    largest = f"{LARGEST_SCORE:g}, the largest that training computes with"
    return f"a score of {value:g} lies beyond {largest}"


def largest_in(score: Score) -> float:
    """The value of a tree that is farthest from 0, with its sign.

    Example:
        >>> largest_in(Score(name="a", value=1.0, parts=(Score(name="b", value=-3.0),)))
        -3.0
    """
    return max([score.value or 0.0, *map(largest_in, score.parts)], key=abs)


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


_T = TypeVar("_T")
_is_plain: ContextVar[bool] = ContextVar("is_plain", default=False)


@contextmanager
def plainly(is_plain: bool = True) -> Iterator[None]:
    """Score without any normalisation inside, so that values of different steps can be compared."""
    token = _is_plain.set(is_plain)
    try:
        yield
    finally:
        _is_plain.reset(token)


@final
class RewardTree:
    """Scores by every node, and keeps all of them in the score."""

    def __init__(self, root: Node, *, moments: RunningMoments, num_workers: int) -> None:
        """`num_workers` bounds how many groups one source scores at once in a whole step."""
        assert root.order, "a tree of nothing would score 0"
        self._root = root
        self._moments = moments
        self._num_workers = num_workers

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the components."""
        return self._root.order

    async def __call__(self, prompt: Prompt, rollouts: Sequence[Rollout]) -> list[Score]:
        """One tree per rollout, with a part for each component."""
        return (await self.score_groups([(prompt, rollouts)]))[0]

    async def score_groups(self, groups: Sequence[Group]) -> list[list[Score]]:
        """One tree per rollout of every group, in order."""
        return await self._parts(self._root, groups, ROOT)

    async def _node(self, node: Node, groups: Sequence[Group]) -> list[list[Score]]:
        if node.source is None:
            rows = await self._parts(node, groups, node.name)
        else:
            rows = await self._sourced(node.source, groups)
        return [[node.shaped(score) for score in row] for row in rows]

    async def _sourced(self, source: Reward, groups: Sequence[Group]) -> list[list[Score]]:
        """The scores of one source, which is not called without groups."""
        if not groups:
            return []
        if isinstance(source, StepReward):
            return await source.score_step(groups)
        room = asyncio.Semaphore(self._num_workers)

        async def one(prompt: Prompt, rollouts: Sequence[Rollout]) -> list[Score]:
            async with room:
                return await source(prompt, rollouts)

        return await together([one(prompt, rollouts) for prompt, rollouts in groups])

    async def _parts(self, node: Node, groups: Sequence[Group], name: str) -> list[list[Score]]:
        """The nodes below one, wave after wave, combined for every group."""
        known: list[list[dict[str, Score]]] = [[{} for _ in rollouts] for _, rollouts in groups]
        for wave in node.waves:
            columns = await together([self._gated(part, groups, known) for part in wave])
            for part, rows in zip(wave, columns, strict=True):
                for siblings, row in zip(known, rows, strict=True):
                    for one, score in zip(siblings, row, strict=True):
                        one[part.name] = score
        paths = {part.name: part for wave in node.waves for part in wave}
        ordered = [paths[part] for part in node.order]
        return [self._combined(node, ordered, siblings, name) for siblings in known]

    async def _gated(
        self, part: Node, groups: Sequence[Group], known: Sequence[Sequence[Mapping[str, Score]]]
    ) -> list[list[Score]]:
        """The scores of a node; its source sees only rollouts for which the node counts."""
        shut = [[part.gated_score(siblings) for siblings in row] for row in known]
        open_groups = [
            (prompt, [r for r, score in zip(rollouts, row, strict=True) if score is None])
            for (prompt, rollouts), row in zip(groups, shut, strict=True)
        ]
        judged = iter(await self._node(part, [group for group in open_groups if group[1]]))
        rows: list[list[Score]] = []
        for row in shut:
            found = iter(next(judged)) if None in row else iter(())
            rows.append([next(found) if score is None else score for score in row])
        return rows

    def _combined(
        self, node: Node, parts: Sequence[Node], rows: Sequence[Mapping[str, Score]], name: str
    ) -> list[Score]:
        """The scores of one group, made from those of the nodes below."""
        combine = node.component.combine
        columns = [[self._over_time(part, row[part.name]) for row in rows] for part in parts]
        if combine == "gdpo" and _is_plain.get():
            combine = "sum"
        if combine == "gdpo":
            whole = [all(score.value is not None for score in row.values()) for row in rows]
            columns = [normalised(column, whole) for column in columns]
        return [combined(some, how=combine, name=name) for some in zip(*columns, strict=True)]

    def _over_time(self, part: Node, score: Score) -> Score:
        """A score in standard deviations of the steps before; what was not scored stays."""
        is_running = part.component.normalise == "running" and not _is_plain.get()
        if not is_running or score.gated or score.value is None:
            return score
        seen = self._moments[part.path]
        if not seen.count:
            return score
        return rescaled(score, seen.normalise(score.value), factor=seen.factor)


async def together(waiting: Sequence[Coroutine[Any, Any, _T]]) -> list[_T]:
    """What all of them return, in order; the first error stops the rest."""
    tasks = [asyncio.ensure_future(one) for one in waiting]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
