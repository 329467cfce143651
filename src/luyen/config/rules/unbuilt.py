"""N: what can be planned and not yet be run: it is refused, never left out."""

from collections.abc import Iterator

from luyen.config.rules.rule import Finding, Situation, rule


@rule("N01", "error")
def run_can_be_carried_out(s: Situation) -> Iterator[Finding]:
    """The run needs nothing that is not built yet."""
    trainer, where = s.config.trainer, s.where
    if trainer.stage != "rl" and (where.runtime == "ray" or where.world_size > 1):
        yield _offline_cluster(s)
    is_one_gpu = where.device == "cuda" and where.runtime == "local"
    if trainer.max_staleness > 0 and trainer.stage == "rl" and is_one_gpu:
        why = "in one process on a GPU, generation and training take turns so far"
        fix = "set trainer.runtime=ray and actor_rollout_ref.rollout.nnodes=1, or it to 0"
        yield Finding(field="trainer.max_staleness", why=why, fix=fix)


def _offline_cluster(s: Situation) -> Finding:
    """An offline stage trains in one process, on one device."""
    why = f"the stage `{s.config.trainer.stage}` trains in one process, on one device"
    for name in ("nnodes", "n_gpus_per_node"):
        if s.is_changed(f"trainer.{name}"):
            return Finding(field=f"trainer.{name}", why=why, fix="set it to 1")
    return Finding(field="trainer.runtime", why=why, fix="set it to auto or local")
