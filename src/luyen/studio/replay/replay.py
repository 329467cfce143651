"""Replay a recorded step: as it was, under changed keys, or one rollout of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from luyen.base.errors import UserError
from luyen.config.check import check
from luyen.config.loader.tree import leaves
from luyen.config.problem import Problem
from luyen.config.schema.run import RunConfig
from luyen.engine.batch import PackedBatch
from luyen.pipeline.policy_loading import device_for
from luyen.studio.replay.learner import (
    LearnedStep,
    StepCheck,
    Watch,
    check_stages,
    check_step,
    explain_step,
    learn_step,
    open_learner,
    rebuild,
    token_numbers,
)
from luyen.studio.replay.record import RecordedStep, ReplayRecord
from luyen.studio.replay.regenerate import (
    RegeneratedRollout,
    find_rollout,
    regenerate,
    step_of_weights,
)
from luyen.studio.replay.results import (
    NumberPair,
    ReplayedStep,
    StepVariation,
    notes_on,
    paired,
    token_changes,
)
from luyen.studio.token_file import write_token_numbers
from luyen.telemetry.display import SilentDisplay
from luyen.train.batch import batch_order
from luyen.train.builders.run import learning_rules, total_steps
from luyen.train.builders.setup import import_plugins, load_run_tokenizer
from luyen.train.offline.build import build_stage, local_offline_roles
from luyen.train.offline.loop import OfflineSchedule
from luyen.train.offline.start import offline_rows

# Keys that may be changed in a replay, and the changed configuration.

_GENERATION = "it says how rollouts are drawn, and those of a recorded step are drawn already"
_WEIGHTS = "it says what weights there are, and a replay has those of the run"
_REASONS: dict[str, str | None] = {
    "data": "it says what is drawn from, and the prompts of a recorded step are drawn already",
    "actor_rollout_ref.model": _WEIGHTS,
    "actor_rollout_ref.actor": None,
    "actor_rollout_ref.ref": None,
    "actor_rollout_ref.rollout": _GENERATION,
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": None,
    "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz": None,
    "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu": None,
    "critic": None,
    "critic.model": _WEIGHTS,
    "reward": "no reward is called in a replay: the scores are those of the record",
    "algorithm": None,
    "algorithm.filter_groups": "it chooses groups, and those of a recorded step are chosen already",
    "sft": None,
    "preference": None,
    "distill": None,
    "distill.teacher_path": _WEIGHTS,
    "trainer": "it does not act on what a step computes from its rollouts",
    "trainer.seed": "random numbers belong to the run: prompts and rollouts were drawn with it",
    "trainer.critic_warmup": None,
    "trainer.total_epochs": None,
    "trainer.total_training_steps": None,
}
"""Why a key or prefix cannot be changed in a replay; None: it can. The longest prefix wins."""


def changed_config(record: ReplayRecord, overrides: Sequence[str]) -> RunConfig:
    """The configuration of the run with overrides, validated.

    A UserError for a key that has no effect on a recorded step, for an invalid value, and for a
    change that needs data the run did not record.
    """
    before, file = record.config(), record.directory.config
    import_plugins(before.trainer.plugins)  # the rules below know what they register
    new = _new_errors(file, overrides)
    if new:
        raise UserError(new[0].field, new[0].value, new[0].why, new[0].fix)
    after = record.config(overrides)
    pairs = changed_keys(before, after)
    if not pairs:
        why = "the run had these very values"
        raise UserError("--set", " ".join(overrides), why, "give another value")
    for key, (_, value) in pairs.items():
        reason = refusal(key)
        if reason is not None:
            fix = "change keys of actor, ref, critic or algorithm; for other keys begin a new run"
            raise UserError(key, value, reason, fix)
    _refuse_what_was_not_there(before, after)
    return after


def refusal(key: str) -> str | None:
    """Why a key cannot be changed in a replay; None: it can.

    Example:
        >>> refusal("actor_rollout_ref.actor.clip_ratio") is None
        True
        >>> refusal("data.train_files")[:32]
        'it says what is drawn from, and '
    """
    parts = key.split(".")
    beginnings = [".".join(parts[:count]) for count in range(len(parts), 0, -1)]
    return next((_REASONS[known] for known in beginnings if known in _REASONS), None)


def changed_keys(before: RunConfig, after: RunConfig) -> dict[str, tuple[Any, Any]]:
    """Dotted keys whose values differ, with both."""
    one, other = (dict(leaves(config.model_dump(mode="json"))) for config in (before, after))
    names = sorted(one.keys() | other.keys())
    pairs = {name: (one.get(name), other.get(name)) for name in names}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def _new_errors(file: Path, overrides: Sequence[str]) -> list[Problem]:
    """Errors caused by the overrides; errors of the run's own files are ignored."""
    known = {(p.id, p.field) for p in check([file], starts_a_run=False).problems}
    found = check([file], overrides, starts_a_run=False).problems
    return [p for p in found if p.severity == "error" and (p.id, p.field) not in known]


