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
    rollout = arr.rollout
    if where.runtime == "local" and where.world_size > 1:
        why = f"{where.world_size} devices are planned, and one process has one"
        yield Finding(field="trainer.runtime", why=why, fix="set it to ray or auto")
    if where.world_size > 1 and arr.actor.strategy == "single":
        why = f"it trains one device, and {where.world_size} are planned"
        yield Finding(field="actor_rollout_ref.actor.strategy", why=why, fix="set it to auto")
    if where.runtime == "ray" and trainer.stage != "rl":
        why = "supervised runs train in this process so far"
        yield Finding(field="trainer.runtime", why=why, fix="set nnodes and n_gpus_per_node to 1")
    is_one_gpu = where.device == "cuda" and where.runtime == "local"
    if trainer.max_staleness > 0 and trainer.stage == "rl" and is_one_gpu:
        why = "in one process on a GPU, generation and training take turns so far"
        fix = "set trainer.runtime=ray and actor_rollout_ref.rollout.nnodes=1, or it to 0"
        yield Finding(field="trainer.max_staleness", why=why, fix=fix)
    if not rollout.calculate_log_probs:
        why = "the engine always returns log-probabilities; nothing is saved without them"
        yield Finding(
            field="actor_rollout_ref.rollout.calculate_log_probs", why=why, fix="drop the line"
        )
    if not config.data.return_raw_chat:
        why = "conversations are always kept as messages"
        yield Finding(field="data.return_raw_chat", why=why, fix="drop the line")
