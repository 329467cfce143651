"""What a configuration can plan and this version cannot carry out: refused, never left out."""

from collections.abc import Iterator

from luyen.base.errors import UserError
from luyen.config.check import Report


def refuse_unbuilt(report: Report) -> None:
    """Raise a UserError for the first setting that the loop would silently ignore."""
    for field, value, why, fix in _unbuilt(report):
        raise UserError(field, value, why, fix)


def _unbuilt(report: Report) -> Iterator[tuple[str, object, str, str]]:
    trainer, arr = report.config.trainer, report.config.actor_rollout_ref
    where, turns = report.plan.where, arr.rollout.multi_turn
    if where.world_size > 1:
        why = f"{where.world_size} devices are planned, and training runs in one process so far"
        yield "trainer.n_gpus_per_node", trainer.n_gpus_per_node, why, "set nnodes and it to 1"
    if where.runtime == "ray":
        why = "training runs in this process so far"
        yield "trainer.runtime", trainer.runtime, why, "set it to local or auto"
    if arr.actor.strategy in ("fsdp", "fsdp2"):
        why = "weights are not sharded so far"
        yield "actor_rollout_ref.actor.strategy", arr.actor.strategy, why, "set it to single"
    if trainer.max_staleness > 0:
        why = "generation and training take turns so far"
        yield "trainer.max_staleness", trainer.max_staleness, why, "set it to 0"
    if turns.enable:
        why = "rollouts have one turn so far"
        yield "actor_rollout_ref.rollout.multi_turn.enable", True, why, "set it to false"
    if report.config.reward.reward_model.enable:
        why = "rules and functions judge so far"
        yield "reward.reward_model.enable", True, why, "set it to false"
    if not arr.rollout.calculate_log_probs:
        why = "the engine always returns log-probabilities; nothing is saved without them"
        yield "actor_rollout_ref.rollout.calculate_log_probs", False, why, "drop the line"
    if not report.config.data.return_raw_chat:
        why = "conversations are always kept as messages"
        yield "data.return_raw_chat", False, why, "drop the line"
