"""N: what can be planned and not yet be run; training refuses it, never leaves it out."""

from collections.abc import Iterator

from luyen.config.plan import Placement
from luyen.config.rules.rule import Finding, Situation, rule
from luyen.config.schema.run import RunConfig


@rule("N01", "warning")
def run_can_be_carried_out(s: Situation) -> Iterator[Finding]:
    """The run needs nothing that is not built yet; training refuses to start otherwise."""
    yield from unbuilt(s.config, s.where)


def unbuilt(config: RunConfig, where: Placement) -> Iterator[Finding]:
    """What a configuration can plan and this version cannot carry out."""
    trainer, arr = config.trainer, config.actor_rollout_ref
    actor, rollout = arr.actor, arr.rollout
    if where.world_size > 1:
        why = f"{where.world_size} devices are planned, and training runs in one process so far"
        yield Finding(field="trainer.n_gpus_per_node", why=why, fix="set nnodes and it to 1")
    if where.runtime == "ray":
        why = "training runs in this process so far"
        yield Finding(field="trainer.runtime", why=why, fix="set it to local or auto")
    if actor.strategy in ("fsdp", "fsdp2"):
        why = "weights are not sharded so far"
        yield Finding(field="actor_rollout_ref.actor.strategy", why=why, fix="set it to single")
    if trainer.max_staleness > 0:
        why = "generation and training take turns so far"
        yield Finding(field="trainer.max_staleness", why=why, fix="set it to 0")
    if config.reward.reward_model.enable:
        why = "rules and functions judge so far"
        yield Finding(field="reward.reward_model.enable", why=why, fix="set it to false")
    if not rollout.calculate_log_probs:
        why = "the engine always returns log-probabilities; nothing is saved without them"
        yield Finding(
            field="actor_rollout_ref.rollout.calculate_log_probs", why=why, fix="drop the line"
        )
    if not config.data.return_raw_chat:
        why = "conversations are always kept as messages"
        yield Finding(field="data.return_raw_chat", why=why, fix="drop the line")
