"""Where two runs parted, read from their directories: step, stage, rollout, token and cause."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, final

from luyen.base.digests import STAGES, StepDigest, read_digests
from luyen.base.errors import UserError
from luyen.base.rundir import RunDirectory
from luyen.studio.inputs import ChangedInput, changed_inputs, follows_the_clock, suspects
from luyen.studio.missing import missing_parts
from luyen.studio.rollout_diff import Found, first_difference
from luyen.telemetry.metrics_file import read_metrics
from luyen.telemetry.rollout_files import read_rollouts

_IN_FILES = ("prompts", "rollouts", "rewards", "advantages")
"""Stages that the file of rollouts shows in detail."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Parting:
    """The first step in which two runs differ.

    Example:
        >>> Parting(step=3, stages=("weights", "metrics")).stage
        'weights'
    """

    step: int
    """The step."""
    stages: tuple[str, ...]
    """Stages that differ in it, in the order in which they happen."""

    @property
    def stage(self) -> str:
        """The first of them: the others follow from it."""
        return self.stages[0]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RunDifference:
    """What two runs do not have in common.

    Example:
        >>> same = RunDifference(a="a", b="b", common=(1, 2), only_a=(), only_b=(), inputs=(),
        ...     parting=None, suspects=(), found=None, metrics={}, notes=())
        >>> same.is_equal
        True
    """

    a: str
    """Folder of the first run."""
    b: str
    """Folder of the second run."""
    common: tuple[int, ...]
    """Steps that both have digests of."""
    only_a: tuple[int, ...]
    """Steps that only the first has."""
    only_b: tuple[int, ...]
    """Steps that only the second has."""
    inputs: tuple[ChangedInput, ...]
    """Recorded inputs that differ."""
    parting: Parting | None
    """Where they part; None: every common step is equal."""
    suspects: tuple[ChangedInput, ...]
    """Inputs that can explain it, the likeliest first; empty: nothing that is recorded does."""
    found: Found | None
    """The first rollout that differs, where the files show one."""
    metrics: Mapping[str, tuple[float | None, float | None]]
    """Metrics of that step that differ; None for one that is not there."""
    notes: tuple[str, ...]
    """What could not be looked at, and what else a reader should know."""

    @property
    def is_equal(self) -> bool:
        """Whether both did the same in the same steps."""
        return self.parting is None and not self.only_a and not self.only_b

    def as_json(self) -> dict[str, Any]:
        """Plain data; what is derived from the records is there as well."""
        stage = self.parting.stage if self.parting is not None else None
        return {"equal": self.is_equal, "stage": stage, **asdict(self)}


def compare_runs(a: Path | str, b: Path | str) -> RunDifference:
    """The difference between two runs; a UserError when their files do not allow a comparison."""
    one, other = RunDirectory.open(a), RunDirectory.open(b)
    lines = [{d.step: d for d in read_digests(run.digests)} for run in (one, other)]
    common = tuple(sorted(lines[0].keys() & lines[1].keys()))
    if not common:
        why = f"{one.digests} and {other.digests} have no step in common"
        raise UserError("runs", str(other.root), why, "let both do a step, or give other runs")
    inputs = changed_inputs(one, other)
    parting = _parting(lines[0], lines[1], common)
    notes = [
        note
        for run, those in zip((one, other), lines, strict=True)
        for note in (*_breaks(run, those), *_gaps(run))
    ]
    if parting is not None and follows_the_clock(one) and follows_the_clock(other):
        notes.append(
            "both learned from what finished first (trainer.async_order=completion): such runs "
            "part, whatever they have in common"
        )
    return RunDifference(
        a=str(one.root),
        b=str(other.root),
        common=common,
        only_a=tuple(sorted(lines[0].keys() - lines[1].keys())),
        only_b=tuple(sorted(lines[1].keys() - lines[0].keys())),
        inputs=tuple(inputs),
        parting=parting,
        suspects=tuple(suspects(inputs, parting.stage)) if parting is not None else (),
        found=_rollout(one, other, parting, notes) if parting is not None else None,
        metrics=_metrics(one, other, parting.step, notes) if parting is not None else {},
        notes=tuple(notes),
    )


def _parting(
    a: Mapping[int, StepDigest], b: Mapping[int, StepDigest], common: Sequence[int]
) -> Parting | None:
    for step in common:
        one, other = a[step].stages, b[step].stages
        unequal = tuple(stage for stage in STAGES if one.get(stage) != other.get(stage))
        if unequal:
            return Parting(step=step, stages=unequal)
    return None


def _breaks(run: RunDirectory, lines: Mapping[int, StepDigest]) -> list[str]:
    """Where a run went on from a checkpoint that was not its own."""
    ordered = [lines[step] for step in sorted(lines)]
    return [
        f"{run.root}: step {after.step} does not continue the chain of step {before.step}: "
        "lines are missing, or the run went on from a checkpoint of another"
        for before, after in itertools.pairwise(ordered)
        if after.previous != before.chain
    ]


def _rollout(a: RunDirectory, b: RunDirectory, parting: Parting, notes: list[str]) -> Found | None:
    if parting.stage not in _IN_FILES or parting.step == 0:
        return None
    try:
        step = parting.step
        ones, others = (read_rollouts(run.rollouts(step), step=step) for run in (a, b))
    except UserError as error:
        notes.append(f"the rollouts of step {parting.step} cannot be compared: {error}")
        return None
    found = first_difference(ones, others, parting.stage)
    if found is None:
        notes.append(f"the files of rollouts of step {parting.step} show no difference")
    return found


def _gaps(run: RunDirectory) -> list[str]:
    """Lines of a run that must have been there; rollouts are missed when they are needed."""
    return [f"{one.path}: {one.why}" for one in missing_parts(run) if one.is_damage]


def _metrics(
    a: RunDirectory, b: RunDirectory, step: int, notes: list[str]
) -> dict[str, tuple[float | None, float | None]]:
    try:
        ones, others = (_timeless(run, step) for run in (a, b))
    except UserError as error:
        notes.append(f"the metrics of step {step} cannot be compared: {error}")
        return {}
    for run, found in ((a, ones), (b, others)):
        if found is None:
            notes.append(f"{run.metrics} has no line of step {step}: metrics are not compared")
    if ones is None or others is None:
        return {}
    names = sorted(ones.keys() | others.keys())
    pairs = {name: (ones.get(name), others.get(name)) for name in names}
    return {name: pair for name, pair in pairs.items() if repr(pair[0]) != repr(pair[1])}


def _timeless(run: RunDirectory, step: int) -> dict[str, float] | None:
    """Metrics of a step; None where the run's folder has none of it."""
    lines = read_metrics(run.metrics) if run.metrics.is_file() else []
    return next((line.timeless() for line in lines if line.step == step), None)
