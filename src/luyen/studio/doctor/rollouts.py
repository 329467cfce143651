"""Looks at recorded rollouts that several rules share."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

from luyen.base.bars import reaches
from luyen.base.records import Source
from luyen.studio.doctor.read import RECENT, RunRecord
from luyen.telemetry.rollout_files import RecordedRollout


def name_of(recorded: RecordedRollout) -> str:
    """How a finding names a rollout: group and sample."""
    return f"{recorded.rollout.group}/{recorded.rollout.sample}"


def used_tokens(recorded: RecordedRollout) -> Iterator[tuple[Source, float | None]]:
    """Origin and advantage of every token of every branch; nothing where the step left it out."""
    if recorded.advantages is None:
        return
    rows = (*recorded.earlier, recorded.advantages)
    for branch, row in zip(recorded.rollout.branches, rows, strict=True):
        yield from zip(branch.sources, row, strict=True)


def prompt_of(recorded: RecordedRollout) -> tuple[int, ...]:
    """Tokens before the first one that was sampled in the oldest branch."""
    first = recorded.rollout.branches[0]
    sampled = (i for i, source in enumerate(first.sources) if source == Source.SAMPLED)
    return first.tokens[: next(sampled, len(first.tokens))]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Solved:
    """How many groups of the latest steps are solved, by the reward before any KL term.

    Example:
        >>> Solved(groups=4, all=1, none=3).none_share
        0.75
    """

    groups: int
    """Groups that were judged."""
    all: int
    """Those whose samples all reach reward 1."""
    none: int
    """Those without a sample that does."""

    @property
    def all_share(self) -> float:
        """Share of groups that are solved; 0 without groups."""
        return self.all / self.groups if self.groups else 0.0

    @property
    def none_share(self) -> float:
        """Share of groups without a solution; 0 without groups."""
        return self.none / self.groups if self.groups else 0.0


def solved_groups(record: RunRecord) -> Solved:
    """The groups of the latest steps by how much of them reaches reward 1."""
    groups: dict[str, list[bool]] = {}
    for step in list(record.rollouts)[-RECENT:]:
        for recorded in record.rollouts[step]:
            score = recorded.rollout.score
            if score is not None and score.value is not None:
                groups.setdefault(str(recorded.rollout.group), []).append(reaches(score.value, 1.0))
    return Solved(
        groups=len(groups),
        all=sum(all(found) for found in groups.values()),
        none=sum(not any(found) for found in groups.values()),
    )