def _refuse_what_was_not_there(before: RunConfig, after: RunConfig) -> None:
    if before.trainer.stage != "rl":
        return
    had, needs = learning_rules(before).needs, learning_rules(after).needs
    estimator = after.algorithm.adv_estimator
    if needs.values and not had.values:
        why = "it needs a critic, and the run trained none"
        fix = "choose an estimator without a critic"
        raise UserError("algorithm.adv_estimator", estimator, why, fix)
    if needs.reward and not had.reward:
        why = "the run learned from its teacher alone, and its rollouts have no scores"
        fix = "leave it at 0"
        raise UserError("distill.task_weight", after.distill.task_weight, why, fix)
    if needs.baselines and not had.baselines:
        why = "it compares with greedy answers, and the run generated none"
        fix = "choose an estimator without greedy answers"
        raise UserError("algorithm.adv_estimator", estimator, why, fix)


# Replay of an offline step: from its rows, its configuration and a checkpoint.


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class OfflineStep:
    """Result of a replayed offline step.

    Example:
        >>> OfflineStep(metrics={"sft/nll": 0.5}, stages={}).metrics
        {'sft/nll': 0.5}
    """

    metrics: Mapping[str, float]
    """Its metrics."""
    stages: Mapping[str, str]
    """Digest of each stage but the metrics."""


def replay_offline(record: ReplayRecord, step: int, watch: Watch) -> ReplayedStep:
    """Repeat a recorded step and compare it with the record."""
    schedule, start, before = _rebuilt(record, record.config(), step, watch)
    taken = _take(schedule, step)
    checks = (*before, check_stages(record, step, taken.stages))
    watch(len(checks), len(checks), checks[-1])
    written = record.metrics.get(step, {})
    known = {name: value for name, value in written.items() if name in taken.metrics}
    return ReplayedStep(
        run=str(record.directory.root),
        step=step,
        start=start,
        checks=checks,
        numbers=paired(known, taken.metrics),
        notes=tuple(notes_on(record, step, checks)),
    )


