"""Rules about the run itself: damaged files, missing validation, speed, idle processes."""

from collections.abc import Iterator

from luyen.studio.doctor.findings import Experiment, Symptom, change_data, repair, rule
from luyen.studio.doctor.record import WINDOW, RunRecord

_UNWATCHED = 20
"""Steps without any validation after which the rule reports."""
_SLOWER, _BUSY_S = 0.5, 0.5
"""Share of the first speed, and seconds of a step below which a busy machine decides the speed."""
_SETTLED = 20
"""Steps before speeds are compared: the first ones compile, allocate and fill caches."""


@rule("unreadable-files", "error")
def unreadable_files(record: RunRecord) -> Iterator[Symptom]:
    """A file of the run is damaged or missing."""
    for unread in record.damaged():
        yield Symptom(
            says=f"{unread.file}: {unread.why}",
            experiment=repair("restore the file from a copy, or remove it if it is not needed"),
        )
    for unread in record.removed:
        yield Symptom(
            says=f"{unread.file}: {unread.why}",
            experiment=repair("nothing, if it was removed on purpose; else restore it from a copy"),
            severity="note",
        )


@rule("no-validation", "note", steps=_UNWATCHED)
def no_validation(record: RunRecord) -> Iterator[Symptom]:
    """Nothing held out is measured."""
    if len(record.steps) < _UNWATCHED:
        return
    if any("val/" in name or "/val_" in name for line in record.lines for name in line.values):
        return
    trainer = record.config.trainer
    change = "set data.val_files to rows that are not trained on"
    if record.config.data.val_files:
        change = f"trainer.test_freq={_UNWATCHED} (it is {trainer.test_freq})"
    yield Symptom(
        says=f"{len(record.steps)} steps and no validation: a rising reward may mean anything",
        experiment=change_data(change),
        steps=(record.steps[-1].step,),
    )


@rule("slowing-down", "warning", steps=_SETTLED)
def slowing_down(record: RunRecord) -> Iterator[Symptom]:
    """The run handles fewer and fewer tokens a second."""
    speed, seconds = record.series("time/tokens_per_s"), record.series("time/step")
    # Offline stages do not record how long a step takes.
    if len(speed) < _SETTLED or not seconds.has_end or seconds.end() < _BUSY_S:
        return
    # The first two steps pay for what is done once.
    begun = sorted(speed.values[2 : _SETTLED // 2])
    before, now = begun[len(begun) // 2], speed.end()
    if now < _SLOWER * before:
        yield Symptom(
            says=f"{now:.3g} tokens/s at the end, {before:.3g} at the beginning; a step takes "
            f"{seconds.end():.3g} s",
            experiment=repair(
                "`luyen profile` with this configuration, and look which phase of time/... grows"
            ),
            steps=speed.last_steps,
            numbers={"tokens_per_s": now, "tokens_per_s_before": before},
        )


# Rules about the processes of a run on a cluster.

_BUSY = 0.5
"""Busy share of a role below which the rule reports."""
_SHORT_S = 0.5
"""Idle seconds per step below which messaging dominates, and not work."""
_REPLICAS = "actor_rollout_ref.rollout.data_parallel_size"


@rule("idle-role", "note", steps=WINDOW)
def idle_role(record: RunRecord) -> Iterator[Symptom]:
    """Ranks or replicas that could work at the same time stand idle for most of it."""
    # Where they take turns, one of them is idle by design.
    if record.config.trainer.max_staleness == 0:
        return
    replicas = record.config.actor_rollout_ref.rollout.data_parallel_size
    ahead = record.config.trainer.max_staleness
    changes = {
        "rollout": f"{_REPLICAS} below {replicas}, and the devices to the ranks",
        "actor": f"{_REPLICAS} above {replicas}, or trainer.max_staleness={2 * ahead}",
    }
    for role, change in changes.items():
        busy, idle = record.series(f"role/{role}/busy"), record.series(f"wait/{role}_idle")
        if not (busy.has_end and idle.has_end) or idle.end() < _SHORT_S:
            continue
        if busy.end() < _BUSY:
            yield Symptom(
                says=f"{role} works for {busy.end():.0%} of the time, and is idle for "
                f"{idle.end():.3g} s of a step (median of the last {len(busy.last_steps)} steps)",
                experiment=Experiment(
                    stage="memory", change=change, then=("`luyen timeline` says for whom it waits",)
                ),
                steps=busy.last_steps,
                numbers={"busy": busy.end(), "idle_s": idle.end()},
            )
