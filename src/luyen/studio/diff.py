"""Where two runs diverge: first step, stage, rollout, token, and the likely cause."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, final

from luyen.base.digests import STAGES, StepDigest, read_digests
from luyen.base.errors import UserError
from luyen.base.records import Branch, Rollout, Score, ToolCall
from luyen.base.rundir import RunDirectory
from luyen.studio.inputs import ChangedInput, changed_inputs, follows_the_clock, suspects
from luyen.studio.runs import missing_parts
from luyen.telemetry.metrics import read_metrics
from luyen.telemetry.rollout_files import RecordedRollout, read_rollouts

# The first difference between the rollouts of two runs: prompt, token, call, part of a reward.

_SHOWN = 200
"""Letters of a text or a result that are shown."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutDifference:
    """The first difference between the rollouts of a step.

    Example:
        >>> ids = {"id": 5}, {"id": 6}
        >>> RolloutDifference(rollout="1.0.a/3", what="token", place="14", a=ids[0], b=ids[1]).place
        '14'
    """

    rollout: str
    """Group and sample, `step.draw.uid/sample`; for prompts, the draw."""
    what: str
    """`prompt`, `rollout`, `token`, `stop`, `text`, `call`, `reward`, `given` or `advantage`."""
    place: str | None
    """Index of the token or the call, path of the part of the reward; None for the whole."""
    a: Any
    """What the first run has there; None: nothing."""
    b: Any
    """What the second run has there; None: nothing."""


def first_difference(
    a: Sequence[RecordedRollout], b: Sequence[RecordedRollout], stage: str
) -> RolloutDifference | None:
    """The first difference that belongs to a stage, in the order of prompts, samples and tokens."""
    if stage == "prompts":
        return _prompts(a, b)
    by_a, by_b = _by_name(a), _by_name(b)
    for name in sorted(
        by_a.keys() | by_b.keys(), key=lambda n: (by_a.get(n) or by_b[n]).rollout.key
    ):
        one, other = by_a.get(name), by_b.get(name)
        if one is None or other is None:
            texts = [None if r is None else _shown(r.rollout.text) for r in (one, other)]
            return RolloutDifference(
                rollout=name, what="rollout", place=None, a=texts[0], b=texts[1]
            )
        found = next(_between(name, one, other, stage), None)
        if found is not None:
            return found
    return None


def _prompts(
    a: Sequence[RecordedRollout], b: Sequence[RecordedRollout]
) -> RolloutDifference | None:
    uids_a, uids_b = ({r.rollout.group.draw: r.rollout.group.uid for r in rows} for rows in (a, b))
    for index in sorted(uids_a.keys() | uids_b.keys()):
        one, other = uids_a.get(index), uids_b.get(index)
        if one != other:
            return RolloutDifference(
                rollout=f"draw {index}", what="prompt", place=None, a=one, b=other
            )
    return None


def _by_name(rows: Sequence[RecordedRollout]) -> dict[str, RecordedRollout]:
    return {f"{r.rollout.group}/{r.rollout.sample}": r for r in rows}


def _between(
    name: str, one: RecordedRollout, other: RecordedRollout, stage: str
) -> Iterator[RolloutDifference]:
    """The differences of one rollout in two runs that belong to a stage."""
    if stage == "rollouts":
        found = _generation_differences(one.rollout, other.rollout)
    elif stage == "rewards":
        found = _reward_differences(one.rollout, other.rollout)
    else:
        found = _advantage_differences(one, other)
    for what, place, a, b in found:
        yield RolloutDifference(rollout=name, what=what, place=place, a=a, b=b)