def vary_offline(record: ReplayRecord, step: int, after: RunConfig, watch: Watch) -> StepVariation:
    """Repeat a recorded step twice from the same weights: as recorded, and with changed keys."""
    schedule, start, before = _rebuilt(record, record.config(), step, watch)
    one = _take(schedule, step)
    checks = (*before, check_stages(record, step, one.stages))
    watch(len(checks), len(checks), checks[-1])
    changed, _, _ = _rebuilt(record, after, step, watch, since=record.config())
    other = _take(changed, step)
    stages = [name for name, digest in one.stages.items() if other.stages[name] != digest]
    return StepVariation(
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


def _take(schedule: OfflineSchedule, step: int) -> OfflineStep:
    offline_batch = schedule.offline_batch(step)
    metrics = schedule.update(step, offline_batch)
    return OfflineStep(metrics=metrics, stages=schedule.stages(offline_batch, metrics))


def _rebuilt(
    record: ReplayRecord,
    config: RunConfig,
    step: int,
    watch: Watch,
    *,
    since: RunConfig | None = None,
) -> tuple[OfflineSchedule, str, list[StepCheck]]:
    """Rebuild the state before a step from the nearest checkpoint.

    With `since`, the earlier steps use that configuration, and only the wanted step uses `config`.
    """
    record.demand(step)
    schedule = open_schedule(since or config, record, step)
    checkpoint = record.checkpoint_before(step)
    first, start = 1, "the beginning"
    if checkpoint is not None:
        first, start = checkpoint.step + 1, f"checkpoint {checkpoint.path.name}"
        schedule.restore(checkpoint.path)
    watch(0, step - first + 1, None)
    checks: list[StepCheck] = []
    for number in range(first, step):
        checks.append(check_stages(record, number, _take(schedule, number).stages))
        watch(len(checks), step - first + 1, checks[-1])
    if since is None:
        return schedule, start, checks
    other = open_schedule(config, record, step)
    other.stage.roles.copy_from(schedule.stage.roles)
    other.stage.restore(schedule.stage.state())
    return other, start, checks


def open_schedule(config: RunConfig, record: ReplayRecord, step: int) -> OfflineSchedule:
    """The initial state of an offline run; a UserError where its rows have changed."""
    import_plugins(config.trainer.plugins)
    tokenizer, display = load_run_tokenizer(config), SilentDisplay()
    data = offline_rows(config, tokenizer, display)
    if record.training_rows(step) != data.given.train.fingerprint:
        why = "the training rows are not those that the run learned from"
        fix = "restore the files; an offline step is done again from its rows"
        raise UserError("data.train_files", list(config.data.train_files), why, fix)
    roles = local_offline_roles(config, tokenizer, device_for(config))
    stage = build_stage(config, data, tokenizer, roles, display)
    steps = total_steps(config, len(data.train))
    return OfflineSchedule(config=config, data=data.given, stage=stage, total_steps=steps)


def replay_step(
    record: ReplayRecord, step: int, watch: Watch, *, tokens: Path | None = None
) -> ReplayedStep:
    """Repeat a recorded step and compare it with the record.

    With `tokens`, log-probability and entropy of every token before the step go into that file.
    """
    if record.is_offline:
        if tokens is not None:
            why = "the run learned from given rows: there are no rollouts in it"
            raise UserError("--tokens", str(tokens), why, "leave it out")
        return replay_offline(record, step, watch)
    rebuilt = rebuild(record, step, watch)
    try:
        recorded = record.step(step)
        measured = [] if tokens is None else token_numbers(rebuilt.run, recorded)
        learned = learn_step(rebuilt.run, recorded)
    finally:
        rebuilt.run.roles.close()
    checks = (*rebuilt.checks, check_step(record, step, learned))
    watch(len(checks), len(checks), checks[-1])
    if tokens is not None:
        is_equal = not any(one.unequal for one in checks)
        write_token_numbers(tokens, measured, is_equal=is_equal)
    return ReplayedStep(
        run=str(record.directory.root),
        step=step,
        start=rebuilt.start,
        checks=checks,
        numbers=_against_record(record, recorded, learned),
        notes=tuple(notes_on(record, step, checks)),
    )


def vary_step(
    record: ReplayRecord, step: int, overrides: Sequence[str], watch: Watch
) -> StepVariation:
    """Repeat a recorded step twice from the same weights: as recorded, and with changed keys."""
    before = record.config()
    after = changed_config(record, overrides)
    if record.is_offline:
        return vary_offline(record, step, after, watch)
    rebuilt = rebuild(record, step, watch)
    recorded, snapshot = record.step(step), rebuilt.run.snapshot()
    try:
        one = explain_step(rebuilt.run, recorded)
    finally:
        rebuilt.run.roles.close()
    checks = (*rebuilt.checks, check_step(record, step, one[0]))
    watch(len(checks), len(checks), checks[-1])
    changed = open_learner(after, rows=record.rows())
    try:
        changed.restore(snapshot)
        other = explain_step(changed, recorded)
    finally:
        changed.roles.close()
    stages = one[0].stages
    return StepVariation(
        run=str(record.directory.root),
        step=step,
        start=rebuilt.start,
        checks=checks,
        keys=changed_keys(before, after),
        numbers=paired(_measured(one[0]), _measured(other[0])),
        tokens=tuple(token_changes(batch_order(recorded.groups), changed.tokenizer, one, other)),
        stages=tuple(stage for stage in stages if stages[stage] != other[0].stages[stage]),
        notes=tuple(notes_on(record, step, checks)),
    )


def replay_rollout(
    record: ReplayRecord, step: int, wanted: str, watch: Watch
) -> RegeneratedRollout:
    """Regenerate one rollout of a recorded step with the weights that sampled it."""
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


def _measured(learned: LearnedStep) -> dict[str, float]:
    """Metrics of a step and summary statistics of its advantages."""
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
    record: ReplayRecord, recorded: RecordedStep, learned: LearnedStep
) -> dict[str, NumberPair]:
    """Every number of the replayed step paired with the recorded one."""
    again = _measured(learned)
    written = {**record.metrics.get(recorded.step, {}), **_summary(recorded.advantages)}
    return {name: NumberPair(before=written.get(name), after=again[name]) for name in sorted(again)}
