"""Run directories written by hand: metrics of some steps, a configuration, rollouts."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from luyen.base.files import json_line
from luyen.base.records import GroupId, Rollout, Score, Source, StopReason
from luyen.base.rundir import RunDirectory
from luyen.studio.doctor.diagnose import RULES
from luyen.studio.doctor.findings import Symptom
from luyen.studio.doctor.record import read_run
from luyen.telemetry.rollout_files import RecordedRollout, write_rollouts


def write_run(
    root: Path, courses: Mapping[str, Sequence[float]], *, config: str = "{}", first: int = 1
) -> Path:
    """A run whose metrics have these courses, from a step on."""
    made = RunDirectory.create(root, config=config, provenance={}, manifest={})
    steps = max((len(values) for values in courses.values()), default=0)
    lines = [
        {"step": first + i, **{n: float(v[i]) for n, v in courses.items() if i < len(v)}}
        for i in range(steps)
    ]
    made.metrics.write_text("".join(json_line(line) for line in lines))
    return root


def rollout(
    step: int,
    *,
    draw: int = 0,
    sample: int = 0,
    uid: str = "",
    prompt: Sequence[int] = (2, 60, 3),
    answer: Sequence[int] = (61, 3),
    advantages: Sequence[float | None] | None = None,
    version: int | None = None,
    reward: float = 0.0,
) -> RecordedRollout:
    """A rollout of one turn, trained on unless said otherwise."""
    count, asked = len(answer), len(prompt)
    drawn = step - 1 if version is None else version
    made = Rollout(
        group=GroupId(step=step, draw=draw, uid=uid or f"{step}-{draw}"),
        sample=sample,
        tokens=(*prompt, *answer),
        sources=(Source.PROMPT,) * asked + (Source.SAMPLED,) * count,
        turns=(0,) * (asked + count),
        logps=(None,) * asked + (-0.5,) * count,
        versions=(None,) * asked + (drawn,) * count,
        stop=StopReason.ANSWERED,
        text="a",
        score=Score(name="reward", value=reward),
    )
    row = (None,) * asked + (1.0,) * count if advantages is None else tuple(advantages)
    return RecordedRollout(rollout=made, advantages=row)


def write_steps(root: Path, rollouts: Sequence[RecordedRollout]) -> None:
    """Rollouts to the files of their steps."""
    for step in {recorded.rollout.group.step for recorded in rollouts}:
        mine = [r for r in rollouts if r.rollout.group.step == step]
        write_rollouts(RunDirectory(root).rollouts(step), mine)


def seen(root: Path, rule: str) -> list[Symptom]:
    """What one rule sees in a run."""
    return list(RULES[rule].look(read_run(root)))
