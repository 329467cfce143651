"""A step of a run done again from its files: as it was, with another knob, or one rollout of it."""

from collections.abc import Mapping, Sequence

from luyen.engine.batch import PackedBatch
from luyen.telemetry.manifest import collect
from luyen.train.replay.changes import changed_config, changed_keys
from luyen.train.replay.learner import Replaying, Trace, open_learner
from luyen.train.replay.rebuild import Learned, StepCheck, Watch, check, learn_step, rebuild
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

_PARTED = "the weights before the step are not those of the run, so neither is what follows"


def replay_step(record: RunRecord, step: int, watch: Watch) -> Replayed:
    """Do a recorded step again and compare it with the record."""
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
        notes=tuple(_notes(record, step, checks)),
    )


def vary_step(record: RunRecord, step: int, overrides: Sequence[str], watch: Watch) -> Varied:
    """Do a recorded step twice from the same weights: as it was, and under changed keys."""
    before = record.config()
    after = changed_config(record, overrides)
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
        numbers=_paired(_measured(one[0]), _measured(other[0])),
        tokens=tuple(token_changes(in_order(recorded.groups), changed.tokenizer, one, other)),
        stages=tuple(stage for stage in stages if stages[stage] != other[0].stages[stage]),
        notes=tuple(_notes(record, step, checks)),
    )


def replay_rollout(record: RunRecord, step: int, wanted: str, watch: Watch) -> Regenerated:
    """Draw one rollout of a recorded step again, with the weights that drew it."""
    record.demand(step)
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


def _paired(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, Number]:
    names = sorted(before.keys() | after.keys())
    return {name: Number(before=before.get(name), after=after.get(name)) for name in names}


def _notes(record: RunRecord, step: int, checks: Sequence[StepCheck]) -> list[str]:
    notes: list[str] = []
    if step not in record.metrics:
        notes.append("metrics.jsonl does not have the step: numbers are compared with nothing")
    if any(one.unequal for one in checks[:-1]):
        notes.append(_PARTED)
    if any(one.unequal for one in checks):
        notes += _elsewhere(record)
    return notes


def _elsewhere(record: RunRecord) -> list[str]:
    """What of the machine and its packages is not as it was when the run began."""
    written = record.directory.read_manifest()
    here = collect(seeds={}, datasets={}).as_json()
    pairs = {
        f"{kind}.{name}": (written.get(kind, {}).get(name), here[kind].get(name))
        for kind, names in (
            ("versions", here["versions"]),
            ("settings", written.get("settings", {}).keys() | here["settings"].keys()),
            ("hardware", ("processor", "machine")),
        )
        for name in names
    }
    return [
        f"not as when the run began: {name} was {before}, is {now}"
        for name, (before, now) in sorted(pairs.items())
        if before != now
    ]
