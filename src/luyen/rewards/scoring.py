"""All groups of a step, scored concurrently and returned in order."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import final

from luyen.base.errors import UserError
from luyen.base.records import Prompt, Rollout, Score
from luyen.rewards.calls import measuring
from luyen.rewards.llm_judge.faults import is_outside
from luyen.rewards.protocol import Group, Reward, StepReward
from luyen.rewards.tree import LARGEST_SCORE, largest_in, too_large
from luyen.telemetry.journal import WorkJournal
from luyen.telemetry.progress import PROGRESS

VALIDATION = "validation"
"""The purpose of rollouts that are scored but not trained on."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredGroup:
    """A group with its scores.

    Example:
        >>> ScoredGroup(prompt=None, rollouts=(), seconds=()).scores
        ()
    """

    prompt: Prompt
    """The prompt of the group."""
    rollouts: tuple[Rollout, ...]
    """The rollouts in the order they came, each with its score, and a fault where it has none."""
    seconds: tuple[float | None, ...]
    """How long scoring each took; None where the reward does not say."""

    @property
    def scores(self) -> tuple[Score, ...]:
        """The score of each rollout."""
        return tuple(r.score for r in self.rollouts if r.score is not None)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreJournal:
    """Where scores are looked up and written down, in a run that keeps a journal.

    Example:
        >>> ScoreJournal().known(()) is None
        True
    """

    journal: WorkJournal | None = None
    """The journal; without one, every group is scored."""
    purpose: str = "rollout"
    """What the rollouts were generated for."""

    def known(self, rollouts: Sequence[Rollout]) -> list[Score] | None:
        """The scores of a group that was scored before."""
        return None if self.journal is None else self.journal.scores(self.purpose, rollouts)

    def keep(self, rollouts: Sequence[Rollout], scores: Sequence[Score]) -> None:
        """Write the scores of a group down."""
        PROGRESS.add("score", 0)
        if self.journal is not None:
            self.journal.keep_scores(self.purpose, rollouts, scores)


async def score_all(
    reward: Reward,
    groups: Sequence[Group],
    *,
    num_workers: int = 8,
    work: ScoreJournal | None = None,
) -> list[ScoredGroup]:
    """Every group with its scores, in order; at most `num_workers` groups are scored at once.

    A reward that wants the whole step at once decides about that itself. Groups whose scores the
    journal has are not scored again.
    """
    with measuring() as seconds:
        if isinstance(reward, StepReward):
            rows = await _whole_step(reward, groups, work or ScoreJournal())
        else:
            rows = await _concurrently(reward, groups, num_workers, work or ScoreJournal())
    scored: list[ScoredGroup] = []
    for (prompt, rollouts), scores in zip(groups, rows, strict=True):
        judged = tuple(_with_score(r, score) for r, score in zip(rollouts, scores, strict=True))
        times = tuple(seconds.get(rollout.key) for rollout in rollouts)
        scored.append(ScoredGroup(prompt=prompt, rollouts=judged, seconds=times))
    return scored


async def _whole_step(
    reward: StepReward, groups: Sequence[Group], work: ScoreJournal
) -> list[list[Score]]:
    known = [work.known(rollouts) for _, rollouts in groups]
    found = [scores for scores in known if scores is not None]
    if len(found) == len(groups):
        return found
    rows = await reward.score_step(groups)
    for (_, rollouts), scores in zip(groups, rows, strict=True):
        work.keep(rollouts, scores)
    return rows


async def _concurrently(
    reward: Reward, groups: Sequence[Group], num_workers: int, work: ScoreJournal
) -> list[list[Score]]:
    """The scores of each group, in order; the first error stops the rest."""
    room = asyncio.Semaphore(num_workers)

    async def one(prompt: Prompt, rollouts: Sequence[Rollout]) -> list[Score]:
        known = work.known(rollouts)
        if known is not None:
            PROGRESS.add("score", 0)
            return known
        async with room:
            scores = await reward(prompt, rollouts)
        work.keep(rollouts, scores)
        return scores

    tasks = [asyncio.ensure_future(one(prompt, rollouts)) for prompt, rollouts in groups]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


def _with_score(rollout: Rollout, score: Score) -> Rollout:
    if abs(largest := largest_in(score)) > LARGEST_SCORE:
        score = replace(score, value=None, parts=(), by_turn=(), error=too_large(largest))
    if score.value is not None:
        return replace(rollout, score=score)
    return replace(rollout, score=score, fault=rollout.fault or f"reward: {score.error}")


def faults_in(scored: Sequence[ScoredGroup]) -> list[Rollout]:
    """The rollouts whose score could not be computed."""
    return [
        rollout
        for group in scored
        for rollout in group.rollouts
        if rollout.score is not None and rollout.score.value is None
    ]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """How many scores of a step may fail before the run stops.

    Example:
        >>> Tolerance(on_fault="tolerate", share=0.01).most(128, is_outside=False)
        2
    """

    on_fault: str = "tolerate"
    """`reward.on_fault`."""
    share: float = 0.01
    """Largest share that may fail in the code of the reward."""
    outside_share: float = 0.1
    """Largest share that may fail for reasons outside of it."""

    def most(self, judged: int, *, is_outside: bool) -> int:
        """How many of so many scores may fail for such a reason."""
        if self.on_fault == "tolerate":
            return ceil(judged * (self.outside_share if is_outside else self.share))
        return 0 if self.on_fault == "fail" else judged


def apply_fault_policy(scored: Sequence[ScoredGroup], tolerance: Tolerance) -> list[Rollout]:
    """The rollouts that could not be scored; a UserError when they are more than is tolerated.

    It also stops when no rollout at all has a score: there would be nothing left to learn from.
    """
    faulty = faults_in(scored)
    judged = sum(len(group.rollouts) for group in scored)
    outside = [r for r in faulty if r.score is not None and is_outside(r.score.error or "")]
    inside = [r for r in faulty if r not in outside]
    for some, kind in ((inside, False), (outside, True)):
        most = tolerance.most(judged, is_outside=kind)
        if some and (len(some) > most or len(faulty) == judged):
            first, key = some[0], "max_outside_share" if kind else "max_fault_share"
            why = f"{len(some)} of {judged} scores could not be computed"
            why += f", {most} would be left out" if most and len(faulty) < judged else ""
            where = f" (data source `{_source(scored, first)}`, group {first.group})"
            fix = f"fix the reward, raise reward.{key}, or set reward.on_fault=drop to leave such "
            why += f"; the first: {first.fault}{where}"
            raise UserError("reward.on_fault", tolerance.on_fault, why, f"{fix}rollouts out")
    return faulty


def _source(scored: Sequence[ScoredGroup], rollout: Rollout) -> str:
    return next(group.prompt.data_source for group in scored if rollout in group.rollouts)