def _generation_differences(
    one: Rollout, other: Rollout
) -> Iterator[tuple[str, str | None, Any, Any]]:
    many = len(one.branches) > 1 or len(other.branches) > 1
    for number in range(max(len(one.branches), len(other.branches))):
        pair = [r.branches[number] if number < len(r.branches) else None for r in (one, other)]
        tokens_a, tokens_b = (_tokens(branch) for branch in pair)
        for index, a, b in _unequal(tokens_a, tokens_b):
            yield "token", f"{number}:{index}" if many else str(index), a, b
    for index, a, b in _unequal([_call(c) for c in one.calls], [_call(c) for c in other.calls]):
        yield "call", str(index), a, b
    if one.stop != other.stop:
        yield "stop", None, one.stop.value, other.stop.value
    if one.text != other.text:
        yield "text", None, _shown(one.text), _shown(other.text)
    if (one.fault is None) != (other.fault is None):
        yield "fault", None, one.fault, other.fault


def _tokens(branch: Branch | None) -> list[dict[str, Any]]:
    if branch is None:
        return []
    streams = zip(
        branch.tokens, branch.sources, branch.turns, branch.logps, branch.versions, strict=True
    )
    return [
        {"id": t, "source": s.name.lower(), "turn": turn, "logp": logp, "version": version}
        for t, s, turn, logp, version in streams
    ]


def _call(call: ToolCall) -> dict[str, Any]:
    return {
        "turn": call.turn,
        "name": call.name,
        "arguments": dict(call.arguments),
        "status": call.status.value,
        "result": call.result,
        "reward": call.reward,
    }


def _reward_differences(one: Rollout, other: Rollout) -> Iterator[tuple[str, str | None, Any, Any]]:
    """Components before the total: a component explains why the total differs."""
    parts_a, parts_b = (_parts(r.score) for r in (one, other))
    paths = sorted(dict.fromkeys([*parts_a, *parts_b]), key=lambda path: -path.count("/"))
    for path in paths:
        if not _same(parts_a.get(path), parts_b.get(path)):
            yield "reward", path, parts_a.get(path), parts_b.get(path)
    if one.given != other.given:
        yield "given", None, one.given, other.given


def _parts(score: Score | None, prefix: str = "") -> dict[str, Any]:
    if score is None:
        return {}
    path = f"{prefix}{score.name}"
    own: dict[str, Any] = {"value": score.value, "weight": score.weight, "by_turn": score.by_turn}
    if score.raw is not None or score.gated:
        own |= {"raw": score.raw, "gated": score.gated}
    found: dict[str, Any] = {path: own}
    for part in score.parts:
        found |= _parts(part, f"{path}/")
    return found


def _advantage_differences(
    one: RecordedRollout, other: RecordedRollout
) -> Iterator[tuple[str, str | None, Any, Any]]:
    if (one.advantages is None) != (other.advantages is None):
        used = [None if r.advantages is None else "used in the step" for r in (one, other)]
        yield "advantage", None, used[0], used[1]
        return
    # Rollouts are compared before advantages, so both have the same number of branches.
    rows = zip(
        (*one.earlier, one.advantages or ()), (*other.earlier, other.advantages or ()), strict=False
    )
    for number, (a, b) in enumerate(rows):
        for index, x, y in _unequal(a, b):
            yield "advantage", f"{number}:{index}" if one.earlier else str(index), x, y


def _unequal(a: Sequence[Any], b: Sequence[Any]) -> Iterator[tuple[int, Any, Any]]:
    for index in range(max(len(a), len(b))):
        x = a[index] if index < len(a) else None
        y = b[index] if index < len(b) else None
        if not _same(x, y):
            yield index, x, y


