"""Rules about the processes of a run on a cluster."""

from collections.abc import Iterator

from luyen.studio.doctor.course import WINDOW
from luyen.studio.doctor.findings import Experiment, Symptom, rule
from luyen.studio.doctor.read import RunRecord

_BUSY = 0.5
"""Share of the time below which most of a role's devices are paid for nothing."""
_SHORT_S = 0.5
"""Seconds of a step below which messages decide, and not work."""
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
        busy, idle = record.course(f"role/{role}/busy"), record.course(f"wait/{role}_idle")
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
