"""A step of an offline run done again: from its rows, its configuration and a checkpoint."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

from luyen.base.errors import UserError
from luyen.config.schema.run import RunConfig
from luyen.telemetry.display import SilentDisplay
from luyen.train.build import total_steps
from luyen.train.checkpointed import device_for
from luyen.train.offline.course import OfflineCourse
from luyen.train.offline.files import load_parts
from luyen.train.offline.stage import Given
from luyen.train.offline.stages import STAGES
from luyen.train.offline.start import offline_rows
from luyen.train.process import import_plugins, load_run_tokenizer
from luyen.train.replay.changes import changed_keys
from luyen.train.replay.notes import notes_on, paired
from luyen.train.replay.rebuild import StepCheck, Watch, check_stages
from luyen.train.replay.record import RunRecord
from luyen.train.replay.results import Replayed, Varied


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """An offline step that was taken again.

    Example:
        >>> Taken(metrics={"sft/nll": 0.5}, stages={}).metrics
        {'sft/nll': 0.5}
    """

    metrics: Mapping[str, float]
    """What it measured."""
    stages: Mapping[str, str]
    """Digest of each stage but the metrics."""


def replay_offline(record: RunRecord, step: int, watch: Watch) -> Replayed:
    """Do a recorded step again and compare it with the record."""
    course, start, before = _rebuilt(record, record.config(), step, watch)
    taken = _take(course, step)
    checks = (*before, check_stages(record, step, taken.stages))
    watch(len(checks), len(checks), checks[-1])
    written = record.metrics.get(step, {})
    known = {name: value for name, value in written.items() if name in taken.metrics}
    return Replayed(
        run=str(record.directory.root),
        step=step,
        start=start,
        checks=checks,
        numbers=paired(known, taken.metrics),
        notes=tuple(notes_on(record, step, checks)),
    )


def vary_offline(record: RunRecord, step: int, after: RunConfig, watch: Watch) -> Varied:
    """Do a recorded step twice from the same weights: as it was, and under changed keys."""
    course, start, before = _rebuilt(record, record.config(), step, watch)
    one = _take(course, step)
    checks = (*before, check_stages(record, step, one.stages))
    watch(len(checks), len(checks), checks[-1])
    changed, _, _ = _rebuilt(record, after, step, watch, since=record.config())
    other = _take(changed, step)
    stages = [name for name, digest in one.stages.items() if other.stages[name] != digest]
    return Varied(
        run=str(record.directory.root),
        step=step,
        start=start,
        checks=checks,
        keys=changed_keys(record.config(), after),
        numbers=paired(one.metrics, other.metrics),
        tokens=(),
        stages=tuple(stages),
        notes=tuple(notes_on(record, step, checks)),
    )


def _take(course: OfflineCourse, step: int) -> Taken:
    lesson = course.lesson(step)
    metrics = course.update(step, lesson)
    return Taken(metrics=metrics, stages=course.stages(lesson, metrics))


def _rebuilt(
    record: RunRecord,
    config: RunConfig,
    step: int,
    watch: Watch,
    *,
    since: RunConfig | None = None,
) -> tuple[OfflineCourse, str, list[StepCheck]]:
    """The run before a step, from the nearest checkpoint.

    With `since`, the steps before are done as that configuration says, and only then `config`
    holds.
    """
    record.demand(step)
    course = open_course(since or config, record, step)
    checkpoint = record.checkpoint_before(step)
    first, start = 1, "the beginning"
    if checkpoint is not None:
        first, start = checkpoint.step + 1, f"checkpoint {checkpoint.path.name}"
        course.stage.restore(load_parts(checkpoint.path, course.stage))
    watch(0, step - first + 1, None)
    checks: list[StepCheck] = []
    for number in range(first, step):
        checks.append(check_stages(record, number, _take(course, number).stages))
        watch(len(checks), step - first + 1, checks[-1])
    if since is None:
        return course, start, checks
    other = open_course(config, record, step)
    other.stage.restore(course.stage.state())
    return other, start, checks


def open_course(config: RunConfig, record: RunRecord, step: int) -> OfflineCourse:
    """What a run with this configuration begins with; a UserError where its rows are others now."""
    import_plugins(config.trainer.plugins)
    tokenizer, display = load_run_tokenizer(config), SilentDisplay()
    data = offline_rows(config, tokenizer, display)
    if record.training_rows(step) != data.given.train.fingerprint:
        why = "the training rows are not those that the run learned from"
        fix = "restore the files; an offline step is done again from its rows"
        raise UserError("data.train_files", list(config.data.train_files), why, fix)
    stage = STAGES[config.trainer.stage].build(
        Given(
            config=config,
            data=data,
            tokenizer=tokenizer,
            device=device_for(config),
            directory=None,
            display=display,
        )
    )
    steps = total_steps(config, len(data.train))
    return OfflineCourse(config=config, data=data.given, stage=stage, total_steps=steps)