def _same(a: Any, b: Any) -> bool:
    """Equality of the written form: NaN equals NaN, and 0.0 differs from -0.0."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    return repr(a) == repr(b) if isinstance(a, float) or isinstance(b, float) else a == b


def _shown(text: str) -> str:
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."


_IN_FILES = ("prompts", "rollouts", "rewards", "advantages")
"""Stages whose content is in the rollout files."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """The first step in which two runs differ.

    Example:
        >>> Divergence(step=3, stages=("weights", "metrics")).stage
        'weights'
    """

    step: int
    """The step."""
    stages: tuple[str, ...]
    """Stages that differ in it, in the order in which they happen."""

    @property
    def stage(self) -> str:
        """The first stage that differs; later differences follow from it."""
        return self.stages[0]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RunDifference:
    """Result of comparing two runs.

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
    parting: Divergence | None
    """The first divergence; None: every common step is equal."""
    suspects: tuple[ChangedInput, ...]
    """Inputs that can explain it, the likeliest first; empty: no recorded input does."""
    found: RolloutDifference | None
    """The first rollout that differs, where the files show one."""
    metrics: Mapping[str, tuple[float | None, float | None]]
    """Metrics of that step that differ; None for one that is not there."""
    notes: tuple[str, ...]
    """What could not be compared, and further remarks."""

    @property
    def is_equal(self) -> bool:
        """Whether both runs have the same steps with the same digests."""
        return self.parting is None and not self.only_a and not self.only_b

    def as_json(self) -> dict[str, Any]:
        """Plain data, derived properties included."""
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
    parting = first_divergence(lines[0], lines[1], common)
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


def first_divergence(
    a: Mapping[int, StepDigest], b: Mapping[int, StepDigest], common: Sequence[int]
) -> Divergence | None:
    """The first common step whose digests differ; None where all are equal."""
    for step in common:
        one, other = a[step].stages, b[step].stages
        unequal = tuple(stage for stage in STAGES if one.get(stage) != other.get(stage))
        if unequal:
            return Divergence(step=step, stages=unequal)
    return None


def _breaks(run: RunDirectory, lines: Mapping[int, StepDigest]) -> list[str]:
    """Breaks in the digest chain, where a run resumed from a checkpoint of another run."""
    ordered = [lines[step] for step in sorted(lines)]
    return [
        f"{run.root}: step {after.step} does not continue the chain of step {before.step}: "
        "lines are missing, or the run went on from a checkpoint of another"
        for before, after in itertools.pairwise(ordered)
        if after.previous != before.chain
    ]


def _rollout(
    a: RunDirectory, b: RunDirectory, parting: Divergence, notes: list[str]
) -> RolloutDifference | None:
    if parting.stage not in _IN_FILES or parting.step == 0:
        return None
    try:
        step = parting.step
        rows_a, rows_b = (read_rollouts(run.rollouts(step), step=step) for run in (a, b))
    except UserError as error:
        notes.append(f"the rollouts of step {parting.step} cannot be compared: {error}")
        return None
    found = first_difference(rows_a, rows_b, parting.stage)
    if found is None:
        notes.append(f"the files of rollouts of step {parting.step} show no difference")
    return found


def _gaps(run: RunDirectory) -> list[str]:
    """Missing lines of a run; missing rollout files are reported when they are needed."""
    return [f"{one.path}: {one.why}" for one in missing_parts(run) if one.is_damage]


def _metrics(
    a: RunDirectory, b: RunDirectory, step: int, notes: list[str]
) -> dict[str, tuple[float | None, float | None]]:
    try:
        metrics_a, metrics_b = (_timeless(run, step) for run in (a, b))
    except UserError as error:
        notes.append(f"the metrics of step {step} cannot be compared: {error}")
        return {}
    for run, found in ((a, metrics_a), (b, metrics_b)):
        if found is None:
            notes.append(f"{run.metrics} has no line of step {step}: metrics are not compared")
    if metrics_a is None or metrics_b is None:
        return {}
    names = sorted(metrics_a.keys() | metrics_b.keys())
    pairs = {name: (metrics_a.get(name), metrics_b.get(name)) for name in names}
    return {name: pair for name, pair in pairs.items() if repr(pair[0]) != repr(pair[1])}


def _timeless(run: RunDirectory, step: int) -> dict[str, float] | None:
    """Metrics of a step without times; None if the run has no line of it."""
    lines = read_metrics(run.metrics) if run.metrics.is_file() else []
    return next((line.timeless() for line in lines if line.step == step), None)
