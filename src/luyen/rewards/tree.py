"""The reward tree at work: nodes are judged in the order their gates demand, then combined."""

import asyncio
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar, final

from luyen.base.records import Prompt, Rollout, Score
from luyen.rewards.compose import ROOT, combined, normalised
from luyen.rewards.node import Node
from luyen.rewards.protocol import Group, Reward, StepReward
from luyen.rewards.running import RunningMoments
from luyen.rewards.shares import rescaled

_T = TypeVar("_T")
_is_plain: ContextVar[bool] = ContextVar("is_plain", default=False)


@contextmanager
def plainly(is_plain: bool = True) -> Iterator[None]:
    """Judge without any normalisation inside, so that values of different steps can be compared."""
    token = _is_plain.set(is_plain)
    try:
        yield
    finally:
        _is_plain.reset(token)


@final
class Tree:
    """Judges by every node, and keeps all of them in the score."""

    def __init__(self, root: Node, *, moments: RunningMoments, num_workers: int) -> None:
        """`num_workers` bounds how many groups one source judges at once in a whole step."""
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
        return (await self.judge([(prompt, rollouts)]))[0]

    async def judge(self, groups: Sequence[Group]) -> list[list[Score]]:
        """One tree per rollout of every group, in order."""
        return await self._parts(self._root, groups, ROOT)

    async def _node(self, node: Node, groups: Sequence[Group]) -> list[list[Score]]:
        if node.source is None:
            rows = await self._parts(node, groups, node.name)
        else:
            rows = await self._sourced(node.source, groups)
        return [[node.shaped(score) for score in row] for row in rows]

    async def _sourced(self, source: Reward, groups: Sequence[Group]) -> list[list[Score]]:
        """The scores of one source; it is not asked about nothing."""
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
        shut = [[part.unjudged(siblings) for siblings in row] for row in known]
        asked = [
            (prompt, [r for r, score in zip(rollouts, row, strict=True) if score is None])
            for (prompt, rollouts), row in zip(groups, shut, strict=True)
        ]
        judged = iter(await self._node(part, [group for group in asked if group[1]]))
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
        """A score in standard deviations of the steps before; what was not judged stays."""
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
