"""A step of a run done again from its files: as it was, with another knob, or one rollout of it."""

from collections.abc import Sequence

from luyen.base.errors import UserError
from luyen.engine.batch import PackedBatch
from luyen.train.replay.changes import changed_config, changed_keys
from luyen.train.replay.learner import Replaying, Trace, open_learner
from luyen.train.replay.notes import notes_on, paired
from luyen.train.replay.offline import replay_offline, vary_offline
from luyen.train.replay.rebuild import Learned, Watch, check, learn_step, rebuild
from luyen.train.replay.record import RecordedStep, RunRecord
from luyen.train.replay.regenerate import (
    Regenerated,
    find_rollout,
    regenerate,
    step_of_weights,
)
from luyen.train.replay.results import Number, Replayed, Varied
from luyen.train.replay.tokens import token_changes
from luyen.train.samples import in_order


def replay_step(record: RunRecord, step: int, watch: Watch) -> Replayed:
    """Do a recorded step again and compare it with the record."""
    if record.is_offline:
        return replay_offline(record, step, watch)
    rebuilt = rebuild(record, step, watch)
    try:
        recorded = record.step(step)
        learned = learn_step(rebuilt.run, recorded)
    finally:
        rebuilt.run.roles.close()
    checks = (*rebuilt.checks, check(record, step, learned))
    watch(len(checks), len(checks), checks[-1])
    return Replayed(
        run=str(record.directory.root),
        step=step,
        start=rebuilt.start,
        checks=checks,
        numbers=_against_record(record, recorded, learned),
        notes=tuple(notes_on(record, step, checks)),
    )


def vary_step(record: RunRecord, step: int, overrides: Sequence[str], watch: Watch) -> Varied:
    """Do a recorded step twice from the same weights: as it was, and under changed keys."""
    before = record.config()
    after = changed_config(record, overrides)
    if record.is_offline:
        return vary_offline(record, step, after, watch)
    rebuilt = rebuild(record, step, watch)
    recorded, moment = record.step(step), rebuilt.run.moment()
    try:
        one = _explained(rebuilt.run, recorded)
    finally:
        rebuilt.run.roles.close()
    checks = (*rebuilt.checks, check(record, step, one[0]))
    watch(len(checks), len(checks), checks[-1])
    changed = open_learner(after, rows=record.rows())
    try:
        changed.return_to(moment)
        other = _explained(changed, recorded)
    finally:
        changed.roles.close()
    stages = one[0].stages
    return Varied(
        run=str(record.directory.root),
        step=step,
        start=rebuilt.start,
        checks=checks,
        keys=changed_keys(before, after),
        numbers=paired(_measured(one[0]), _measured(other[0])),
        tokens=tuple(token_changes(in_order(recorded.groups), changed.tokenizer, one, other)),
        stages=tuple(stage for stage in stages if stages[stage] != other[0].stages[stage]),
        notes=tuple(notes_on(record, step, checks)),
    )


def replay_rollout(record: RunRecord, step: int, wanted: str, watch: Watch) -> Regenerated:
    """Draw one rollout of a recorded step again, with the weights that drew it."""
    record.demand(step)
    if record.is_offline:
        why = "the run learned from given rows: there are no rollouts in it"
        raise UserError("--rollout", wanted, why, "leave it out to do the whole step again")
    rollout = find_rollout(record.step(step), wanted)
    rebuilt = rebuild(record, step_of_weights(rollout, step), watch)
    try:
        return regenerate(rebuilt.run, rollout)
    finally:
        rebuilt.run.roles.close()


def _explained(run: Replaying, recorded: RecordedStep) -> tuple[Learned, list[Trace]]:
    run.explains = True
    return learn_step(run, recorded), run.traces


def _measured(learned: Learned) -> dict[str, float]:
    """Metrics of a step, and its advantages in a few numbers."""
    return {**learned.metrics, **_summary(_trained(learned.batch))}


def _trained(batch: PackedBatch) -> list[float]:
    return batch.streams["advantages"][batch.layout.mask].tolist()


def _summary(advantages: Sequence[float]) -> dict[str, float]:
    count = len(advantages)
    return {
        "advantage/mean": sum(advantages) / count,
        "advantage/mean_abs": sum(map(abs, advantages)) / count,
        "advantage/min": min(advantages),
        "advantage/max": max(advantages),
    }


def _against_record(
    record: RunRecord, recorded: RecordedStep, learned: Learned
) -> dict[str, Number]:
    """Every number that the step gave, beside the one that the run wrote down."""
    again = _measured(learned)
    written = {**record.metrics.get(recorded.step, {}), **_summary(recorded.advantages)}
    return {name: Number(before=written.get(name), after=again[name]) for name in sorted(again)}
